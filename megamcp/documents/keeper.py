"""Documents as the gateway keeps them: what a checkpoint holds of each, and what can be read at a point.

Invariants:
- every writer holds the rollout's lock, in the transaction that publishes the move, so a head is read whole;
- a checkpoint of a document that nobody wrote to is a row, else also a content, kept once however many have it;
- a fork is no row at all; a rollback forgets the rollout's own rows, and its head is the checkpoint's again.

Calls write by the functions in `sql/documents.sql`.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import asyncpg

from megamcp.documents import journal as sql
from megamcp.documents.canonical import digest
from megamcp.documents.content import Splice, spliced, unpack
from megamcp.documents.difference import DocumentDiff, difference
from megamcp.environments import LoadedEnvironment

Sums = dict[str, str | None]
"""See `megamcp.digests`."""

_THREAD_BYTES = 64 << 10
"""Above this, a document is hashed beside the event loop."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a checkpoint keeps of one server's document."""

    version: int
    hash: bytes
    digest: str


async def freeze(
    connection: asyncpg.Connection, row: asyncpg.Record, environment: LoadedEnvironment, sums: Sums
) -> Mapping[str, Kept]:
    """What is to be kept of each document of a locked rollout; `sums` are moved on. Writes contents only."""
    if not environment.has_documents:
        return {}
    kept = await _kept(connection, row["checkpoint"])
    for written in await connection.fetch(sql.WRITTEN, row["id"], None):
        server = written["server"]
        content = await _head(connection, row["id"], written)
        digesting = asyncio.create_task(_digest(content))
        try:  # PostgreSQL packs the content away meanwhile
            content_hash = hashlib.sha256(content).digest()
            if not await connection.fetchval(sql.KEPT, content_hash):
                await connection.execute(sql.KEEP, content_hash, content)
        finally:
            known = await digesting
        kept[server] = Kept(written["version"], content_hash, known)
        await _set_sum(connection, environment, server, known, sums)
    return kept


async def publish(connection: asyncpg.Connection, checkpoint: asyncpg.Record, kept: Mapping[str, Kept]) -> None:
    """In the transaction that publishes the checkpoint: from here on the rollout's head stands there."""
    if kept:
        points = kept.values()
        columns = list(kept), [p.version for p in points], [p.hash for p in points], [p.digest for p in points]
        await connection.execute(sql.KEEP_POINTS, checkpoint["id"], *columns)
        await connection.execute(sql.FORGET, checkpoint["rollout"])


async def forget(connection: asyncpg.Connection, rollout: str, environment: LoadedEnvironment) -> None:
    """The rollout was rolled back or has ended: what it wrote since its checkpoint goes."""
    if environment.has_documents:
        await connection.execute(sql.FORGET, rollout)


@dataclass(frozen=True, slots=True)
class At:
    """Where a document stands at a point. `content` is known of heads; of others the hash says where it is."""

    version: int
    hash: bytes | None
    content: bytes | None = None


async def at(
    connection: asyncpg.Connection,
    environment: LoadedEnvironment,
    server: str,
    *,
    rollout: str | None,
    checkpoint: str | None,
) -> At | None:
    """At a rollout's head, a checkpoint or (neither) the base. None: the base, which no call has made yet."""
    if rollout is not None and (written := await connection.fetchrow(sql.WRITTEN, rollout, server)):
        return At(written["version"], None, await _head(connection, rollout, written))
    if checkpoint is not None and (point := await connection.fetchrow(sql.POINTS, checkpoint, server)):
        return At(point["version"], point["hash"])
    base = await connection.fetchrow(sql.BASE, environment.id, server)
    return base and At(base["version"], base["hash"])


async def move_sum(
    connection: asyncpg.Connection, environment: LoadedEnvironment, server: str, spot: At | None, sums: Sums
) -> None:
    """Puts a server's sum at a point among the others' of the checkpoint before it."""
    if spot is not None and spot.content is not None:
        await _set_sum(connection, environment, server, await _digest(spot.content), sums)


async def diff(connection: asyncpg.Connection, a: At | None, b: At | None, limit: int) -> DocumentDiff:
    """What differs between two points of one document."""
    if a is None or b is None or a.version == b.version:
        return DocumentDiff()
    before, after = await _content(connection, a), await _content(connection, b)
    if before == after:
        return DocumentDiff()
    return await asyncio.to_thread(lambda: difference(unpack(before), unpack(after), limit))


async def _kept(connection: asyncpg.Connection, checkpoint: str | None) -> dict[str, Kept]:
    if checkpoint is None:
        return {}
    rows = await connection.fetch(sql.POINTS, checkpoint, None)
    return {row["server"]: Kept(row["version"], row["hash"], row["digest"]) for row in rows}


async def _head(connection: asyncpg.Connection, rollout: str, written: asyncpg.Record) -> bytes:
    content: bytes = written["content"]
    if not written["deltas"]:
        return content
    rows = await connection.fetch(sql.DELTAS, rollout, written["server"])
    return spliced(content, [Splice(row["position"], row["removed"], row["added"]) for row in rows])


async def _content(connection: asyncpg.Connection, spot: At) -> bytes:
    if spot.content is not None:
        return spot.content
    found: Any = await connection.fetchval(sql.CONTENT, spot.hash)
    return bytes(found)


async def _digest(content: bytes) -> str:
    return digest(content) if len(content) < _THREAD_BYTES else await asyncio.to_thread(digest, content)


async def _set_sum(
    connection: asyncpg.Connection, environment: LoadedEnvironment, server: str, known: str, sums: Sums
) -> None:
    """None for a document that is as the environment starts, whatever it was between."""
    sums.pop(server, None)
    if known != await _base_digest(connection, environment, server):
        sums[server] = known


async def _base_digest(connection: asyncpg.Connection, environment: LoadedEnvironment, server: str) -> str:
    base = await connection.fetchrow(sql.BASE, environment.id, server)
    if base["digest"] is not None:
        return str(base["digest"])
    known = await _digest(await _content(connection, At(base["version"], base["hash"])))
    await connection.execute(sql.SET_BASE_DIGEST, environment.id, server, known)
    return known

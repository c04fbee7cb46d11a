"""What can be asked of one database from inside: marks, the way back, changes, calls.

Works on a connection of the superuser that reads and writes schema megamcp alone. Whatever touches a user's rows goes
by the database's hand (see `logins`): putting rows in, and turning them into JSON, may run functions of the user's.
"""

import asyncio
import logging
import math
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg

from megamcp.errors import Conflict, DeadlineExceeded
from megamcp.state.clones import diffs
from megamcp.state.clones.logins import OWNER
from megamcp.state.clones.types import Bound, CallRow, Mark, Standing
from megamcp.state.schema import MODULUS, TableDiff

# A mark may be of a checkpoint that was never published, so the last one that was ($2) says since when DDL counts.
_FREEZE = """select m."position", m.written, m.sum, m.call, m.bytes,
    m.exact and not exists (
        select from megamcp.log l where l.id > $2 and l.id <= m."position" and l.barrier is not null) as exact,
    (select o.sum from megamcp.marks o where o.position = 0) as origin,
    array(select c.nonce from megamcp.calls c, megamcp.here h where c.id > $1 and c.rollout = h.rollout) as nonces,
    m.bytes - (select b.bytes from megamcp.marks b, megamcp.here h where b.position = $2 and $2 >= h.trimmed) as behind
  from megamcp.mark() m"""

log = logging.getLogger(__name__)

_TRIMMED_AT_ONCE = 500
_PIECE = 1 << 20
_SHOWN_BYTES = 1 << 25  # of a table, in a diff
HandSession = Callable[[], AbstractAsyncContextManager[asyncpg.Connection]]

_CALLS = """select id, nonce, rollout, server, epoch, mode, tool, arguments, outcome, result, is_error, idempotency_key,
    fingerprint, began, ended from megamcp.calls where id > $1 order by id"""
_SEQUENCES = """select case when n.nspname = 'public' then '' else n.nspname || '.' end || c.relname as name,
       case when d.is_called then d.last_value else d.last_value - q.seqincrement end as value
  from pg_class c join pg_namespace n on n.oid = c.relnamespace join pg_sequence q on q.seqrelid = c.oid,
       lateral pg_get_sequence_data(c.oid) d
 where c.relkind = 'S' and c.relpersistence <> 't'
   and n.nspname not in ('pg_catalog', 'information_schema', 'megamcp')"""
# A temporary table would outlive the rewind in its session, and so would numbers that it has drawn in advance.
_END_SESSIONS = """select pg_terminate_backend(a.pid, 2000) from pg_stat_get_activity(null) a
   join pg_database d on d.oid = a.datid join pg_authid u on u.oid = a.usesysid
  where d.datname = current_database() and not u.rolsuper and u.rolname <> current_database() || '_hand'
    and (exists (select from pg_class where relpersistence = 't')
         or exists (select from pg_sequence where seqcache > 1))"""
# Rows never come by here whole: the hand reads them from the log, or from pieces where they are another database's.
_PLAN = """insert into megamcp.moves (n, relation, goes, places, hashes)
    select row_number() over (), p.relation, p.goes, p.places, p.hashes from {}"""
_PLAN_BACK = _PLAN.format("megamcp.plan(megamcp.way_back($1), true, megamcp.keyless()) p")
_BETWEEN = (
    "megamcp.marks m, lateral megamcp.plan(megamcp.spans($1, m.segment, m.position), false, $3) p where m.position = $2"
)
_PLAN_BETWEEN = _PLAN.format(_BETWEEN)
_PORTIONS = f"select p.relation, p.goes, p.places, p.hashes from {_BETWEEN}"
_PIECES = """select p.piece, case when p.piece = 0 then x.lengths end as lengths,
    substr(x.bytes, p.piece * $2 + 1, $2) as bytes
  from (select array_agg(octet_length(i.bytes) order by i.n) as lengths, string_agg(i.bytes, '' order by i.n) as bytes
          from (select convert_to(i.image, 'UTF8') as bytes, i.n
                  from unnest(megamcp.images($1)) with ordinality i (image, n) offset 0) i) x,
       generate_series(0, (octet_length(x.bytes) - 1) / $2) p (piece)"""
_PUT_PIECE = """insert into megamcp.moves (n, relation, goes, piece, lengths, bytes) values ($1, $2, $3, $4, $5, $6)"""
_PUT_HASHES = "insert into megamcp.moves (n, relation, goes, hashes) values ($1, $2, true, $3)"
_PLAN_SHOWN = """insert into megamcp.moves (n, relation, goes, lengths, bytes)
    select row_number() over (), $1, false, array[octet_length(i.bytes)], i.bytes
      from (select distinct on (h.k) h.k, convert_to(h.image, 'UTF8') as bytes
              from megamcp.hashed($1, $2, $3, $4) h) i
      join unnest($4, $5::bigint[]) w (k, copies) using (k), generate_series(1, w.copies)"""
_DONE = "select * from megamcp.sums(int8multirange(int8range($1, $2, '(]')))"
_WANTED = """select s.* from megamcp.marks m, lateral megamcp.sums(megamcp.spans($1, m.segment, m.position)) s
 where m.position = $2"""
_PATH_CALLS = """select c.id, nonce, rollout, server, epoch, mode, tool, arguments, outcome, result, is_error,
    idempotency_key, fingerprint, began, ended
  from megamcp.calls c, megamcp.marks m
 where m.position = $2 and c.id > $1 and c.id <= m.call and megamcp.on_path(m.segment, c.segment, c.id) order by c.id"""
_COPY_CALL = """insert into megamcp.calls (id, nonce, rollout, server, epoch, segment, mode, tool, arguments, outcome,
    result, is_error, idempotency_key, fingerprint, began, ended) overriding system value
  select $1, $2, $3, $4, $5, h.segment, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15 from megamcp.here h"""


# How much log there is between here and a mark ($1), and from an earlier position ($2) to it.
_WEIGHT = """(select coalesce(sum(coalesce(pg_column_size(l.removed), 0) + coalesce(pg_column_size(l.added), 0)), 0)
  from unnest({}) r (span) join megamcp.log l on l.id >= lower(r.span) and l.id < upper(r.span))"""
_WEIGHTS = f"""select {_WEIGHT.format("megamcp.way_back(m.position)")} as back,
    {_WEIGHT.format("megamcp.spans($2, m.segment, m.position)")} as forth,
    pg_database_size(current_database()) as size
  from megamcp.marks m where m.position = $1"""
_COPY_BYTES = 1 << 20
_SIZE_PER_LOG = 256


class Inside:
    """One database. What moves it (`mark`, `rewind`, `redo`, `bind`) wants the lock of `Cluster.hold`."""

    def __init__(self, connection: asyncpg.Connection, hand: HandSession) -> None:
        self.connection = connection
        self._hand = hand

    async def mark(self) -> Mark:
        """A position to come back to: the last one where nothing happened since."""
        return _mark(await self.connection.fetchrow("select * from megamcp.mark()"))

    async def freeze(self, after: int, base: int) -> tuple[Mark, int | None, list[uuid.UUID], int | None]:
        """A mark; the sum of what differs from the source; nonces of its rollout's calls with an id above `after`.

        Last, how much log is between the mark and an earlier one, `base`; None where that was trimmed.
        """
        row = await self.connection.fetchrow(_FREEZE, after, base)
        mark = _mark(row)
        total = None if mark.digest is None else (mark.digest - int(row["origin"])) % MODULUS
        return mark, total, row["nonces"], row["behind"]

    async def bind(self, rollout: str, server: str, epoch: int) -> None:
        """Say whose database this is. Handles of anybody else, or of an older epoch, are refused from now on."""
        await self.connection.execute(
            "update megamcp.here set rollout = $1, server = $2, epoch = $3", rollout, server, epoch
        )

    async def bound(self) -> Bound | None:
        """Whose database this is; None: nobody's."""
        row = await self.connection.fetchrow("select rollout, server, epoch from megamcp.here")
        return None if row["rollout"] is None else Bound(*row.values())

    async def position(self) -> int:
        """The end of the log: no position in it is above."""
        return int(await self.connection.fetchval("select megamcp.head()"))

    async def standing(self, position: int) -> Standing:
        """Whether what is here now is the state of a mark, as it is, and what else a copy of it would be."""
        return Standing(*(await self.connection.fetchrow("select * from megamcp.standing($1)", position)).values())

    async def origin_sum(self) -> int:
        """The digest of what the source holds, which is position 0."""
        return int(await self.connection.fetchval("select sum from megamcp.marks where position = 0"))

    async def reachable(self, position: int) -> bool:
        """Whether `rewind` can get there: a mark, and nothing after it that can't be undone row by row."""
        return bool(await self.connection.fetchval("select megamcp.reachable($1)", position))

    async def untouched(self, position: int) -> bool:
        """Whether nothing has happened after a position that can't be undone row by row."""
        return not await self.connection.fetchval(
            "select exists (select from megamcp.log where id > $1 and barrier is not null)", position
        )

    async def is_far(self, position: int, base: int, *, shared: bool) -> bool:
        """Whether a mark is sooner reached from a copy that stands at an earlier position than by undoing what is here.

        Rows are put back at some MB of log a second. A copy costs as much as `_COPY_BYTES` of log, and where it doesn't
        share its blocks 1/`_SIZE_PER_LOG` of the database's size besides; then the log from `base` on is played.
        """
        weights = await self.connection.fetchrow(_WEIGHTS, position, base)
        if weights is None:
            return False
        copied = _COPY_BYTES + (0 if shared else weights["size"] // _SIZE_PER_LOG)
        return bool(weights["back"] > weights["forth"] + copied)

    async def rewind(self, position: int, *, within_s: float | None = None) -> None:
        """Put rows and sequences back, in place. Whole or not at all, but for sequences, which a second run sets.

        Only code of the user's that meddles at the hand's COMMIT gets a state in between. Its log is still true.
        Raises `Conflict` (`not_reachable`, `not_exact`), `DeadlineExceeded`.
        """
        if not await self.reachable(position):
            raise Conflict(f"Position {position} can't be reached row by row.", code="not_reachable")
        await self.connection.execute(_END_SESSIONS)
        if await self.connection.fetchval("select exists (select from megamcp.log where id > $1)", position):
            async with self._planning(), self._moving(within_s) as hand:
                await self.connection.execute(_PLAN_BACK, position)
                for n in range(1, 1 + await self.connection.fetchval("select count(*) from megamcp.moves")):
                    await _exactly(hand.execute("select megamcp.carry_out($1)", n))
                if not await _exactly(hand.fetchval("select megamcp.is_back($1)", position)):
                    raise _not_exact("they came out otherwise.", _MEDDLED)
            if not await self.connection.fetchval("select megamcp.is_back($1)", position):
                raise _not_exact("they were changed at the very end.", _MEDDLED)
        # Cut off here, the rows are the mark's and nobody knows: a second run finds nothing to undo.
        await self.connection.execute("select megamcp.leap($1)", position)
        await self.connection.execute("select megamcp.restore_sequences($1)", position)

    async def go_back(self, position: int, *, within_s: float | None = None) -> bool:
        """`rewind`, if it can be done: False after DDL, or where rows can't be put back any more, or in time."""
        if not await self.reachable(position):
            return False
        try:
            await self.rewind(position, within_s=within_s)
        except (Conflict, DeadlineExceeded) as error:
            if error.code not in ("not_exact", "rewind_too_slow"):
                raise
            log.warning("database can't go back to position %d row by row: %s %s", position, error, error.hint)
            return False
        return True

    async def trim(self, upto: int) -> int:
        """Forget the log up to a mark, and marks below it; gives how many entries. Calls need not wait for it."""
        await self.connection.execute("select megamcp.begin_trim($1)", upto)
        gone = 0
        while some := await self.connection.fetchval("select megamcp.trim($1)", _TRIMMED_AT_ONCE):
            gone += some
        if gone:
            await self.connection.execute("vacuum (truncate off) megamcp.log, megamcp.marks")
        return gone

    async def forget_log(self, position: int) -> None:
        """All of it, in a copy that will stay at this mark."""
        await self.connection.execute("select megamcp.begin_trim($1)", position)
        await self.connection.execute("truncate megamcp.log")

    async def redo(self, source: "Inside", after: int, upto: int, *, within_s: float | None = None) -> int:
        """Bring this database from the state that `source` had at `after` to the one that it had at `upto`.

        Both must come from one clone, with no DDL between `after` and `upto`. Calls of the path come along;
        returns the id of the last one.
        Raises `Conflict` (`not_reachable`, `not_exact`), `DeadlineExceeded`.
        """
        if await source.connection.fetchval(
            "select exists (select from megamcp.log where id > $1 and id <= $2 and barrier is not null)"
            " or exists (select from megamcp.here where trimmed > $1)",
            after,
            upto,
        ):
            raise Conflict(f"What happened after {after} can't be redone row by row.", code="not_reachable")
        target = await source.connection.fetchrow(
            "select sequences::text, sum from megamcp.marks where position = $1", upto
        )
        if target is None:
            raise Conflict(f"There is no mark at {upto}.", code="not_reachable")
        keyless = await self.connection.fetchval("select megamcp.keyless()")
        before = await self.position()
        async with self._planning(), self._moving(within_s) as hand:
            async for n in self._portions_of(source, after, upto, keyless):
                await _exactly(hand.execute("select megamcp.carry_out($1)", n))
        done = await self.connection.fetch(_DONE, before, await self.position())
        if done != await source.connection.fetch(_WANTED, after, upto) or not await self.untouched(before):
            raise _not_exact("they came out otherwise.", _MEDDLED)
        await self.connection.execute("select megamcp.set_sequences($1::text::jsonb)", target["sequences"])
        last = await self.connection.fetchval("select coalesce(max(id), 0) from megamcp.calls")
        calls = await source.connection.fetch(_PATH_CALLS, last, upto)
        await self.connection.executemany(_COPY_CALL, [tuple(row.values()) for row in calls])
        await self.connection.execute(
            "select setval(pg_get_serial_sequence('megamcp.calls', 'id'), greatest($1::bigint, 1), $1 > 0)",
            max([last, *(row["id"] for row in calls)]),
        )
        mark = await self.mark()
        if None not in (mark.digest, target["sum"]) and mark.digest != int(target["sum"]):
            raise _not_exact("they came out otherwise.", _MEDDLED)
        return mark.call

    @asynccontextmanager
    async def _moving(self, within_s: float | None) -> AsyncIterator[asyncpg.Connection]:
        """A transaction of the hand's. What runs in it may be code of the user's: in time it ends, with its backend."""
        async with self._hand() as hand:
            backend = hand.get_server_pid()
            await self.connection.execute("update megamcp.here set hand = $1", backend)
            try:
                async with asyncio.timeout(within_s):
                    await hand.execute("begin")
                    yield hand
                    await _exactly(hand.execute("commit"))
            except BaseException as error:
                # Not by ROLLBACK, which would wait for whatever still runs there.
                hand.terminate()
                await self.connection.execute("select pg_terminate_backend($1, 5000)", backend)
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(
                        f"The rows could not be put back within {within_s:g} s.",
                        code="rewind_too_slow",
                        hint="Nothing was changed. MEGAMCP_REWIND_TIMEOUT_S sets the limit.",
                    ) from error
                raise

    @asynccontextmanager
    async def _planning(self) -> AsyncIterator[None]:
        """What was left by one that was cut off is taken away first."""
        await self.connection.execute("select megamcp.clear_moves()")
        yield
        await self.connection.execute("select megamcp.clear_moves()")

    async def _portions_of(self, source: "Inside", after: int, upto: int, keyless: Sequence[int]) -> AsyncIterator[int]:
        """Brings what happened in `source` over, a portion at a time and in pieces."""
        async with source.connection.transaction(readonly=True):
            n = 0
            async for row in source.connection.cursor(_PORTIONS, after, upto, keyless, prefetch=1):
                n += 1
                which = n, row["relation"]
                if row["hashes"] is not None:
                    await self.connection.execute(_PUT_HASHES, *which, row["hashes"])
                else:
                    async for piece in source.connection.cursor(_PIECES, row["places"], _PIECE, prefetch=1):
                        await self.connection.execute(_PUT_PIECE, *which, row["goes"], *piece.values())
                yield n
                await self.connection.execute("delete from megamcp.moves")

    async def changes(self, a: int, b: int, limit: int) -> dict[str, TableDiff] | None:
        """Rows that differ between two marks, by key, at most `limit` a table. None where DDL came after the first."""
        first, last = min(a, b), max(a, b)
        if not await self.reachable(first):
            return None
        async with self._planning():
            await self.connection.execute(_PLAN_BETWEEN, first, last, [])
            found = await self._planned_rows(limit, _SHOWN_BYTES)
        return found if a <= b else {name: one.reversed() for name, one in found.items()}

    async def shown(
        self, relation: int, key: Sequence[str] | None, label: str, wanted: Mapping[bytes, int]
    ) -> list[dict[str, Any]]:
        """Rows of a table as JSON objects, by their keys' hashes (`megamcp.hashed`) and how many copies of each."""
        async with self._planning():
            await self.connection.execute(_PLAN_SHOWN, relation, key, label, list(wanted), list(wanted.values()))
            found = await self._planned_rows(sum(wanted.values()), math.inf)
        return [row for table in found.values() for row in table.added]

    async def _planned_rows(self, limit: int, most: float) -> dict[str, TableDiff]:
        shapes = await self.connection.fetch(diffs.SHAPES)
        if not shapes:
            return {}
        async with self._hand() as hand, hand.transaction(readonly=True):
            return await diffs.by_table(hand, shapes, limit, most)

    async def calls(self, after: int) -> list[CallRow]:
        """Calls with an id above `after`, in order."""
        return [CallRow(*row.values()) for row in await self.connection.fetch(_CALLS, after)]

    async def tell(self, nonces: Sequence[Any], reason: str) -> None:
        """Say why calls are about to be ended: words, or a whole result. `call_fail` then records that."""
        await self.connection.executemany(
            "insert into megamcp.ended_calls values ($1, $2) on conflict (nonce) do nothing",
            [(nonce, reason) for nonce in nonces],
        )

    async def end_call(self, nonce: Any) -> bool:
        """End the backend that runs a call, or waits to. Says whether there was one."""
        return bool(await self.connection.fetchval("select megamcp.end_call($1)", nonce))

    async def call_fail(
        self, handle: str, tool: str, arguments: str, error: str, *, deed: str = ""
    ) -> tuple[bool, str, bool]:
        """See `megamcp.call_fail`: (recorded, result, is_error). `deed` is for a copy that no call has reached yet."""
        async with self.connection.transaction():
            await self.connection.execute("select set_config('megamcp.deed', $1, true)", deed)
            row = await self.connection.fetchrow(
                "select * from megamcp.call_fail($1, $2, $3, $4)", handle, tool, arguments, error
            )
        return row["recorded"], row["result"], row["is_error"]

    async def digest(self) -> int:
        """128-bit sum of all rows, read from the tables."""
        return int(await self.connection.fetchval("select megamcp.digest()"))

    async def sequences(self) -> dict[str, int]:
        """The value that each sequence handed out last."""
        return {row["name"]: row["value"] for row in await self.connection.fetch(_SEQUENCES)}


def _mark(row: asyncpg.Record) -> Mark:
    total = None if row["sum"] is None else int(row["sum"])
    return Mark(row["position"], row["written"], row["exact"], total, row["call"], row["bytes"])


_MEDDLED = "A trigger or rule that is ENABLE ALWAYS or REPLICA may have changed them."
_RIGHTS = {"table": "SELECT, INSERT, UPDATE, DELETE", "function": "EXECUTE", "schema": "USAGE", "type": "USAGE"}


def _why_not(error: asyncpg.PostgresError) -> str:
    denied = re.match(r"permission denied for (\w+) (.+)", str(error))
    if denied and denied[1] in _RIGHTS:
        return (
            f"Rows are put back with the rights of {OWNER}, from which this one was revoked:"
            f" GRANT {_RIGHTS[denied[1]]} ON {denied[1].upper()} {denied[2]} TO {OWNER}."
        )
    return (
        "A check, domain or index of the environment refuses rows that it once accepted, or a trigger that is"
        " ENABLE ALWAYS changed them."
    )


async def _exactly(work: Awaitable[Any]) -> Any:
    """Run what puts rows back; an error of it is a state that can't be put back."""
    try:
        return await work
    except asyncpg.PostgresError as error:
        # The SQLSTATE may be one that a function of the user's has chosen. FATAL it can't say.
        if getattr(error, "severity_en", None) != "ERROR":
            raise
        raise _not_exact(str(error), _why_not(error), error.sqlstate) from error


def _not_exact(what: str, hint: str, sqlstate: str | None = None) -> Conflict:
    return Conflict(f"The rows can't be put back: {what}", code="not_exact", hint=hint, sqlstate=sqlstate)

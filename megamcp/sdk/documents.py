"""Calls to a plain class whose objects' state is kept as documents (kind `document`), exactly once.

Within the call's own transaction: ask where the rollout's document stands (`document_head`), run the method on an
object that holds that version, and write down what it changed (`document_splice`, or `document_replace` where many
splices have gathered). So the document's change and the call's result are kept together or not at all. Where an object
holds the rollout's newest version nothing is loaded: so it is in an unbroken run of calls.

A method that raises, or leaves what is no JSON, has changed nothing: its object is thrown away. So has a read-only one
that did change something; its call is an error. MEGAMCP_TRUST_READ_ONLY=1 in the server's environment spares the look
that tells, which costs what it costs for a call that writes.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from megamcp.documents.content import Splice, packed_whole, spliced
from megamcp.errors import MegaMCPError
from megamcp.sdk.classes import Keeper
from megamcp.sdk.database import Database, Lease
from megamcp.sdk.instances import Change, Instance, Pool, first_content
from megamcp.sdk.results import Outcome, failure, from_exception

log = logging.getLogger(__name__)

HEAD = "select * from megamcp.document_head($1, $2)"
BASE = "select megamcp.document_base($1, $2)"
SPLICE = "select megamcp.document_splice($1, $2, $3, $4, $5)"
REPLACE = "select megamcp.document_replace($1, $2, $3)"

_DELTAS = 128
"""Writing it whole costs what dozens of splices do; so many are put into a content in a few milliseconds."""
_SMALL = 4096
"""A document so small is written whole."""
DEFAULT_BYTES = 32 << 20
_INSTANCES = 256
_ROOM = 256 << 20


Run = Callable[[Any, datetime | None], Awaitable[Outcome]]
"""Runs the method on an object, at the environment's time."""


class Documents:
    """The documents of one tool server."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._limit = _number("MEGAMCP_TOOL_DOCUMENT_BYTES", DEFAULT_BYTES)
        self._pool = Pool(_number("MEGAMCP_TOOL_INSTANCES", _INSTANCES), _number("MEGAMCP_TOOL_INSTANCE_BYTES", _ROOM))
        self._trusts = os.environ.get("MEGAMCP_TRUST_READ_ONLY", "0") not in ("", "0")
        self._name = os.environ.get("MEGAMCP_TOOL_SERVER", "The tool server")
        self._alone = asyncio.Lock()
        self._one: Instance | None = None

    async def call(self, database: Database, lease: Lease, handle: str, read_only: bool, run: Run) -> Outcome:
        """One call, in its transaction."""
        try:
            instance, clock = await self._obtain(database, lease, handle)
        except MegaMCPError as error:
            return from_exception(error)[0]
        keep = False
        try:
            keep, change, outcome = await self._judge(instance, await run(instance.object, clock), read_only)
            if change is not None:
                keep = False
                await self._write(lease, handle, instance, change)
                keep = True
            return outcome
        finally:  # also where the call was cut off
            if keep:
                self._pool.give(instance)
            else:
                instance.drop()

    async def _judge(
        self, instance: Instance, outcome: Outcome, read_only: bool
    ) -> tuple[bool, Change | None, Outcome]:
        """Whether the object holds what may be kept, what the call changes, and its result."""
        if read_only and self._trusts and not outcome.is_error:
            return True, None, outcome
        try:
            change = await instance.change(self._limit)
        except Exception as error:
            return False, None, outcome if outcome.is_error else from_exception(self._failed("dump", error))[0]
        if change is None or outcome.is_error:
            return change is None, None, outcome
        return (False, None, _changed_by_reading()) if read_only else (True, change, outcome)

    async def alone(self, read_only: bool, run: Run) -> Outcome:
        """One call of a server that serves nobody's rollouts: one object for all, in this process only."""
        async with self._alone:
            instance = self._one or await Instance.of(self._keeper, await self._first())
            self._one, keep, change = None, False, None
            try:
                keep, change, outcome = await self._judge(instance, await run(instance.object, None), read_only)
                return outcome
            finally:  # also where the call was cut off
                if change is not None:
                    instance.changed(change, change.packed.content())
                if not keep:
                    instance.drop()
                    instance = await Instance.of(self._keeper, instance.content)
                self._one = instance

    async def fault_of(self, document: Any) -> str | None:
        """Why no object can hold a document, if none can."""
        try:
            (await Instance.of(self._keeper, packed_whole(document))).drop()
        except Exception as error:
            said = error.message if isinstance(error, MegaMCPError) else f"{type(error).__name__}: {error}"
            return f"{self._name}: the document that it is to start as (state.initial) can't be loaded: {said}"
        return None

    def close(self) -> None:
        """No object is needed any more."""
        self._pool.clear()
        if self._one is not None:
            self._one.drop()

    async def _first(self) -> bytes:
        try:
            return await first_content(self._keeper, self._limit)
        except Exception as error:
            raise self._failed("first document", error) from error

    async def _obtain(self, database: Database, lease: Lease, handle: str) -> tuple[Instance, datetime]:
        head = await lease.driver.fetchrow(HEAD, handle, self._pool.versions)
        if head["version"] is None:
            # Before anything is kept on top of it, and for good: not in this transaction, which may be undone.
            await database.aside(BASE, handle, await self._first())
            head = await lease.driver.fetchrow(HEAD, handle, [])
        instance = self._pool.take(head["version"])
        if instance is None and head["content"] is None:
            head = await lease.driver.fetchrow(HEAD, handle, [])  # another call has just taken it
        if instance is None:
            changes = zip(head["positions"] or (), head["removed"] or (), head["added"] or (), strict=True)
            content = spliced(head["content"], [Splice(*one) for one in changes])
            try:
                instance = await Instance.of(self._keeper, content)
            except Exception as error:
                raise self._failed("load", error) from error
        instance.version = head["version"]
        instance.deltas, instance.delta_bytes = head["deltas"], head["delta_bytes"]
        return instance, head["clock"]

    def _failed(self, what: str, error: Exception) -> MegaMCPError:
        """The error, by the server's name."""
        if isinstance(error, MegaMCPError):
            error.message = f"{self._name}: {error.message}"
            return error
        log.error("%s of the tool server's class raised", what, exc_info=error)
        return MegaMCPError(
            f"{self._name}: its {what} failed: {type(error).__name__}: {error}; nothing of this call was kept.",
            code="document_failed",
        )

    async def _write(self, lease: Lease, handle: str, instance: Instance, change: Change) -> None:
        content, found = change.packed.content(), change.splices
        added = sum(len(one.added) for one in found)
        deltas, gathered = instance.deltas + len(found), instance.delta_bytes + added
        if len(content) <= _SMALL or deltas > _DELTAS or gathered > len(content) // 2:
            made = await lease.driver.fetchval(REPLACE, handle, instance.version, content)
        else:
            columns = [one.position for one in found], [one.removed for one in found], [one.added for one in found]
            made = await lease.driver.fetchval(SPLICE, handle, instance.version, *columns)
        instance.changed(change, content)
        instance.version = made


def _changed_by_reading() -> Outcome:
    return failure(
        "changed_by_reading",
        "This tool says that it only reads, but it changed the document; nothing of it was kept.",
        hint="Leave read_only out where it is defined.",
    )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default

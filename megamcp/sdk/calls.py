"""One recorded call: lock, effects and result in one transaction, exactly once.

    BEGIN; call_begin; SAVEPOINT; body; [ROLLBACK TO SAVEPOINT;] call_finish; COMMIT

`call_begin` is the first statement: it verifies the handle, takes the rollout's lock and only then may
anything take a snapshot. A tool that raises is rolled back to the savepoint and its error is the recorded
result. A read-only tool runs in READ ONLY and is always rolled back to the savepoint, which makes the
transaction writable for its record.

Where the transaction ended before the call did (a tool's own COMMIT, a terminated backend, a lost
connection), `call_fail` asks under the same lock what became of it and records the failure if nothing did.
Only what comes before the tool is sent again; whatever may have run is left to the gateway's retry, which is
safe by its idempotency key.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import asyncpg

from megamcp import outages
from megamcp.sdk.database import Database, Guarded, Lease, ToolTransactionError, is_lost, unavailable
from megamcp.sdk.inject import Clock, Random
from megamcp.sdk.results import CallRefused, Outcome, failure, from_exception

log = logging.getLogger(__name__)

BEGIN = "select * from megamcp.call_begin($1, $2, $3)"
FINISH = "select megamcp.call_finish($1, $2, $3, $4, $5)"
FAIL = "select * from megamcp.call_fail($1, $2, $3, $4)"
# A name that tool code can't guess: a savepoint of the same name would be the one that is rolled back to.
_SAVEPOINT = f"savepoint megamcp_{secrets.token_hex(8)}"
_READ_ONLY = f"{_SAVEPOINT}; set transaction read only"
_UNDO = f"rollback to {_SAVEPOINT}"

_TRIES = 20
_PAUSE_S = 0.02

# JSON-RPC code by SQLSTATE of a refusal, as the gateway's own errors have them (megamcp.errors).
_RPC_CODES = {
    "MM401": -32001,
    "MM402": -32008,
    "MM403": -32001,
    "MM404": -32602,
    "MM408": -32008,
    "MM409": -32003,
    "MM410": -32004,
    "MM422": -32602,
    "MM423": -32003,
    "MM429": -32005,
}

Body = Callable[[Lease, Clock, Random], Awaitable[Outcome]]
"""Runs the tool. Turns its exceptions into outcomes and raises only when the call is cancelled."""


class _Ended(Exception):
    """The transaction is gone. `error` is the result to record, `lost` that the connection failed, not the
    tool."""

    def __init__(self, error: Outcome, *, lost: bool) -> None:
        super().__init__()
        self.error = error
        self.lost = lost


@dataclass(frozen=True, slots=True)
class Call:
    handle: str
    tool: str
    arguments: str
    read_only: bool
    reads_clock: bool = False


async def run_recorded(database: Database, call: Call, body: Body) -> Outcome:
    """Raises CallRefused where the call could not be made or its outcome can't be told."""
    tries = 0
    while True:
        tries += 1
        try:
            return await _attempt(database, call, body)
        except _NotBegun as error:
            if tries >= _TRIES:
                raise unavailable(
                    "The database connection broke before the tool ran; nothing was done.", error, outcome="none"
                ) from error
        except _Ended as ended:
            return await _settle(database, call, ended)
        await asyncio.sleep(min(_PAUSE_S * (tries - 1), 0.2))


class _NotBegun(Exception):
    """BEGIN or `call_begin` met a connection that was gone, so another one may try: the handle is still unused."""


async def _attempt(database: Database, call: Call, body: Body) -> Outcome:
    async with database.lease() as lease:
        transaction = lease.driver.transaction()
        try:
            await transaction.start()
        except Exception as error:
            if is_lost(error):
                raise _NotBegun from error
            raise
        lease.guard.read_only = call.read_only
        row = await _begin(lease, transaction, call)
        if row["replayed"]:
            await _commit(transaction, call)
            lease.keep = True
            return Outcome(row["result"].encode(), row["is_error"])
        outcome = await _run(lease, call, body)
        lease.guard.ended = True
        outcome = await _finish(lease, call, outcome)
        await _commit(transaction, call)
        lease.keep = True
        return outcome


async def _run(lease: Lease, call: Call, body: Body) -> Outcome:
    """The body, for as long as its connection lives: a tool that waits for something else must not outlive it."""
    task = asyncio.current_task()
    assert task is not None
    lost = False

    def on_lost(_connection: Any) -> None:
        nonlocal lost
        lost = True
        task.cancel()

    fetch = _fetcher(lease.guard)
    lease.driver.add_termination_listener(on_lost)
    try:
        now = await fetch("select now()") if call.reads_clock else None
        outcome = await body(lease, Clock(now, fetch), Random(fetch))
    except asyncio.CancelledError:
        if lost and task.uncancel() == 0:
            return _disconnected()
        raise
    except Exception as error:  # only the clock's: it counts as if the tool had asked
        return from_exception(error)[0]
    finally:
        lease.driver.remove_termination_listener(on_lost)
    if lost:  # and the tool swallowed its cancellation
        task.uncancel()
        return _disconnected()
    return outcome


async def _begin(lease: Lease, transaction: Any, call: Call) -> Any:
    try:
        row = await lease.driver.fetchrow(BEGIN, call.handle, call.tool, call.arguments)
        if not row["replayed"]:
            await lease.driver.execute(_READ_ONLY if call.read_only else _SAVEPOINT)
    except Exception as error:
        # Nothing has run: to end the transaction is all there is to do.
        if is_lost(error):
            raise _NotBegun from error
        refusal = _refusal(error)
        lease.keep = await _rolled_back(transaction)
        raise refusal from error
    return row


async def _rolled_back(transaction: Any) -> bool:
    try:
        await transaction.rollback()
    except Exception:
        log.debug("a refused call could not be rolled back", exc_info=True)
        return False
    return True


async def _finish(lease: Lease, call: Call, outcome: Outcome) -> Outcome:
    """Undoes what must be undone and records the result. Raises _Ended when the transaction is gone."""
    if lease.guard.spoiled:
        outcome = _spoiled(lease.guard.spoiled)
    if lease.driver.is_closed():
        raise _Ended(_disconnected(), lost=True)
    if not lease.guard.in_transaction():
        raise _Ended(_spoiled(lease.guard.spoil("end")), lost=False)
    try:
        if outcome.is_error or call.read_only:
            await lease.driver.execute(_UNDO)
        await _record(lease, call, outcome)
    except asyncpg.InFailedSQLTransactionError:
        # The tool swallowed an SQL error and went on: PostgreSQL keeps nothing of such a transaction.
        outcome = failure(
            "transaction_aborted",
            "The tool went on after an SQL error, so nothing of this call could be kept.",
            hint="Wrap the statement that may fail in db.begin_nested().",
        )
        await _record_again(lease, call, outcome)
    except Exception as error:
        raise _ended_by(error, call) from error
    return outcome


async def _record(lease: Lease, call: Call, outcome: Outcome) -> None:
    await lease.driver.fetchval(FINISH, call.handle, call.tool, call.arguments, outcome.text, outcome.is_error)


async def _record_again(lease: Lease, call: Call, outcome: Outcome) -> None:
    try:
        await lease.driver.execute(_UNDO)
        await _record(lease, call, outcome)
    except Exception as error:
        raise _ended_by(error, call) from error


async def _commit(transaction: Any, call: Call) -> None:
    try:
        await transaction.commit()
    except Exception as error:
        raise _ended_by(error, call) from error


def _ended_by(error: Exception, call: Call) -> _Ended:
    if is_lost(error):
        return _Ended(_disconnected(), lost=True)
    state = getattr(error, "sqlstate", None) or ""
    if state in ("MM423", "MM424"):
        return _Ended(_spoiled(ToolTransactionError("end")), lost=False)
    log.warning("tool %s: its transaction could not be finished: %s", call.tool, error)
    if isinstance(error, asyncpg.InterfaceError):
        return _Ended(
            failure("statement_running", "The tool returned while a statement of its own was still running."),
            lost=False,
        )
    if isinstance(error, asyncpg.PostgresError):
        text = f"{type(error).__name__} ({state}): {error.args[0] if error.args else ''}"
        return _Ended(failure("sql_error", text, sqlstate=state), lost=False)
    return _Ended(from_exception(error)[0], lost=False)


async def _settle(database: Database, call: Call, ended: _Ended) -> Outcome:
    """What became of a call whose transaction is gone: its recorded result, or the failure that is recorded
    now."""
    row = None
    try:
        async with database.lease() as lease:
            lease.guard.ended = True
            row = await lease.driver.fetchrow(FAIL, call.handle, call.tool, call.arguments, ended.error.text)
            lease.keep = True
    except (CallRefused, *outages.DRIVER) as error:
        log.warning("tool %s: its failure could not be recorded: %s", call.tool, error)
        if not ended.lost:
            return ended.error
        raise unavailable("The database connection broke during the call.", error, outcome="unknown") from error
    if row["recorded"]:
        return Outcome(row["result"].encode(), row["is_error"])
    if ended.lost:
        raise unavailable(
            "The database connection broke during the call; nothing of it was kept.", None, outcome="none"
        )
    return ended.error


def _refusal(error: Exception) -> CallRefused:
    """An error of `call_begin` as it goes to the gateway."""
    state = getattr(error, "sqlstate", None) or ""
    if state.startswith("MM"):
        try:
            detail = json.loads(getattr(error, "detail", None) or "")
            return CallRefused(detail["code"], detail["message"], rpc=_RPC_CODES.get(state, -32603), sqlstate=state)
        except (ValueError, KeyError, TypeError):
            pass
    if state in ("55P03", "57014", "25P04"):
        return CallRefused("deadline_exceeded", "The call waited for its rollout until its deadline.", rpc=-32008)
    log.error("call_begin failed: %s", error)
    return CallRefused("internal", f"The call could not begin ({type(error).__name__}).", sqlstate=state or None)


def _spoiled(error: ToolTransactionError) -> Outcome:
    return from_exception(error)[0]


def _disconnected() -> Outcome:
    return failure("database_unavailable", "The database connection broke during the call; nothing of it was kept.")


def _fetcher(guard: Guarded) -> Callable[..., Awaitable[Any]]:
    async def fetch(sql: str, *arguments: Any) -> Any:
        if guard.ended:
            raise RuntimeError("The call has ended; its clock and random can't be kept.")
        if guard.spoiled:
            raise guard.spoiled
        return await guard.driver.fetchval(sql, *arguments)

    return fetch

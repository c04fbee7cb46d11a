"""The lock of one database: who moves it has it alone, calls and clients' transactions share it with their own kind.

Runs on a connection of the superuser, whose session has the lock until `let_go`. What those who want to get through do
is in `sql/calls.sql` (`admit`, `enter`). Says nothing about what may be done under the lock.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import asyncpg

from megamcp import outages

LOCK: Final = 7723
# Whoever waits for the lock keeps out who comes after. So it waits in turns, each twice as long as the one before.
FIRST_TURN_S: Final = 0.25
LONGEST_TURN_S: Final = 4.0
_KNOCK_S: Final = 0.05

# The functions, not the views on them: those show a session nothing but its own login's (see rights.sql).
_HOLDERS = """select distinct l.pid, a.application_name from pg_lock_status() l
  join pg_database d on d.oid = l.database and d.datname = current_database()
  join pg_stat_get_activity(null) a on a.pid = l.pid
 where l.locktype = 'advisory' and l.granted and l.objid = 7723 and l.classid = 0 and l.objsubid = 1
   and ($1 or l.mode = 'ExclusiveLock')"""

OnBusy = Callable[[list[str]], Awaitable[None]]


async def taken(connection: Any, until: float, *, shared: bool) -> bool:
    """Whether the lock was had until then (monotonic seconds). Between turns as much time is the others', so that one
    open transaction doesn't stop all other clients."""
    turn_s = FIRST_TURN_S
    while True:
        if await _try(connection, min(turn_s, until - time.monotonic()), shared):
            return True
        rested = min(time.monotonic() + turn_s, until)
        while time.monotonic() < rested:
            await asyncio.sleep(_KNOCK_S)
            if await _try(connection, 0, shared):
                return True
        if time.monotonic() >= until:
            return False
        turn_s = min(2 * turn_s, LONGEST_TURN_S)


async def _try(connection: Any, wait_s: float, shared: bool) -> bool:
    function = "pg_advisory_lock_shared" if shared else "pg_advisory_lock"
    try:
        await connection.execute(f"set local lock_timeout = {max(1, int(wait_s * 1000))}; select {function}({LOCK})")
    except asyncpg.LockNotAvailableError:
        return False
    return True


async def let_go(connection: Any) -> None:
    """Whatever locks the session has."""
    try:
        await connection.execute("select pg_advisory_unlock_all()")
    except outages.DRIVER:
        connection.terminate()


async def end_holders(connection: Any, on_busy: OnBusy, *, shared: bool) -> None:
    """End the backends that are in the way, after `on_busy` was told which calls that are."""
    holders = await connection.fetch(_HOLDERS, not shared)
    calls = [row["application_name"].partition(" ") for row in holders]
    await on_busy([nonce for kind, _, nonce in calls if kind == "call"])
    for row in holders:
        await connection.execute("select pg_terminate_backend($1, 1000)", row["pid"])

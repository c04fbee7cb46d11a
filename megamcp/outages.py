"""Which errors say that a connection to PostgreSQL died or could not be made, in one place.

asyncpg tells it in four ways, by the moment in which the connection dies: an SQLSTATE (PostgreSQL's last word, or
asyncpg's own 08003), an `InterfaceError` (the connection is closed already), an `InternalClientError` (PostgreSQL's
last word crossed the next statement), an `OSError` (nobody listens, reset, no answer in time).

What a caller is told then is not said here: `store.translate`, the clusters of databases and the SDK each know.
"""

import asyncpg

BROKEN = (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, EOFError)
"""What is raised beside PostgreSQL's own errors. A TimeoutError is an OSError."""
DRIVER = (asyncpg.PostgresError, *BROKEN)
"""All that using a connection may raise."""

_STATES = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04"})


def lost(error: BaseException) -> bool:
    """Whether the connection failed, not what was asked of it."""
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        return state[:2] == "08" or state in _STATES
    if isinstance(error, asyncpg.InterfaceError):  # also the driver's word for being used wrongly
        return "closed" in str(error)
    return isinstance(error, BROKEN)

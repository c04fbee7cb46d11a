"""Each way in which asyncpg tells of a dead connection is known to every border of the gateway."""

import asyncpg
import pytest

from megamcp import outages
from megamcp.errors import BadRequest, Unavailable
from megamcp.sdk.database import is_lost
from megamcp.store import translate

LOST = [
    asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation"),
    asyncpg.AdminShutdownError("terminating connection due to administrator command"),
    asyncpg.CrashShutdownError("terminating connection because of crash of another server process"),
    asyncpg.CannotConnectNowError("the database system is starting up"),
    asyncpg.ConnectionFailureError("connection failure"),
    asyncpg.InterfaceError("cannot perform operation: connection is closed"),
    asyncpg.InterfaceError("cannot call Transaction.__aexit__(): the underlying connection is closed"),
    asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress"),
    asyncpg.exceptions.ProtocolError("unexpected message"),
    ConnectionRefusedError("Connect call failed"),
    ConnectionResetError("reset"),
    BrokenPipeError("pipe"),
    TimeoutError(),
    EOFError("0 bytes read"),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: f"{type(error).__name__} {error}")
def test_a_dead_connection_is_an_outage_at_every_border(error: Exception) -> None:
    assert isinstance(error, outages.DRIVER)
    assert outages.lost(error)
    assert is_lost(error)
    known = translate(error)
    assert isinstance(known, Unavailable)
    assert known.code == "database_unavailable"


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.UniqueViolationError("duplicate key"),
        asyncpg.QueryCanceledError("canceling statement due to user request"),
        asyncpg.InterfaceError("cannot perform operation: another operation is in progress"),
        KeyError("a mistake of ours"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_says_nothing_of_the_connection_is_no_outage(error: Exception) -> None:
    assert not outages.lost(error)


def test_a_value_that_the_driver_refuses_is_the_callers_mistake() -> None:
    assert isinstance(
        translate(asyncpg.DataError("invalid input for query argument $1: value out of int64")), BadRequest
    )

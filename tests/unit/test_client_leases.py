"""Leases that are kept are renewed in time, and end when they must."""

import asyncio
import subprocess
import sys
from datetime import UTC, datetime

import megamcp.client
from megamcp.client.leases import Leases
from megamcp.errors import Gone, Unavailable


class Lease:
    """Something leased, that counts its renewals; raises what it is given first."""

    def __init__(self, identifier: str, *failures: Exception) -> None:
        self.id = identifier
        self.expires_at = datetime.now(UTC)
        self.renewed = asyncio.Event()
        self.asked = 0
        self._failures = list(failures)

    async def renew(self, ttl_s: float | None = None) -> None:
        self.asked += 1
        if self._failures:
            raise self._failures.pop(0)
        self.renewed.set()


async def test_a_kept_lease_is_renewed_before_it_ends() -> None:
    leases, lease = Leases(), Lease("a")
    leases.keep(lease, 0.2)
    async with asyncio.timeout(0.19):
        await lease.renewed.wait()
    await leases.stop()


async def test_a_lease_that_was_dropped_is_not_renewed_and_others_are() -> None:
    leases, dropped, kept = Leases(), Lease("a"), Lease("b")
    leases.keep(dropped, 0.1)
    leases.keep(kept, 0.1)
    leases.drop("a")
    async with asyncio.timeout(2):
        await kept.renewed.wait()
    assert dropped.asked == 0
    await leases.stop()


async def test_a_lease_that_has_ended_is_given_up() -> None:
    leases, gone, other = Leases(), Lease("a", Gone("it is over")), Lease("b")
    leases.keep(gone, 0.04)
    leases.keep(other, 0.3)
    async with asyncio.timeout(2):
        await other.renewed.wait()
    assert gone.asked == 1
    assert "a" not in leases
    await leases.stop()


async def test_a_gateway_that_is_away_is_asked_again() -> None:
    leases, lease = Leases(), Lease("a", Unavailable("away"), Unavailable("away"))
    leases.keep(lease, 0.1)
    async with asyncio.timeout(2):
        await lease.renewed.wait()
    assert lease.asked == 3
    await leases.stop()


async def test_a_new_short_lease_does_not_wait_for_an_old_long_one() -> None:
    leases, long, short = Leases(), Lease("long"), Lease("short")
    leases.keep(long, 3600)
    await asyncio.sleep(0)
    leases.keep(short, 0.1)
    async with asyncio.timeout(2):
        await short.renewed.wait()
    assert long.asked == 0
    await leases.stop()


def test_the_client_is_light_to_import() -> None:
    heavy = ["mcp", "fastapi", "asyncpg", "sqlalchemy", "uvicorn", "pydantic_settings"]
    code = f"import sys, megamcp.client; sys.exit(str([m for m in {heavy} if m in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_everything_that_is_exported_is_there() -> None:
    assert all(hasattr(megamcp.client, name) for name in megamcp.client.__all__)

"""A gateway with little room, and the bystander that every test of this folder must leave alone."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from megamcp.testing import running_gateway
from tests.integration.conftest import copy_of
from tests.integration.promises.world import World
from tests.integration.rest import Rest

HELD = """select a.application_name, l.mode from pg_locks l join pg_stat_activity a using (pid)
    where l.locktype = 'advisory' and a.datname = current_database() and a.application_name <> 'megamcp instance'"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def strict(postgres_dsn: str, ledger_template: str) -> AsyncIterator[World]:
    """A gateway with short deadlines and little room."""
    async with (
        copy_of(postgres_dsn, ledger_template, f"mm_strict_{secrets.token_hex(4)}") as dsn,
        running_gateway(
            dsn,
            call_timeout_s=2.5,
            quiesce_timeout_s=2,
            rollback_grace_s=0.2,
            queue_per_rollout=3,
            calls_in_flight=12,
            max_rollouts=40,
            max_fork=8,
            max_ttl_s=1000,
            max_body_bytes=100_000,
            reap_interval_s=3600,
        ) as running,
    ):
        yield World(running.services, running.url, dsn)


@pytest_asyncio.fixture(loop_scope="session")
async def rest(strict: World) -> AsyncIterator[Rest]:
    async with httpx.AsyncClient(base_url=strict.url, timeout=20) as http:
        made = Rest(http)
        yield made
        for rollout in (await made.done("GET", "/v1/rollouts?status=open&limit=1000"))["rollouts"]:
            await http.delete(f"/v1/rollouts/{rollout['id']}")


@pytest.fixture
def harms_the_server() -> None:
    """Asked for by tests whose tool blocks the whole server: the bystander's calls may fail, and are repeated."""


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def bystander(strict: World, rest: Rest, request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Another rollout goes on meanwhile, and nothing is left at the end."""
    other = await rest.open()
    over = asyncio.Event()

    async def go_on() -> int:
        number = 0
        while not over.is_set() or number == 0:
            number += 1
            answer = await rest.http.post(
                f"/v1/rollouts/{other}/call",
                json={"tool": "increment", "arguments": {"owner": "owner-1"}, "idempotency_key": f"k{number}"},
            )
            if answer.status_code in (429, 502, 504) and "harms_the_server" in request.fixturenames:
                number -= 1  # whole server is blocked or full: the bystander is told so, and repeats
            else:
                assert answer.status_code == 200, answer.text
                assert answer.json()["structuredContent"] == {"result": 100 + number}, answer.text
            await asyncio.sleep(0.05)
        return number

    task = asyncio.create_task(go_on())
    yield
    over.set()
    done = await asyncio.wait_for(task, 60)
    assert await rest.items(other) == {}
    assert len([call for call in await rest.calls(other) if call["state"] == "done"]) == done + 1
    for _ in range(100):
        left = [
            *await strict.execute(HELD),
            *await strict.execute("select * from megamcp.events where state='running'"),
        ]
        if not left and strict.services.dataplane.in_flight == 0:
            break
        await asyncio.sleep(0.05)
    assert left == []
    assert strict.services.dataplane.in_flight == 0

"""Many forks, checkpoints, diffs and digests of one rollout at once, over both kinds of state: all are answered.

CI takes few of them; `SOAK_SECONDS` makes it fifty of each.
"""

import asyncio
import json
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
import pytest_asyncio
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.settings import Settings
from megamcp.testing import running_gateway

PAIR = Path(__file__).parents[2] / "environments" / "pair"
COUNT = 50 if "SOAK_SECONDS" in os.environ else 10

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def http(postgres_dsn: str, state_dsn: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a gateway with the environment that has both kinds."""
    name = f"mm_load_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f'create database "{name}"')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    await prepare(Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=[PAIR]), dsn)
    try:
        async with (
            running_gateway(dsn, state_urls=[state_dsn], disk_reserve=0) as running,
            aiohttp.ClientSession(running.url, timeout=aiohttp.ClientTimeout(300)) as session,
        ):
            yield session
    finally:
        await connection.execute(f'drop database "{name}" with (force)')
        await connection.close()


async def test_forks_checkpoints_diffs_and_digests_of_one_rollout_are_all_answered(http: aiohttp.ClientSession) -> None:
    answers: Counter[str] = Counter()

    async def ask(method: str, path: str, body: Any = None) -> Any:
        async with http.request(method, path, json=body) as answer:
            answers[f"{method} {path.rsplit('/', 1)[-1].partition('?')[0]} {answer.status}"] += 1
            text = await answer.text()
            assert answer.status < 300, f"{method} {path} {answer.status} {text}"
            return json.loads(text) if text else None

    async def put(rollout: str, server: str, value: str) -> Any:
        body = {"tool": f"{server}__put", "arguments": {"key": "k", "value": value}}
        return await ask("POST", f"/v1/rollouts/{rollout}/call", body)

    async def items(rollout: str, server: str) -> Any:
        body = {"tool": f"{server}__items", "arguments": {}}
        return (await ask("POST", f"/v1/rollouts/{rollout}/call", body))["structuredContent"]

    async def fork(point: str) -> None:
        made = (await ask("POST", f"/v1/checkpoints/{point}/fork", {}))["rollouts"][0]["id"]
        for server in ("own", "shared"):
            assert (await items(made, server))["k"] == "at the point"
            await put(made, server, made)
            assert (await items(made, server))["k"] == made

    (opened,) = (await ask("POST", "/v1/rollouts", {"environment": "pair"}))["rollouts"]
    rollout = opened["id"]
    for server in ("own", "shared"):
        await put(rollout, server, "at the point")
    point = (await ask("POST", f"/v1/rollouts/{rollout}/checkpoints", {}))["id"]
    for server in ("own", "shared"):
        await put(rollout, server, "later")
    reads = [f"/v1/rollouts/{rollout}/digest", f"/v1/rollouts/{rollout}/digest?at={point}"]
    reads += [f"/v1/rollouts/{rollout}/diff?from={point}&to=head"]
    others = [ask("GET", reads[n % 3]) for n in range(COUNT)]
    others += [ask("POST", f"/v1/rollouts/{rollout}/checkpoints", {}) for _ in range(COUNT)]
    others += [put(rollout, ("own", "shared")[n % 2], "later") for n in range(COUNT)]
    done = await asyncio.gather(*(fork(point) for _ in range(COUNT)), *others, return_exceptions=True)
    failed = [str(one) for one in done if isinstance(one, BaseException)]
    assert not failed, "\n".join(failed[:5])

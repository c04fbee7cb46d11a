"""A call that is passed through asks the database for its rollout only once: in the statement that journals it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
import uvicorn

from megamcp import control
from megamcp.errors import BadRequest, Gone, NotFound, Unprocessable
from megamcp.sdk import Server
from megamcp.testing import Gateway

echo = Server("echo")


@echo.tool(read_only=True)
def say(word: str) -> str:
    """Say a word."""
    return word


@pytest_asyncio.fixture(loop_scope="session")
async def rollout(gateway: Gateway, tmp_path: Path) -> AsyncIterator[str]:
    """A rollout on a tool server that runs elsewhere."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(echo.asgi_app(), log_config=None, access_log=False))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    (tmp_path / "environment.toml").write_text(f'name = "echo"\n[servers.echo]\nurl = "{url}"\n')
    await gateway.services.environments.load(tmp_path)
    (row,) = await gateway.services.rollouts.open("echo")
    yield row["id"]
    server.should_exit = True
    await task
    listener.close()


async def call(gateway: Gateway, rollout: str) -> bytes:
    return await gateway.services.dataplane.call(rollout, "say", b'{"word":"hello"}')


async def test_a_call_leaves_one_finished_row(gateway: Gateway, rollout: str, database: str) -> None:
    for _ in range(3):
        assert b"hello" in await call(gateway, rollout)
    rows = await gateway.services.store.rows(
        "select state, result from megamcp.events where rollout = $1 and kind = 'call' order by seq", rollout
    )
    assert [row["state"] for row in rows] == ["done"] * 3
    assert all("hello" in row["result"] for row in rows)


async def test_an_environment_without_a_journal_leaves_no_row_and_takes_no_key(
    gateway: Gateway, rollout: str, tmp_path: Path
) -> None:
    text = (tmp_path / "environment.toml").read_text().replace('name = "echo"', 'name = "quiet"\njournal = "none"')
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    (quiet / "environment.toml").write_text(text)
    await gateway.services.environments.load(quiet)
    (row,) = await gateway.services.rollouts.open("quiet")
    assert b"hello" in await call(gateway, row["id"])
    count = "select count(*) from megamcp.events where rollout = $1 and kind = 'call'"
    assert await gateway.services.store.value(count, row["id"]) == 0
    with pytest.raises(BadRequest) as caught:
        await gateway.services.dataplane.call(row["id"], "say", b'{"word":"x"}', idempotency_key="k")
    assert caught.value.code == "bad_idempotency_key"


async def test_what_changes_state_can_not_go_unrecorded(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "environment.toml").write_text('name = "loose"\njournal = "none"\n[servers.files]\ncommand = "npx"\n')
    with pytest.raises(Unprocessable) as caught:
        await gateway.services.environments.load(tmp_path)
    assert "files keeps state" in str(caught.value.extra)


async def test_a_rollout_that_another_process_closed_is_gone_at_the_next_call(
    gateway: Gateway, rollout: str, database: str
) -> None:
    await call(gateway, rollout)
    elsewhere = await asyncpg.connect(database)
    await elsewhere.execute(
        "update megamcp.rollouts set status = 'closed', closed_at = clock_timestamp() where id = $1", rollout
    )
    for _ in range(2):
        with pytest.raises(Gone) as caught:
            await call(gateway, rollout)
        assert caught.value.code == "rollout_closed"
    await elsewhere.execute("delete from megamcp.rollouts where id = $1", rollout)
    await elsewhere.close()
    with pytest.raises(NotFound) as missing:
        await call(gateway, rollout)
    assert missing.value.code == "rollout_not_found"


async def test_what_is_remembered_of_rollouts_is_bounded(
    gateway: Gateway, rollout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PASSED_THROUGH_KEPT", 2)
    rollouts = [rollout, *(row["id"] for row in await gateway.services.rollouts.open("echo", count=3))]
    for _ in range(2):
        for each in rollouts:
            await call(gateway, each)
    assert await gateway.services.store.value("select count(*) from megamcp.events where kind = 'call'") == 8

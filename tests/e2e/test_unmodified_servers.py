"""MCP servers from npm, as they were published, on rollouts' own databases: they know a DSN and nothing of MegaMCP.

The reference server reads (it is started by `npx`, a tree of processes), another one writes too. Both keep a pool of
connections to what they take for a PostgreSQL like any other, while the rollout is checkpointed, forked and rolled
back under them.
"""

import asyncio
import json
import secrets
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psutil
import pytest
import pytest_asyncio
from mcp.client.client import Client
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.databases.clusters import SETTINGS
from megamcp.postgres import EmbeddedPostgres
from megamcp.settings import Settings
from megamcp.testing import Gateway, running_gateway

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

READS = "@modelcontextprotocol/server-postgres@0.6.2"
WRITES = "enhanced-postgres-mcp-server@1.0.1"
SCHEMA = """
create table books (id int primary key, title text not null, stock int not null check (stock >= 0));
insert into books select i, 'book ' || i, 10 from generate_series(1, 100) i;
"""
TOTAL = "select sum(stock)::int as total from books"


async def fetched(package: str, folder: Path) -> Path:
    """The folder that holds an installed package; the test is skipped where it can't be fetched."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip(f"{package} needs node and npm")
    process = await asyncio.create_subprocess_exec(
        *("npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", package),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode:
        pytest.skip(f"{package} could not be fetched: {output.decode()[-300:]}")
    return folder


def environment(name: str, folder: Path, command: str, args: list[str], **more: str) -> Path:
    """An environment with one server that is started by a command."""
    folder.mkdir()
    (folder / "schema.sql").write_text(SCHEMA)
    lines = [f'name = "{name}"', "[servers.store]", f"command = {json.dumps(command)}", f"args = {json.dumps(args)}"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in more.items()]
    lines += ["[servers.store.state]", 'kind = "database"']
    (folder / "environment.toml").write_text("\n".join(lines))
    return folder


@dataclass(frozen=True, slots=True)
class Store:
    """A gateway with the three environments, seen from outside."""

    gateway: Gateway
    http: httpx.AsyncClient
    state: asyncpg.Connection
    """Of the state cluster's superuser."""

    async def open(self, environment: str, count: int = 1) -> list[str]:
        answer = await self.http.post("/v1/rollouts", json={"environment": environment, "count": count})
        return [rollout["id"] for rollout in answer.raise_for_status().json()["rollouts"]]

    async def call(self, rollout: str, tool: str, sql: str, **more: Any) -> Any:
        body = {"tool": tool, "arguments": {"sql": sql}, **more}
        answer = await self.http.post(f"/v1/rollouts/{rollout}/call", json=body)
        result = answer.raise_for_status().json()
        assert not result.get("isError"), result
        return json.loads(result["content"][0]["text"])

    async def total(self, rollout: str) -> int:
        return int((await self.call(rollout, "query", TOTAL))[0]["total"])

    async def post(self, path: str, **body: Any) -> Any:
        return (await self.http.post(path, json=body)).raise_for_status().json()

    async def until_asleep(self) -> None:
        """Returns once a statement that sleeps runs on the state cluster."""
        for _ in range(3000):
            sleeping = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'"
            if await self.state.fetchval(sleeping):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("no statement sleeps")

    def pid(self, rollout: str) -> int | None:
        """Of the rollout's process."""
        dedicated = self.gateway.services.dataplane._environments.dedicated
        seat = dedicated.seat((rollout, "store"))
        return seat.child.pid if seat is not None else None


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def store(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Store]:
    folder = tmp_path_factory.mktemp("unmodified")
    reads, writes = await fetched(READS, folder / "reads"), await fetched(WRITES, folder / "writes")
    npx = ["--no-install", "--prefix", str(reads), "mcp-server-postgres", "{dsn}"]
    script = str(writes / "node_modules" / WRITES.split("@")[0] / "dist" / "index.js")
    environments = [
        environment("reads", folder / "reads_env", "npx", npx),
        environment("writes", folder / "writes_env", "node", [script, "{dsn}"]),
        environment("restarts", folder / "restarts_env", "node", [script, "{dsn}"], restart="on_move"),
    ]
    name = f"mm_unmodified_{secrets.token_hex(4)}"
    admin = await asyncpg.connect(postgres_dsn)
    await admin.execute(f'create database "{name}"')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    await prepare(Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=environments), dsn)
    try:
        async with (
            EmbeddedPostgres(folder / "state", settings=SETTINGS) as state,
            running_gateway(dsn, state_urls=[state.dsn], disk_reserve=0, relay_port=0) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        ):
            watching = await asyncpg.connect(state.dsn)
            yield Store(gateway, http, watching)
            await watching.close()
    finally:
        await admin.execute(f'drop database "{name}" with (force)')
        await admin.close()


async def test_an_agent_uses_the_reference_server_on_a_database_of_its_own(store: Store) -> None:
    one, other = await store.open("reads", 2)
    async with Client(f"{store.gateway.url}/r/{one}/mcp") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["query"]
        result = await client.call_tool("query", {"sql": TOTAL})
        assert json.loads(result.content[0].text) == [{"total": 1000}]
        broken = await store.http.post(
            f"/v1/rollouts/{one}/call", json={"tool": "query", "arguments": {"sql": "nonsense"}}
        )
        assert "syntax error" in broken.text
    assert await store.total(other) == 1000
    pids = store.pid(one), store.pid(other)
    assert None not in pids
    assert pids[0] != pids[1]


async def test_what_one_rollout_writes_no_other_sees(store: Store) -> None:
    one, other = await store.open("writes", 2)
    await store.call(one, "execute", "update books set stock = 0 where id <= 50")
    assert (await store.total(one), await store.total(other)) == (500, 1000)


async def test_checkpoints_forks_and_rollbacks_pass_under_a_server_that_knows_of_none(store: Store) -> None:
    (rollout,) = await store.open("writes")
    await store.call(rollout, "execute", "update books set stock = stock + 1")
    pid = store.pid(rollout)
    checkpoint = (await store.post(f"/v1/rollouts/{rollout}/checkpoints"))["id"]
    await store.call(rollout, "execute", "delete from books where id > 10")
    await store.call(rollout, "execute", "alter table books add column note text")
    fork = (await store.post(f"/v1/checkpoints/{checkpoint}/fork"))["rollouts"][0]["id"]
    assert (await store.total(fork), await store.total(rollout)) == (1100, 110)
    await store.post(f"/v1/rollouts/{rollout}/rollback", checkpoint=checkpoint)
    assert await store.total(rollout) == 1100
    # The same process, and its pool, all the way.
    assert store.pid(rollout) == pid
    await store.call(fork, "execute", "update books set stock = 0")
    assert (await store.total(fork), await store.total(rollout)) == (0, 1100)
    answer = await store.http.get(f"/v1/rollouts/{rollout}/diff", params={"from": "base", "to": checkpoint})
    assert answer.json()["servers"]["store"]["tables"]["books"]["total"] == 100


async def test_a_declared_restart_gives_another_process_after_a_rollback(store: Store) -> None:
    (rollout,) = await store.open("restarts")
    await store.call(rollout, "execute", "update books set stock = 1")
    checkpoint = (await store.post(f"/v1/rollouts/{rollout}/checkpoints"))["id"]
    pid = store.pid(rollout)
    assert pid is not None
    await store.call(rollout, "execute", "update books set stock = 2")
    assert store.pid(rollout) == pid
    await store.post(f"/v1/rollouts/{rollout}/rollback", checkpoint=checkpoint)
    assert await store.total(rollout) == 100
    assert store.pid(rollout) not in (pid, None)
    assert not psutil.pid_exists(pid)


async def test_a_call_that_kills_the_server_is_never_run_again_and_the_next_one_works(store: Store) -> None:
    (rollout,) = await store.open("writes")
    assert await store.total(rollout) == 1000
    sql = "update books set stock = stock + 1; select pg_sleep(30)"
    body = {"tool": "execute", "arguments": {"sql": sql}, "idempotency_key": "once"}
    call = asyncio.create_task(store.http.post(f"/v1/rollouts/{rollout}/call", json=body))
    await store.until_asleep()
    pid = store.pid(rollout)
    assert pid is not None
    psutil.Process(pid).kill()
    first = await call
    assert (first.status_code, first.json()["code"]) == (502, "tool_server_lost")
    again = await store.http.post(f"/v1/rollouts/{rollout}/call", json=body)
    assert again.json()["code"] == "tool_server_lost"
    assert await store.total(rollout) == 1000


async def test_the_end_of_a_rollout_ends_the_tree_of_processes(store: Store) -> None:
    (rollout,) = await store.open("reads")
    await store.total(rollout)
    pid = store.pid(rollout)
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(tree) > 1
    await store.http.delete(f"/v1/rollouts/{rollout}")
    _, alive = await asyncio.to_thread(psutil.wait_procs, tree, 10)
    assert not alive


async def test_the_journal_says_what_the_server_was_asked(store: Store) -> None:
    (rollout,) = await store.open("writes")
    await store.call(rollout, "execute", "update books set stock = 3 where id = 1")
    events = (await store.http.get(f"/v1/rollouts/{rollout}/events")).json()["events"]
    (call,) = [event for event in events if event["kind"] == "call"]
    assert (call["server"], call["tool"], call["state"]) == ("store", "execute", "done")
    assert call["arguments"] == {"sql": "update books set stock = 3 where id = 1"}


async def test_nothing_of_a_call_in_flight_reaches_the_state_after_a_rollback(store: Store) -> None:
    (rollout,) = await store.open("writes")
    await store.call(rollout, "execute", "update books set stock = 5")
    checkpoint = (await store.post(f"/v1/rollouts/{rollout}/checkpoints"))["id"]
    steps = "; ".join(f"update books set stock = {number}; commit; select pg_sleep(0.3)" for number in range(40))
    body = {"tool": "execute", "arguments": {"sql": steps}}
    call = asyncio.create_task(store.http.post(f"/v1/rollouts/{rollout}/call", json=body))
    await store.until_asleep()
    await store.post(f"/v1/rollouts/{rollout}/rollback", checkpoint=checkpoint)
    assert (await call).status_code in (409, 502)
    for _ in range(4):
        assert await store.total(rollout) == 500
        await asyncio.sleep(0.3)


async def test_moves_by_another_gateway_process_end_what_can_not_be_kept(store: Store) -> None:
    moved, ended = await store.open("restarts", 2)
    checkpoint = (await store.post(f"/v1/rollouts/{moved}/checkpoints"))["id"]
    await asyncio.gather(store.total(moved), store.total(ended))
    pids = [store.pid(moved), store.pid(ended)]
    chosen = store.gateway.settings
    assert chosen.database_url is not None
    urls = [url.get_secret_value() for url in chosen.state_urls]
    async with (
        running_gateway(
            chosen.database_url.get_secret_value(), state_urls=urls, disk_reserve=0, relay_port=0
        ) as second,
        httpx.AsyncClient(base_url=second.url, timeout=60) as http,
    ):
        (await http.post(f"/v1/rollouts/{moved}/rollback", json={"checkpoint": checkpoint})).raise_for_status()
        (await http.delete(f"/v1/rollouts/{ended}")).raise_for_status()
        for _ in range(1000):
            if not any(psutil.pid_exists(pid) for pid in pids if pid is not None):
                break
            await asyncio.sleep(0.01)
    assert None not in pids
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert await store.total(moved) == 1000

"""What an adversarial reading found, each as the claim that it broke."""

import asyncio
import shutil
import time
from pathlib import Path

import asyncpg
import httpx
import pytest

from megamcp import store as sql
from megamcp.errors import Conflict, Gone, MegaMCPError, NotFound, Unprocessable
from megamcp.handles import Mode
from megamcp.migrate import migrate
from megamcp.targets import role_dsn
from megamcp.testing import running_gateway
from tests.integration.conftest import LEDGER
from tests.integration.promises.world import ToolFailed, World


@pytest.mark.parametrize("name", ["megamcp_tool", "megamcp", "other"])
async def test_a_tool_that_raises_after_a_savepoint_of_its_own_keeps_nothing(world: World, name: str) -> None:
    rollout = await world.one()
    start = await world.digest(rollout)
    with pytest.raises(ToolFailed):
        await world.call(rollout, "refuse_after_savepoint", name=name)
    assert await world.digest(rollout) == start


async def test_a_renewed_lease_is_not_ended_by_a_reaper_that_looked_before(world: World) -> None:
    (rollout,) = await world.open(ttl_s=0.05)
    await asyncio.sleep(0.1)
    await world.services.rollouts.renew(rollout, 600)
    assert not await world.services.rollouts.close(rollout, expired=True)
    assert (await world.services.rollouts.get(rollout))["status"] == "open"


async def test_many_readers_of_checkpoints_do_not_wait_for_each_other(world: World) -> None:
    rollouts = await world.open(40)
    points = [(await world.checkpoint(rollout))["id"] for rollout in rollouts]
    began = time.monotonic()
    await asyncio.gather(*(world.digest(r, p) for r, p in zip(rollouts, points, strict=True)))
    await asyncio.gather(*(world.services.points.diff(r, p, "head") for r, p in zip(rollouts, points, strict=True)))
    assert time.monotonic() - began < 25


async def test_a_checkpoint_that_is_being_read_is_not_collected(world: World) -> None:
    rollout, other = await world.open(2)
    await world.call(rollout, "put", key="k", value="v")
    point = (await world.checkpoint(rollout))["id"]
    await world.services.rollouts.close(rollout)
    async with world.services.store.transaction() as reading:
        row = await reading.fetchrow(sql.CHECKPOINT_BY_ID + " for key share of c", point)
        assert row["alive"]
        await world.services.rollouts.release_checkpoint(point)
        await world.services.reaper.once()
        assert await reading.fetchval("select count(*) from megamcp.checkpoints where id = $1", point) == 1
    await world.services.reaper.once()
    with pytest.raises(NotFound):
        await world.services.points.diff(other, "base", point)


async def test_a_pin_and_a_release_at_once_never_both_succeed(world: World) -> None:
    rollout = await world.one()

    async def succeeds(action: object) -> bool:
        try:
            await action  # type: ignore[misc]
        except (Gone, Conflict, NotFound):
            return False
        return True

    for _ in range(60):
        point = (await world.checkpoint(rollout))["id"]
        pinned, released = await asyncio.gather(
            succeeds(world.services.rollouts.pin(point, "me", 60)),
            succeeds(world.services.rollouts.release_checkpoint(point)),
        )
        assert pinned != released


async def test_a_dead_chain_of_checkpoints_goes_in_one_round(world: World) -> None:
    rollout = await world.one()
    for number in range(12):
        await world.call(rollout, "put", key="k", value=str(number))
        await world.services.rollouts.release_checkpoint((await world.checkpoint(rollout))["id"])
    await world.services.rollouts.close(rollout)
    await world.services.reaper.once()
    left = await world.execute("select 1 from megamcp.checkpoints where rollout = $1", rollout)
    assert not left
    assert not await world.execute("select 1 from megamcp.dead_layers")


async def test_a_failure_that_meets_its_own_record_gives_the_record(world: World) -> None:
    rollout = await world.one()
    signer = await migrate(world.dsn)
    loaded = await world.services.environments.find("ledger")
    assert loaded.servers[0].schema is not None
    handle = signer.mint(rollout=rollout, server="ledger", epoch=0, mode=Mode.READ, deadline=time.time() + 30)
    tool = await asyncpg.connect(role_dsn(world.dsn, loaded.servers[0].schema.tool_role, signer.password("tool")))
    async with tool.transaction():
        await tool.fetch("select * from megamcp.call_begin($1, 'items', '{}')", handle)
        await tool.fetch("select megamcp.call_finish($1, 'items', '{}', '{\"content\":[]}', false)", handle)
        failing = asyncio.create_task(world.execute("select * from megamcp.call_fail($1, 'items', '{}', '{}')", handle))
        await asyncio.sleep(0.2)
    (row,) = await failing
    assert (row["recorded"], row["result"]) == (True, '{"content":[]}')
    await tool.close()


async def test_a_query_on_a_rollout_that_ended_meanwhile_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await world.one()
    await world.call(rollout, "put", key="k", value="v")
    queries = world.services.queries
    fetch = type(queries)._fetch

    async def late(self: object, *arguments: object) -> object:
        await world.services.rollouts.close(rollout)
        return await fetch(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(queries), "_fetch", late)
    with pytest.raises(Gone):
        await queries.run(rollout, None, "select count(*) from item", None)


@pytest.mark.parametrize(
    "statement",
    [
        "set local application_name = 'call me'",
        "set local transaction_timeout = 0",
        "select ts_rewrite('a'::tsquery, 'select ''a''::tsquery, ''b''::tsquery')",
        "select pg_relation_size('item')",
    ],
)
async def test_what_would_reach_out_of_the_rollout_is_refused(world: World, statement: str) -> None:
    rollout = await world.one()
    with pytest.raises(ToolFailed, match="not supported here"):
        await world.call(rollout, "run_sql", sql=statement)


async def test_a_query_may_not_ask_for_estimates(world: World) -> None:
    rollout = await world.one()
    with pytest.raises(Unprocessable, match="EXPLAIN"):
        await world.services.queries.run(rollout, None, "explain select * from item", None)


async def test_a_tool_servers_process_holds_none_of_the_gateways_secrets(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAMCP_DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("MEGAMCP_API_KEY", "secret")
    async with running_gateway(world.dsn, reap_interval_s=3600) as running:
        fresh = World(running.services, running.url, world.dsn)
        names = await fresh.call(await fresh.one(), "environment")
    assert "PATH" in names
    assert not {"MEGAMCP_DATABASE_URL", "MEGAMCP_API_KEY", "MEGAMCP_TOOL_DSN"} & set(names)


async def test_fixed_urls_want_the_api_key_too(world_database: str) -> None:
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "stranger", "version": "1"},
        },
    }
    headers = {"Accept": "application/json, text/event-stream"}
    async with running_gateway(world_database, api_key="right") as running, httpx.AsyncClient() as http:
        url = f"{running.url}/e/ledger/mcp"
        for given in ({}, {"Authorization": "Bearer wrong"}):
            answer = await http.post(url, json=hello, headers={**headers, **given})
            assert answer.status_code == 401
            assert answer.json()["error"]["data"]["code"] == "unauthorized"
        answer = await http.post(url, json=hello, headers={**headers, "Authorization": "Bearer right"})
        assert answer.status_code == 200


async def test_two_servers_with_equal_files_have_states_of_their_own(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "twins"
    shutil.copytree(LEDGER, folder)
    text = (folder / "environment.toml").read_text().replace('name = "ledger"', 'name = "twins"')
    second = text[text.index("[servers.ledger]") :].replace("servers.ledger", "servers.twin")
    (folder / "environment.toml").write_text(text + "\n" + second)
    await world.services.environments.load(folder)
    (rollout,) = [row["id"] for row in await world.services.rollouts.open("twins")]
    await world.call(rollout, "ledger__put", key="k", value="v")
    assert "k" in await world.call(rollout, "ledger__items")
    assert "k" not in await world.call(rollout, "twin__items")


async def test_tools_that_changed_are_a_new_version(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(LEDGER, folder)
    toml = folder / "environment.toml"
    toml.write_text(toml.read_text().replace('name = "ledger"', 'name = "edited"'))
    first = await world.services.environments.load(folder)
    code = folder / "ledger_server.py"
    code.write_text(code.read_text().replace("The ledger refuses.", "Not today."))
    second = await world.services.environments.load(folder)
    assert first.hash != second.hash
    (rollout,) = [row["id"] for row in await world.services.rollouts.open("edited")]
    with pytest.raises(ToolFailed, match="Not today"):
        await world.call(rollout, "refuse_after_write", key="x")


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("create table a (id int primary key, b int references missing (id));", "missing"),
        ("create table a (id int primary key, b nosuchtype);", "nosuchtype"),
        ("create table a (id int primary key); create table a (id int primary key);", "already exists"),
        ("create table a (id int primary key, check (nosuch > 1));", "nosuch"),
    ],
)
async def test_a_mistake_in_the_sql_is_told_in_postgresqls_words(
    world: World, tmp_path: Path, schema: str, told: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(LEDGER, folder)
    (folder / "schema.sql").write_text(schema)
    with pytest.raises(MegaMCPError, match=told) as refused:
        await world.services.environments.load(folder)
    assert refused.value.code == "invalid_environment"


async def test_a_checkpoint_numbers_itself_right_after_what_it_holds(world: World) -> None:
    rollout = await world.one()

    async def intents() -> None:
        for number in range(30):
            nonce = f"00000000-0000-0000-0000-{number:012d}"
            await world.services.store.row(sql.CALL_INTENT, rollout, "s", "t", "{}", nonce, None, b"", 1)

    calling = asyncio.create_task(intents())
    for _ in range(15):
        point = await world.checkpoint(rollout)
        own = next(e for e in await world.journal(rollout) if (e["data"] or {}).get("checkpoint") == point["id"])
        assert own["seq"] == point["seq"] + 1
    await calling


@pytest.mark.parametrize(
    "schema",
    [
        "create table a (id int primary key, v text check (v <> pg_read_file('/etc/hostname')));",
        "create table a (id int primary key, v text default ts_rewrite('a'::tsquery, 'select 1')::text);",
        "create table a (id int primary key, v text generated always as (pg_read_file(id::text)) stored);",
        "create function f() returns text language sql as $$ select pg_read_file('/etc/hostname') $$;"
        " create table a (id int primary key);",
        "create function f() returns text language sql as $$ select encode(secret, 'hex') from megamcp.keys $$;"
        " create table a (id int primary key);",
        "create function f() returns text language sql as $$ copy (select 1) to program 'id'; select 'x'::text $$;"
        " create table a (id int primary key);",
        "create function f() returns text language sql as $$ select session_user::text $$;"
        " create table a (id int primary key);",
        "create function f() returns text language sql as $$ select usename::text from pg_stat_activity $$;"
        " create table a (id int primary key);",
    ],
)
async def test_an_environments_sql_may_not_reach_out(world: World, tmp_path: Path, schema: str) -> None:
    folder = tmp_path / "evil"
    shutil.copytree(LEDGER, folder)
    (folder / "schema.sql").write_text(schema)
    with pytest.raises(Unprocessable) as refused:
        await world.services.environments.load(folder)
    assert refused.value.code == "unsupported_schema"


async def test_a_diff_keeps_every_digit(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    shutil.copytree(LEDGER, folder)
    toml = folder / "environment.toml"
    toml.write_text(toml.read_text().replace('name = "ledger"', 'name = "digits"'))
    with (folder / "schema.sql").open("a") as schema:
        schema.write("create table amount (id int primary key, value numeric not null);")
    with (folder / "seed.sql").open("a") as seed:
        seed.write("insert into amount values (1, 0.1234567890123456789);")
    await world.services.environments.load(folder)
    (rollout,) = [row["id"] for row in await world.services.rollouts.open("digits")]
    await world.call(rollout, "run_sql", sql="update amount set value = 0.1234567890123456788")
    async with httpx.AsyncClient() as http:
        told = (await http.get(f"{world.url}/v1/rollouts/{rollout}/diff")).text
    assert "0.1234567890123456789" in told
    assert "0.1234567890123456788" in told


async def test_what_holds_a_connection_asks_for_no_second_one(world: World) -> None:
    control = world.services.dataplane._control
    rollouts = await world.open(30)
    began = time.monotonic()
    opened = await asyncio.gather(*(control.open_for_session("ledger", key=f"client-{n}") for n in range(30)))
    assert len(set(opened)) == 30
    again = await asyncio.gather(*(control.open_for_session("ledger", key=f"client-{n}") for n in range(30)))
    assert again == opened
    world.services.environments._by_id.clear()  # as in a process that has just started
    await asyncio.gather(*(world.checkpoint(rollout) for rollout in rollouts))
    assert time.monotonic() - began < 25

"""A database that was there before comes over whole: by its DSN, and from each format of pg_dump, for both kinds."""

import asyncio
import gzip
import shutil
import subprocess
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from megamcp.errors import MegaMCPError
from megamcp.loading.export import Wanted, export
from megamcp.postgres.layout import binaries
from tests.integration.conftest import copy_of
from tests.integration.loading.conftest import HASH, Old, Place, folder_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


def silent(what: str, done: int, total: int) -> None:
    pass


async def loaded_content(place: Place, loaded: Any) -> dict[str, Any]:
    """Number and hash of the rows that the new state has."""
    server = loaded.servers[0]
    found = {}
    if server.schema is not None:
        for table in server.schema.tables:
            columns = ", ".join(f'"{column}"' for column in table.columns)
            base = f'{server.schema.hidden_schema}."{table.name}~base"'
            name = f'"{table.name}"' if table.name == "order" else table.name
            found[name] = tuple(await place.control.fetchrow(f"select {HASH} from (select {columns} from {base}) r"))
        return found
    source = await place.services.store.value(
        "select name from megamcp.databases where content = $1 and kind = 'source'", server.database
    )
    async with copy_of(place.state_dsn, source, "copy_to_look_at") as dsn:
        connection = await asyncpg.connect(dsn)
        try:
            return await Old(dsn, connection).content()
        finally:
            await connection.close()


@pytest.mark.parametrize("kind", ["schema", "database"])
async def test_a_database_comes_over_whole_by_its_dsn(old: Old, place: Place, tmp_path: Path, kind: str) -> None:
    told: list[tuple[str, int, int]] = []
    wanted = Wanted(old.dsn, "shop", kind=kind, name=f"old-{kind}", entry="tool_servers.sql.server:server")
    folder = await export(wanted, tmp_path / "old", lambda *seen: told.append(seen))
    assert {file.name for file in folder.iterdir()} == {"environment.toml", "dump.sql"}
    loaded = await place.load(folder, lambda *seen: told.append(seen))
    assert await loaded_content(place, loaded) == await old.content()
    assert any(
        what.startswith("dump.sql: ") and what.endswith("lines") and 0 < done <= total for what, done, total in told
    )
    assert any(what.startswith("left out of dump.sql") and "setting" in what for what, _, total in told if total == 0)


def dumped(old: Old, target: Path, *options: str) -> None:
    subprocess.run(
        [binaries() / "pg_dump", "--schema=shop", f"--file={target}", f"--dbname={old.dsn}", *options], check=True
    )


@pytest.mark.parametrize("kind", ["schema", "database"])
@pytest.mark.parametrize("how", ["plain", "create", "gzip", "custom", "directory", "tar"])
async def test_every_format_of_pg_dump_is_read(old: Old, place: Place, tmp_path: Path, how: str, kind: str) -> None:
    folder = folder_of(tmp_path / f"d-{how}-{kind}", kind, dump="")
    target = folder / "dump.sql"
    target.unlink()
    more = ["--create", "--clean"] if how == "create" else []
    dumped(old, target, "--format=" + ("plain" if how in ("gzip", "create") else how), *more)
    if how == "gzip":
        target.write_bytes(gzip.compress(target.read_bytes()[:1000]) + gzip.compress(target.read_bytes()[1000:]))
    if kind == "schema":
        with (folder / "environment.toml").open("a") as file:
            file.write('source_schema = "shop"\n')
    loaded = await place.load(folder)
    assert await loaded_content(place, loaded) == await old.content()


async def test_inserts_instead_of_copy_come_to_the_same(old: Old, place: Place, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "inserts", dump="")
    dumped(old, folder / "dump.sql", "--inserts", "--rows-per-insert=7")
    with (folder / "environment.toml").open("a") as file:
        file.write('source_schema = "shop"\n')
    assert await loaded_content(place, await place.load(folder)) == await old.content()


async def test_counters_go_on_where_they_were(old: Old, place: Place, tmp_path: Path) -> None:
    wanted = Wanted(old.dsn, "shop", name="counters", entry="tool_servers.sql.server:server")
    loaded = await place.load(await export(wanted, tmp_path / "counters", silent))
    state = loaded.servers[0].schema
    rows = await place.control.fetch(f'select name, value from {state.hidden_schema}."~counters" where layer = 0')
    values = {row["name"]: row["value"] for row in rows}
    assert values["sequence:tickets"] == 100
    assert values["sequence:customers_id_seq"] == 500
    assert values["sequence:order_id_seq"] == 1000


async def test_views_and_functions_come_along(old: Old, place: Place, tmp_path: Path) -> None:
    wanted = Wanted(old.dsn, "shop", kind="schema", name="views", entry="tool_servers.sql.server:server")
    loaded = await place.load(await export(wanted, tmp_path / "views", silent))
    rollout = (await place.services.rollouts.open(loaded.full_name))[0]["id"]
    for query, expected in (
        ("select count(*), sum(total) from spent", "select count(*), sum(total) from shop.spent"),
        ("select count(*) from customers_of('paid')", "select count(*) from shop.customers_of('paid')"),
        ("select net(119)", "select shop.net(119)"),
    ):
        _, rows, _ = await place.services.queries.run(rollout, None, query, None)
        there = await old.connection.fetchrow(expected)
        assert bytes(rows[0]).decode().replace('"', "").strip("[]").split(",") == [str(value) for value in there]


async def test_a_second_load_reads_and_runs_nothing(
    old: Old, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Wanted(old.dsn, "shop", name="twice", entry="tool_servers.sql.server:server")
    folder = await export(wanted, tmp_path / "twice", silent)
    first = await place.load(folder)
    monkeypatch.setattr("megamcp.loading.script.Script.stream", None)
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert (await place.load(moved)).hash == first.hash


async def test_versions_stand_side_by_side(place: Place, tmp_path: Path) -> None:
    dump = "create table public.t (id int primary key);\ncopy public.t (id) from stdin;\n1\n\\.\n"
    one = await place.load(folder_of(tmp_path / "versions", dump=dump))
    two = await place.load(folder_of(tmp_path / "versions", dump=dump.replace("\n1\n", "\n1\n2\n")))
    rollouts = [(await place.services.rollouts.open(loaded.full_name))[0]["id"] for loaded in (one, two)]
    counts = [await place.services.queries.run(r, None, "select count(*) from t", None) for r in rollouts]
    assert [bytes(rows[0]) for _, rows, _ in counts] == [b"[1]", b"[2]"]


async def test_loads_of_the_same_at_once_make_one(place: Place, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "at-once", dump="create table t (id int primary key);\ncopy t from stdin;\n1\n\\.\n")
    loaded = await asyncio.gather(*(place.load(folder) for _ in range(3)))
    assert len({one.id for one in loaded}) == 1


async def test_chosen_tables_alone_are_taken(old: Old, place: Place, tmp_path: Path) -> None:
    wanted = Wanted(old.dsn, "few", ("a", "b"), "schema", "few", "tool_servers.sql.server:server")
    loaded = await place.load(await export(wanted, tmp_path / "few", silent))
    assert [table.name for table in loaded.servers[0].schema.tables] == ["a", "b"]


@pytest.mark.parametrize(
    ("tables", "code", "words"),
    [(("b",), "tables_incomplete", "b to a"), (("a", "nowhere"), "table_not_found", "nowhere")],
)
async def test_a_choice_that_can_t_be_loaded_is_told_at_once(
    old: Old, tmp_path: Path, tables: tuple[str, ...], code: str, words: str
) -> None:
    wanted = Wanted(old.dsn, "few", tables, "database", "few")
    with pytest.raises(MegaMCPError, match=words) as raised:
        await export(wanted, tmp_path / "few", silent)
    assert raised.value.code == code
    assert not list(tmp_path.iterdir())

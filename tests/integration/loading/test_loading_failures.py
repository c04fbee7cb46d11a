"""What goes wrong while an environment is loaded is told with its place, leaves nothing, and can be tried again."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.client import Client
from megamcp.errors import MegaMCPError
from megamcp.failpoints import VARIABLE, reset
from megamcp.loading.export import Wanted, export
from megamcp.settings import Settings
from tests.integration.loading.conftest import Old, Place, folder_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TABLE = "create table t (id int primary key, n int check (n > 0));\n"
COPY = "copy public.t (id, n) from stdin;\n1\t2\n2\t%s\n\\.\n"
GOOD = TABLE + COPY.replace("%s", "3")
BAD: dict[str, tuple[dict[str, str | bytes], tuple[str, ...]]] = {
    "syntax": ({"dump": TABLE + "\n\ncreat table u ();\n"}, ("dump.sql, line 4", "syntax error", "creat")),
    "unknown-type": ({"dump": TABLE + "create table u (\n  id integr\n);"}, ("dump.sql, line 3", "integr")),
    "constraint": ({"dump": TABLE + COPY.replace("%s", "-1")}, ("dump.sql, line", "t_n_check", "2, -1")),
    "duplicate": ({"dump": TABLE + COPY.replace("2\t%s", "1\t1")}, ("dump.sql, line", "t_pkey")),
    "value": ({"dump": TABLE + COPY.replace("%s", "many")}, ("dump.sql, line 4", "many")),
    "columns": ({"dump": TABLE + COPY.replace("%s", "3\t4")}, ("dump.sql, line 4", "extra data")),
    "no-table": ({"dump": TABLE + COPY.replace(".t", ".u")}, ("dump.sql, line 2", 'u" does not exist')),
    "cut-off": ({"dump": TABLE + COPY.replace("\\.\n", "")}, ("dump.sql", "line 3", "end without")),
    "copy-encoding": ({"dump": (TABLE + COPY.replace("%s", "3")).encode() + b"select '\xff';"}, ("line 6", "0xff")),
    "seed-constraint": (
        {
            "schema": TABLE,
            "seed": "insert into t values (1, 1);\ninsert into t values (2, 2);\ninsert into t values\n(3,-3);",
        },
        ("seed.sql, line 3", "t_n_check"),
    ),
    "seed-encoding": ({"schema": TABLE, "seed": b"select 1;\n\nselect 'M\xfcller';"}, ("seed.sql", "line 3", "0xfc")),
    "picture": ({"dump": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0" * 9}, ("dump.sql", "line 1")),
    "empty": ({"dump": "-- nothing\n"}, ("dump.sql", "no table")),
    "newer": ({"dump": "-- Dumped from database version 21.1\n" + GOOD}, ("dump.sql", "PostgreSQL 21")),
    "latin1": ({"dump": "SET client_encoding = 'LATIN1';\n" + GOOD}, ("dump.sql", "line 1", "LATIN1")),
    "two-databases": ({"dump": f"\\connect one\n{GOOD}\\connect two\n"}, ("dump.sql", "line 7", "another database")),
    "whole-cluster": (
        {"dump": "--\n-- PostgreSQL database cluster dump\n--\n\ncreate role one;\n\\connect shop\n" + GOOD},
        ("dump.sql", "line 2", "pg_dumpall"),
    ),
    "broken-gzip": ({"dump": gzip.compress(GOOD.encode() * 50)[:60]}, ("dump.sql", "gzip")),
    "broken-archive": ({"dump": b"PGDMP\1\16\0 nothing of the kind"}, ("dump.sql", "pg_restore")),
    "newer-archive": ({"dump": b"PGDMP\1\x63\0\4\10\1"}, ("dump.sql", "pg_restore", "version")),
}


@pytest.mark.parametrize("kind", ["schema", "database"])
@pytest.mark.parametrize("case", BAD)
async def test_a_bad_file_is_told_with_its_place_and_leaves_nothing(
    place: Place, tmp_path: Path, case: str, kind: str
) -> None:
    files, expected = BAD[case]
    before = await place.left()
    with pytest.raises(MegaMCPError) as raised:
        await place.load(folder_of(tmp_path / f"bad-{case}-{kind}", kind, **files))
    told = raised.value.message + json.dumps(raised.value.extra.get("problems", ""), ensure_ascii=False)
    for words in expected:
        assert words in told, told
    assert raised.value.hint
    assert raised.value.status in (422, 503), told
    assert await place.left() == before
    for name in files:  # and what is right loads afterwards, from the same folder
        (tmp_path / f"bad-{case}-{kind}" / f"{name}.sql").write_text(
            "insert into t values (7, 7);" if name == "seed" else GOOD if name == "dump" else TABLE
        )
    await place.load(tmp_path / f"bad-{case}-{kind}")


async def test_all_that_a_state_can_t_hold_is_told_at_once_and_before_rows_are_loaded(
    place: Place, tmp_path: Path
) -> None:
    dump = (
        GOOD.replace("3\n", "-3\n")
        + "create extension pgcrypto;\ncreate table other.u (id int primary key);\ncreate schema other;\n"
    )
    with pytest.raises(MegaMCPError) as raised:
        await place.load(folder_of(tmp_path / "much", dump=dump))
    assert raised.value.code == "unsupported_schema"
    places = [problem["object"].split(":")[0] for problem in raised.value.extra["problems"]]
    assert places == ["dump.sql, line 6", "dump.sql, line 7", "dump.sql, line 8"]


async def test_what_the_text_shows_and_what_the_catalog_shows_is_told_together(place: Place, tmp_path: Path) -> None:
    schema = """
        create table rooms (id int primary key, during tsrange, exclude using gist (during with &&));
        create unlogged table scratch (id int primary key);
        create table scratched (id int references scratch);
        create table plain (id int primary key, _mm_hidden int, xml xml);
        create materialized view seen as select id from plain;
        insert into plain select 1 / 0;
        alter table plain enable row level security;
        create rule quiet as on delete to rooms do instead nothing;
    """
    before = await place.left()
    with pytest.raises(MegaMCPError) as raised:
        await place.load(folder_of(tmp_path / "many", schema=schema))
    assert raised.value.code == "unsupported_schema"
    told = [problem["construct"] for problem in raised.value.extra["problems"]]
    assert set(told) >= {"temporary or unlogged table", "exclusion constraint", "row-level security", "column name"}, (
        told
    )
    assert "xml" in str(raised.value.extra["problems"])
    assert len(told) == len(set(told)) == 7, told
    assert await place.left() == before


@pytest.mark.parametrize("kind", ["schema", "database"])
async def test_a_file_that_changes_while_it_is_read_is_not_loaded(place: Place, tmp_path: Path, kind: str) -> None:
    folder = folder_of(tmp_path / f"changing-{kind}", kind, dump=f"-- changing {kind}\n{GOOD}")
    before = await place.left()

    def change(*_: object) -> None:
        (folder / "dump.sql").write_text(GOOD)

    with pytest.raises(MegaMCPError, match="changed while it was being loaded"):
        await place.load(folder, change)
    assert await place.left() == before


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"port": 1}, "source_unreachable", "can't be reached"),
        ({"database": "nowhere"}, "database_not_found", "nowhere"),
        ({"username": "nobody"}, "login_refused", "nobody"),
        ({"password": "wrong"}, "login_refused", "password"),
    ],
)
async def test_a_dsn_that_leads_nowhere_is_told_without_its_password(
    old: Old, tmp_path: Path, change: dict[str, Any], code: str, words: str
) -> None:
    url = make_url(old.dsn)
    query = {**url.query, "port": str(change.pop("port"))} if "port" in change else url.query
    dsn = url.set(query=query, **change).render_as_string(hide_password=False)
    with pytest.raises(MegaMCPError, match=words) as raised:
        await export(Wanted(dsn, "shop", kind="database"), tmp_path / "x", lambda *_: None)
    assert raised.value.code == code
    assert (url.password or "-") not in str(raised.value.problem())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("schema", "code", "words"),
    [("nowhere", "schema_not_found", "nowhere"), ("void", "empty_schema", "void")],
)
async def test_a_schema_that_holds_nothing_is_told(
    old: Old, tmp_path: Path, schema: str, code: str, words: str
) -> None:
    with pytest.raises(MegaMCPError, match=words) as raised:
        await export(Wanted(old.dsn, schema, kind="database"), tmp_path / "x", lambda *_: None)
    assert raised.value.code == code
    assert not list(tmp_path.iterdir())


async def test_missing_rights_are_told_by_table(old: Old, tmp_path: Path) -> None:
    await old.connection.execute(
        "create role reader login password 'read'; grant usage on schema shop to reader;"
        " grant select on shop.customers to reader"
    )
    dsn = make_url(old.dsn).set(username="reader", password="read").render_as_string(hide_password=False)
    try:
        with pytest.raises(MegaMCPError, match=r"may not read .*products.*lines") as raised:
            await export(Wanted(dsn, "shop", kind="database"), tmp_path / "x", lambda *_: None)
        assert raised.value.code == "source_rights"
        with pytest.raises(MegaMCPError, match="may not read schema few"):
            await export(Wanted(dsn, "few", kind="database"), tmp_path / "x", lambda *_: None)
    finally:
        await old.connection.execute("drop owned by reader; drop role reader")
    assert not list(tmp_path.iterdir())


async def test_the_folder_holds_no_password_and_an_existing_one_stays(old: Old, tmp_path: Path) -> None:
    folder = await export(Wanted(old.dsn, "few", kind="database", name="x"), tmp_path / "x", lambda *_: None)
    password = make_url(old.dsn).password
    assert password
    assert all(str(password) not in file.read_text() for file in folder.iterdir())
    with pytest.raises(MegaMCPError, match="there already"):
        await export(Wanted(old.dsn, "few", kind="database", name="x"), tmp_path / "x", lambda *_: None)


@pytest.mark.parametrize("kind", ["schema", "database"])
async def test_a_load_that_is_left_leaves_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Ctrl-C in the client: the connection closes in the middle of a load."""
    folder = folder_of(tmp_path / f"left-{kind}", kind, dump=f"-- left {kind}\n{GOOD}")
    before = await place.left()
    monkeypatch.setenv(VARIABLE, "load.copied=sleep:60")
    seen = asyncio.Event()
    async with Client(place.url) as client:
        task = asyncio.create_task(client.load_environment(folder, progress=lambda *_: seen.set()))
        await asyncio.wait_for(seen.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    monkeypatch.delenv(VARIABLE)
    async with asyncio.timeout(20):
        while await place.left() != before:
            await asyncio.sleep(0.05)
    async with Client(place.url) as client:
        told: list[tuple[str, int, int]] = []
        await client.load_environment(folder, progress=lambda *seen: told.append(seen))
        assert told


async def test_a_problem_is_the_same_with_progress_and_without(place: Place, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "same", dump=TABLE + "create table u (id integr);")
    problems = []
    async with Client(place.url) as client:
        for progress in (None, lambda *_: None):
            with pytest.raises(MegaMCPError) as raised:
                await client.load_environment(folder, progress=progress)
            problems.append((type(raised.value), raised.value.problem()))
    assert problems[0] == problems[1]


@pytest.fixture(scope="module")
def small_disk(scratch_folder: Path) -> Any:
    """A file system of 24 MiB, where root may mount one."""
    folder = scratch_folder / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0777", "tmpfs", folder], check=False)
    if done.returncode != 0:
        pytest.skip("only root can mount a file system")
    folder.chmod(0o777)
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.parametrize("kind", ["schema", "database"])
async def test_a_full_disk_is_told_and_the_next_load_works(
    place: Place, tmp_path: Path, small_disk: Path, kind: str
) -> None:
    rows = "".join(f"{n}\t{'x' * 500}\n" for n in range(80_000))
    dump = (
        "create table t (id int, body text);\ncopy t from stdin;\n"
        + rows
        + "\\.\nalter table t add primary key (id);\n"
    )
    folder = folder_of(tmp_path / f"full-{kind}", kind, dump=dump)
    server = await asyncpg.connect(place.dsn if kind == "schema" else place.state_dsn)
    own = small_disk / kind
    own.mkdir()
    uid = os.stat(await server.fetchval("show data_directory")).st_uid
    os.chown(own, uid, uid)
    await server.execute(f"create tablespace small_{kind} location '{own}'")
    await server.execute(f"grant create on tablespace small_{kind} to public")
    before = await place.left()
    await server.execute(f"alter system set default_tablespace = 'small_{kind}'")
    await server.execute("select pg_reload_conf()")
    try:
        async with asyncio.timeout(20):
            while await server.fetchval("show default_tablespace") != f"small_{kind}":
                await asyncio.sleep(0.02)
        with pytest.raises(MegaMCPError, match=r"disk .*is full") as raised:
            await place.load(folder)
        assert (raised.value.code, raised.value.status) == ("disk_full", 503)
        assert await place.left() == before
    finally:
        await server.execute("alter system reset default_tablespace")
        await server.execute("select pg_reload_conf()")
    async with asyncio.timeout(20):
        while await server.fetchval("show default_tablespace") != "":
            await asyncio.sleep(0.02)
    await place.load(folder)
    await server.execute(f"drop tablespace small_{kind}")
    await server.close()


LOADER = """
import asyncio, sys
from pathlib import Path
from pydantic import SecretStr
from megamcp.testing import running_gateway
async def main():
    async with running_gateway(sys.argv[1], state_urls=[sys.argv[2]], disk_reserve=0, reap_interval_s=3600) as running:
        services = running.services
        await services.environments.load(Path(sys.argv[3]), None, services.databases.sources.build)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("schema", "load.copied"),
        ("schema", "load.script"),
        ("database", "load.copied"),
        ("database", "build.filled"),
        ("database", "build.renamed"),
    ],
)
async def test_a_gateway_that_is_killed_in_the_middle_leaves_nothing_and_the_next_load_works(
    place: Place, tmp_path: Path, kind: str, where: str
) -> None:
    reset()
    folder = folder_of(tmp_path / f"killed-{kind}-{where.replace('.', '-')}", kind, dump=f"-- {where}\n{GOOD}")
    schemas, versions, _ = await place.left()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LOADER, place.dsn, place.state_dsn, str(folder)),
        env={**os.environ, VARIABLE: f"{where}=kill"},
    )
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL
    assert (await place.left())[:2] == (schemas, versions)
    loaded = await place.load(folder)
    rollout = (await place.services.rollouts.open(loaded.full_name))[0]["id"]
    _, rows, _ = await place.services.queries.run(rollout, None, "select sum(n) from t", None)
    assert bytes(rows[0]) == b"[5]"


def broken(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "environment.toml").write_text(text)
    return folder


async def test_the_start_tells_of_every_folder_that_it_cannot_load(place: Place, tmp_path: Path) -> None:
    one = broken(tmp_path / "one", 'name = "one"\n[servers.a]\nurl = "nowhere"\n')
    two = broken(tmp_path / "two", "name = ")
    gone = tmp_path / "gone"

    async def told(*folders: Path) -> MegaMCPError:
        settings = Settings(database_url=SecretStr(place.dsn), bundled_environments=False, environments=list(folders))
        with pytest.raises(MegaMCPError) as caught:
            await prepare(settings, place.dsn)
        return caught.value

    error = await told(one)
    assert str(one) in error.message
    assert "servers.a.url" in error.message
    error = await told(one, two, gone)
    assert all(str(folder) in error.message for folder in (one, two, gone))
    problems = {problem["where"]: problem["problem"] for problem in error.extra["problems"]}
    assert "servers.a.url" in problems[str(one)]
    assert "Invalid value" in problems[str(two)]
    assert "finds no" in problems[str(gone)]

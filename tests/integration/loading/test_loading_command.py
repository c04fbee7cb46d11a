"""`megamcp env load --from-dsn`, as a person runs it."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from megamcp.errors import MegaMCPError
from megamcp.failpoints import VARIABLE
from megamcp.loading import export as exporting
from tests.integration.loading.conftest import Old, Place, folder_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def command(place: Place, folder: Path, *words: str, **variables: str) -> asyncio.subprocess.Process:
    here = Path(__file__).parents[3]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megamcp", "env", "load", "--url", place.url, *words),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(here), "COLUMNS": "200", **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_one_command_takes_a_database_over(old: Old, place: Place, tmp_path: Path) -> None:
    words = ("--schema", "shop", "--server-entry", "shop_server:server", "--name", "taken", "--json")
    process = await command(place, tmp_path, *words, MEGAMCP_FROM_DSN=old.dsn)
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    document = json.loads(stdout)
    assert document["name"] == "taken"
    assert set(document["servers"][0]["tables"]) == {"customers", "products", "order", "lines"}
    assert {file.name for file in (tmp_path / "taken").iterdir()} == {"dump.sql", "environment.toml"}


async def test_what_is_wrong_is_one_line_without_the_password(old: Old, place: Place, tmp_path: Path) -> None:
    process = await command(place, tmp_path, "--from-dsn", old.dsn, "--schema", "nowhere", "--kind", "database")
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert "error: That database has no schema 'nowhere'.  [schema_not_found]" in stderr.decode()
    assert str(make_url(old.dsn).password) not in stderr.decode()
    assert not list(tmp_path.iterdir())


async def test_a_load_that_fails_takes_the_folder_that_it_made_away(old: Old, place: Place, tmp_path: Path) -> None:
    words = ("--from-dsn", old.dsn, "--schema", "shop", "--server-entry", "shop_server:server")
    for _ in range(2):  # the second time it isn't in the way
        process = await command(place, tmp_path, *words, "--url", "http://127.0.0.1:9")
        _, stderr = await process.communicate()
        assert process.returncode == 1
        assert "gateway_unreachable" in stderr.decode()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [(), ("x", "--from-dsn", "postgresql://x/y"), ("--from-dsn", "mysql://x/y"), ("--from-dsn", "postgresql://x/y")],
)
async def test_words_that_make_no_sense_together_are_told(place: Place, tmp_path: Path, words: tuple[str, ...]) -> None:
    process = await command(place, tmp_path, *words)
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert "hint:" in stderr.decode()


async def test_ctrl_c_ends_the_load_and_nothing_stays(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "load.copied=sleep:60")
    dump = (
        "-- interrupted\ncreate table t (id int primary key);\ngrant all on t to public;\ncopy t from stdin;\n1\n\\.\n"
    )
    folder_of(tmp_path / "interrupted", dump=dump)
    before = await place.left()
    process = await command(place, tmp_path, "interrupted")
    async with asyncio.timeout(30):
        while not await place.control.fetchval(
            "select count(*) from pg_stat_activity where state = 'idle in transaction' and query ilike 'copy%'"
        ):
            await asyncio.sleep(0.05)
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 130
    async with asyncio.timeout(20):
        while await place.control.fetchval(
            "select count(*) from pg_stat_activity where state = 'idle in transaction' and query ilike 'copy%'"
        ):
            await asyncio.sleep(0.05)
    assert await place.left() == before


async def test_remarks_are_shown(place: Place, tmp_path: Path) -> None:
    dump = "-- remarks\ncreate table t (id int primary key);\ngrant all on t to public;\nalter table t owner to me;\n"
    folder_of(tmp_path / "remarks", dump=dump)
    process = await command(place, tmp_path, "remarks")
    _, stderr = await process.communicate()
    assert process.returncode == 0
    assert "left out of dump.sql, since it means nothing here: 1 × grant, 1 × owner" in stderr.decode()


@pytest.mark.parametrize(
    ("bound", "value", "code"), [("_OLDEST", 190000, "postgres_too_old"), ("NEWEST", 17, "postgres_too_new")]
)
async def test_a_server_of_another_age_is_told(
    old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, code: str
) -> None:
    monkeypatch.setattr(exporting, bound, value)
    with pytest.raises(MegaMCPError, match="PostgreSQL 18") as raised:
        await exporting.export(exporting.Wanted(old.dsn, kind="database"), tmp_path / "x", lambda *_: None)
    assert raised.value.code == code

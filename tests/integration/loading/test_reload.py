"""Environments that change while a gateway runs."""

import asyncio
import os
import signal
from pathlib import Path

import asyncpg
import pytest
from pydantic import SecretStr

from megamcp.app import prepare
from megamcp.reload import reloading
from megamcp.settings import Settings

TEXT = """
name = "changing"
description = "{}"
[servers.weather]
url = "http://127.0.0.1:9/mcp"
"""


async def versions(database: str, least: int) -> int:
    """How many versions there are, once there are so many."""
    connection = await asyncpg.connect(database)
    try:
        async with asyncio.timeout(30):
            while True:
                found = await connection.fetchval("select count(*) from megamcp.environments where name = 'changing'")
                if found >= least:
                    return int(found)
                await asyncio.sleep(0.05)
    finally:
        await connection.close()


@pytest.mark.parametrize("watched", [False, True], ids=["SIGHUP", "a changed file"])
async def test_an_environment_that_changed_becomes_a_new_version_while_the_gateway_runs(
    database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, watched: bool
) -> None:
    file = tmp_path / "environment.toml"
    file.write_text(TEXT.format("first"))
    settings = Settings(
        database_url=SecretStr(database), bundled_environments=False, environments=[tmp_path], reload=watched
    )
    await prepare(settings, database)
    assert await versions(database, 1) == 1
    async with reloading(settings, database):
        await asyncio.sleep(0)  # the first look at the files

        def changed() -> None:
            if not watched:
                os.kill(os.getpid(), signal.SIGHUP)

        await asyncio.sleep(0.2 if watched else 0)
        file.write_text(TEXT.format("second, and longer"))
        changed()
        assert await versions(database, 2) == 2
        file.write_text("name = 'changing'\n[servers]\n")  # what can't be loaded changes nothing
        changed()
        async with asyncio.timeout(30):
            while "stay as they were" not in caplog.text:
                await asyncio.sleep(0.05)
        assert str(tmp_path) in caplog.text
        file.write_text(TEXT.format("third, and longer than the second"))
        changed()
        assert await versions(database, 3) == 3

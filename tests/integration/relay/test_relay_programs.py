"""Programs that people run: psql, pgbench and node's `pg`, while the database moves under them."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megamcp.postgres import layout
from tests.integration.relay.house import House


async def run(*command: str, cwd: Path | None = None, stdin: str = "", **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    output, _ = await process.communicate(stdin.encode())
    assert process.returncode == 0, output.decode()
    return output.decode()


async def keep_moving(home: House, task: "asyncio.Task[str]", pause_s: float = 0.2) -> str:
    """Moves as long as the program runs; its output."""
    while not task.done():
        await asyncio.wait([task], timeout=pause_s)
        await home.move("clone" if home.moves % 2 else "rename")
    return await task


@pytest.mark.parametrize("protocol", ["simple", "prepared"])
async def test_pgbench_loses_nothing_while_its_database_moves(home: House, protocol: str) -> None:
    pgbench = str(layout.binaries() / "pgbench")
    login = {"PGPASSWORD": home.password}
    where = ["-h", "127.0.0.1", "-p", str(home.port), "-U", home.user]
    await run(pgbench, *where, "-i", "-I", "dtGvp", "-q", "rollout", **login)
    command = [pgbench, *where, "-n", "-c", "4", "-t", "60", "-M", protocol, "rollout"]
    output = await keep_moving(home, asyncio.create_task(run(*command, **login)))
    assert "number of transactions actually processed: 240/240" in output
    assert "number of failed transactions: 0 " in output
    assert home.moves >= 1
    async with home.inside() as admin:
        row = await admin.fetchrow(
            "select (select count(*) from pgbench_history), (select sum(delta) from pgbench_history),"
            " (select sum(abalance) from pgbench_accounts), (select sum(bbalance) from pgbench_branches)"
        )
    assert row is not None
    assert row[0] == 240
    assert row[1] == row[2] == row[3]


async def test_pgbench_pipelines_while_its_database_moves(home: House, tmp_path: Path) -> None:
    script = tmp_path / "pipeline.sql"
    line = "insert into ledger (who, n) values ('p', :client_id);\n"
    script.write_text(f"\\startpipeline\nbegin;\n{line * 3}commit;\n{line}\\syncpipeline\n{line}\\endpipeline\n")
    command = [str(layout.binaries() / "pgbench"), "-h", "127.0.0.1", "-p", str(home.port), "-U", home.user]
    command += ["-n", "-c", "3", "-t", "80", "-M", "extended", "-f", str(script), "rollout"]
    await keep_moving(home, asyncio.create_task(run(*command, PGPASSWORD=home.password)))
    assert len(await home.written()) == 3 * 80 * 5


async def test_psql_works_through_moves(home: House) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("there is no psql on this machine")
    lines = ["create temp table made_here (a int);", "\\copy ledger (who, n) from stdin", "a\t1", "b\t2", "\\."]
    lines += ["\\set AUTOCOMMIT off"]
    for number in range(600):
        lines += [f"insert into ledger (who, n) values ('psql', {number});", "select count(*) from ledger;", "commit;"]
    lines += ["\\copy (select * from ledger) to stdout", "\\d ledger"]
    command = [psql, "-X", "-v", "ON_ERROR_STOP=1", "-q", "-f", "-", home.dsn]
    output = await keep_moving(home, asyncio.create_task(run(*command, stdin="\n".join(lines))))
    assert "psql\t599" in output
    assert len(await home.written()) == 602
    assert home.moves >= 1


NODE = """
const { Pool, Client } = require("pg");
const connectionString = process.env.DSN;
async function main() {
  const pool = new Pool({ connectionString, max: 3 });
  const work = async (who) => {
    for (let n = 0; n < 60; n++) {
      const client = await pool.connect();
      try {
        await client.query("begin");
        await client.query({ name: "add", text: "insert into ledger (who, n) values ($1, $2)", values: [who, n] });
        await client.query("commit");
      } finally { client.release(); }
      await pool.query("select $1::int + 1 as sum", [n]);
    }
  };
  await Promise.all(["a", "b", "c", "d"].map(work));
  await pool.end();
  console.log(JSON.stringify({ done: 240 }));
}
main().catch((error) => { console.error(error); process.exit(1); });
"""


@pytest.fixture(scope="module")
def node_folder(scratch_folder: Path) -> Path:
    """A folder with node's `pg`, fetched by npm."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no node with npm on this machine")
    folder = scratch_folder / "node"
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true}')
    try:
        fetched = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "pg@8"],
            cwd=folder,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch `pg` in a minute")
    if fetched.returncode:
        pytest.skip("npm can't fetch `pg` here")
    (folder / "work.js").write_text(NODE)
    return folder


async def test_node_pg_works_through_moves(home: House, node_folder: Path) -> None:
    output = await keep_moving(home, asyncio.create_task(run("node", "work.js", cwd=node_folder, DSN=home.dsn)))
    assert json.loads(output) == {"done": 240}
    written = await home.written()
    assert sorted(written) == sorted((who, n) for who in "abcd" for n in range(60))
    assert home.moves >= 1

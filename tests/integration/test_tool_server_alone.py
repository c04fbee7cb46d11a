"""A tool server with state that runs elsewhere: by its URL, with the same promises."""

import asyncio
import os
import shutil
import socket
import sys
from pathlib import Path

import httpx

from megamcp.testing import running_gateway
from tests.integration.promises.world import World

LEDGER = Path(__file__).parent.parent / "environments" / "ledger"


async def test_a_ledger_over_http_keeps_state_per_rollout(world_database: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "elsewhere"
    shutil.copytree(LEDGER, folder)
    text = (folder / "environment.toml").read_text()
    text = text.replace('name = "ledger"', 'name = "elsewhere"')
    text = text.replace('entry = "ledger_server:server"', f'url = "http://127.0.0.1:{port}/mcp"')
    (folder / "environment.toml").write_text(text)
    async with running_gateway(world_database) as running:
        await running.services.environments.load(folder)
        server = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).parent / "megamcp"), "tool-server", "ledger_server:server"),
            *("--port", str(port), "--environment", "elsewhere"),
            env={**os.environ, "MEGAMCP_DATABASE_URL": world_database},
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
        )
        try:
            async with httpx.AsyncClient() as http:
                for _ in range(1200):
                    try:
                        await http.get(f"http://127.0.0.1:{port}/healthz")
                        break
                    except httpx.TransportError:
                        await asyncio.sleep(0.05)
            world = World(running.services, running.url, world_database)
            a, b = [r["id"] for r in await running.services.rollouts.open("elsewhere", count=2)]
            assert (await world.call(a, "book", account_id=1, amount=2))["id"] == 1
            assert (await world.call(b, "book", account_id=1, amount=3))["id"] == 1
            point = await world.checkpoint(a)
            await world.call(a, "book", account_id=1, amount=4)
            await world.roll_back(a, point["id"])
            assert await world.call(a, "sums") == {"balances": 2, "entries": 2}
            assert await world.call(b, "sums") == {"balances": 3, "entries": 3}
            async with httpx.AsyncClient() as http:
                body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "items", "arguments": {}}}
                answer = await http.post(f"http://127.0.0.1:{port}/mcp", json=body)
            assert "error" in answer.json(), "without a handle there is no state to see"
        finally:
            server.terminate()
            await server.wait()

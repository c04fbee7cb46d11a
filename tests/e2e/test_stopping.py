"""A gateway that is asked to stop while a call runs."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.test_kill import Fortress, free_port


async def any_worker_tells_of_all(url: str) -> None:
    """Each of many requests, on connections of their own that the workers share out, is counted for each scrape."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        for _ in range(20):
            async with http.post("/v1/rollouts", json={"environment": "ledger"}) as answer:
                assert answer.status == 201
        for _ in range(20):
            async with http.get("/metrics") as answer:
                told = await answer.text()
            assert 'megamcp_rollout_events_total{environment="ledger",event="opened"} 21.0' in told
            assert "megamcp_rollouts_open 21.0" in told


@pytest.mark.e2e
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_call_that_outlasts_the_gateway_is_told_so(scratch_folder: Path, workers: int) -> None:
    folder = scratch_folder / f"stopping-{workers}"
    folder.mkdir()
    folder.chmod(0o755)
    castle = Fortress(folder, free_port(), workers)
    await castle.start()
    try:
        await castle.ready()
        async with aiohttp.ClientSession(castle.url) as http:
            async with http.post("/v1/rollouts", json={"environment": "ledger"}) as answer:
                rollout = (await answer.json())["rollouts"][0]["id"]
            await any_worker_tells_of_all(castle.url)
            arguments = {"key": "x"}
            call = {"tool": "hang", "arguments": arguments}
            message = {
                "jsonrpc": "2.0",
                "id": 7,
                "method": "tools/call",
                "params": {"name": "hang"} | {"arguments": arguments},
            }
            accept = {"accept": "application/json, text/event-stream"}
            asked = [
                asyncio.create_task(post(http, f"/v1/rollouts/{rollout}/call", call)),
                asyncio.create_task(post(http, f"/r/{rollout}/mcp", message, accept)),
            ]
            await asyncio.sleep(1.5)
            await castle.stop()
            (status, told), (_, said) = await asyncio.gather(*asked)
            assert (status, told["code"]) == (503, "gateway_stopping"), told
            assert said["error"]["data"]["code"] == "gateway_stopping", said
            assert said["id"] == 7
    finally:
        await castle.stop()
    assert "Traceback" not in (folder / "gateway.log").read_text()


async def post(
    http: aiohttp.ClientSession, path: str, body: object, headers: dict[str, str] | None = None
) -> tuple[int, dict]:
    async with http.post(path, json=body, headers=headers) as answer:
        return answer.status, await answer.json(content_type=None)

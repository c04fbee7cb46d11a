"""`/metrics`, and the bundled environments on a gateway by the public fixture."""

import asyncio
import json
import sys

import httpx
from prometheus_client.parser import text_string_to_metric_families

from megamcp.dataplane.watched import Doing
from megamcp.measures import COUNTED, IN_DATABASE, STANDING, Metrics
from megamcp.testing import Gateway


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and label values, these in the order of the labels' names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_tell_of_calls_by_tool_outcome_and_phase_of_rollouts_and_of_the_database(
    gateway: Gateway,
) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        opened = (await http.post("/v1/rollouts", json={"environment": "retail", "count": 3})).json()
        one = opened["rollouts"][0]["id"]

        async def call(tool: str, arguments: dict[str, str]) -> httpx.Response:
            return await http.post(f"/v1/rollouts/{one}/call", json={"tool": tool, "arguments": arguments})

        assert (await call("get_customer", {"customer_id": "C0"})).status_code == 200
        assert (await call("get_customer", {"customer_id": "C1241"})).status_code == 200
        assert (await call("no_such_tool_7", {})).status_code == 404
        point = (await http.post(f"/v1/rollouts/{one}/checkpoints", json={})).json()["id"]
        await http.post(f"/v1/rollouts/{one}/rollback", json={"checkpoint": point})
        await http.post(f"/v1/checkpoints/{point}/fork", json={"count": 2})
        await http.delete(f"/v1/rollouts/{one}")
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    told = samples(answer.text)
    assert told["megamcp_rollouts_open",] == 4
    assert told["megamcp_checkpoints_live",] >= 1
    assert told["megamcp_calls_in_flight",] == 0
    assert told["megamcp_postgres_connections", "allowed"] == gateway.settings.control_connections
    assert told["megamcp_tool_server_starts", "retail", "retail"] == 1
    assert told["megamcp_tool_server_state", "retail", "retail", "ready"] == 1
    assert ("process_resident_memory_bytes",) in told
    for phase in ("queue", "upstream", "total"):
        assert told["megamcp_call_seconds_count", "retail", "ok", phase, "retail", "get_customer"] == 1
    assert told["megamcp_call_seconds_count", "retail", "tool_error", "total", "retail", "get_customer"] == 1
    assert told["megamcp_call_errors_total", "unknown_tool", "retail", "other", "other"] == 1
    assert "no_such_tool_7" not in answer.text
    events = {"opened": 3, "checkpointed": 1, "rolled_back": 1, "forked": 2, "closed": 1}
    for event, count in events.items():
        assert told["megamcp_rollout_events_total", "retail", event] == count
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    listed = {name.removesuffix("_total") for name in (*COUNTED, *STANDING, *IN_DATABASE)}
    assert listed - families == set()


def test_a_server_that_lists_ever_new_tools_makes_no_more_than_so_many_series() -> None:
    metrics = Metrics()
    for number in range(2100):
        call = Doing()
        call.environment, call.server, call.tool = "world", "hostile", f"tool_{number}"
        metrics.ended(call, None, RuntimeError())
    found = [sample for family in metrics.registry.collect() for sample in family.samples]
    tools = {sample.labels["tool"] for sample in found if "tool" in sample.labels}
    assert len(tools) == 2001
    assert "other" in tools


async def test_top_tells_scripts_in_one_document_and_people_in_a_table(gateway: Gateway) -> None:
    command = [sys.executable, "-m", "megamcp", "top", "--once", "--interval", "0.1", "--url", gateway.url]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        await http.post("/v1/rollouts", json={"environment": "retail", "count": 2})
    said = []
    for options in (["--json"], []):
        process = await asyncio.create_subprocess_exec(*command, *options, stdout=asyncio.subprocess.PIPE)
        text, _ = await process.communicate()
        assert process.returncode == 0
        said.append(text.decode())
    told = json.loads(said[0])
    assert (told["rollouts_open"], told["database_up"], told["tools"]) == (2, True, [])
    assert "0.0 calls/s" in said[1]
    assert "2 rollouts" in said[1]

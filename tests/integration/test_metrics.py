"""`/metrics`, and the bundled environments on a gateway by the public fixture."""

import httpx

from megamcp.testing import Gateway


async def test_metrics_are_prometheus_text(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        await http.post("/v1/rollouts", json={"environment": "retail", "count": 3})
        answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert "megamcp_rollouts_open 3.0" in lines
    assert "megamcp_calls_in_flight 0.0" in lines
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)

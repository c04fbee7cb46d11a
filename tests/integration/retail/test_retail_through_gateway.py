"""The store as its users meet it: a rollout at the gateway, calls over REST, milestones by its query endpoint."""

from typing import Any

import httpx
import pytest

from megamcp.testing import Gateway
from tests.integration.retail.test_retail_tasks import EVALUATORS, TASKS


async def milestones(client: httpx.AsyncClient, rollout: str, task: str) -> list[bool]:
    reached = []
    for check in EVALUATORS[task]["milestones"]:
        answer = await client.post(
            f"/v1/rollouts/{rollout}/query", json={"server": check["server"], "sql": check["expr"]}
        )
        answer.raise_for_status()
        reached.append(answer.json()["rows"][0][0] == check["expect"])
    return reached


@pytest.mark.slow
async def test_gold_of_every_task_replays_through_the_gateway(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        opened = await client.post("/v1/rollouts", json={"environment": "retail", "count": len(TASKS)})
        opened.raise_for_status()
        for task, rollout in zip(TASKS, opened.json()["rollouts"], strict=True):
            assert not any(await milestones(client, rollout["id"], task["id"]))
            for call in task["gold"]:
                result: dict[str, Any] = (await client.post(f"/v1/rollouts/{rollout['id']}/call", json=call)).json()
                assert not result.get("isError"), (task["id"], call, result)
                assert "content" in result, result
            assert all(await milestones(client, rollout["id"], task["id"])), task["id"]

"""Agent frameworks from PyPI and the official client reach a rollout by its URL alone and finish a retail task.

The gateway is a real `megamcp serve` process. The models are scripted: they ask for the task's gold calls one by one,
each only after the result of the one before has come back, and say so at the end. Nothing of MegaMCP is imported on
the agents' side; whether the task is done is asked of the gateway, by the evaluator's own SQL.
"""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
import pytest_asyncio
from mcp.client.client import Client
from sqlalchemy.engine import make_url

RETAIL = Path(__file__).parents[2] / "tool_servers" / "retail"
TASKS = {task["id"]: task for task in map(json.loads, (RETAIL / "tasks.jsonl").read_text().splitlines())}
CHECKS = {entry["task"]: entry for entry in map(json.loads, (RETAIL / "evaluators.jsonl").read_text().splitlines())}
DONE = "It is done."

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout of the store at a gateway in a process of its own."""

    http: httpx.AsyncClient
    id: str
    url: str

    async def reached(self, task: str) -> dict[str, bool]:
        """Milestones and guards of kind state, as they are now."""
        entry = CHECKS[task]
        checks = [check for check in [*entry["milestones"], *entry["guards"]] if check["kind"] == "state"]
        return {check["id"]: await self._value(check["expr"]) == check["expect"] for check in checks}

    async def _value(self, sql: str) -> Any:
        answer = await self.http.post(f"/v1/rollouts/{self.id}/query", json={"server": "retail", "sql": sql})
        answer.raise_for_status()
        return answer.json()["rows"][0][0]

    async def tools(self) -> set[str]:
        """What the gateway says that an agent sees."""
        answer = await self.http.get(f"/v1/rollouts/{self.id}/tools")
        return {tool["name"] for tool in answer.json()["tools"]}

    async def calls(self) -> list[dict[str, Any]]:
        answer = await self.http.get(f"/v1/rollouts/{self.id}/events")
        return [event for event in answer.json()["events"] if event["kind"] == "call"]

    async def demand(self, task: str, before: dict[str, bool]) -> None:
        """Every milestone is reached by the task's gold calls and nothing else."""
        milestones = {check["id"] for check in CHECKS[task]["milestones"]}
        assert not all(before[name] for name in milestones)
        assert all((await self.reached(task)).values())
        calls = await self.calls()
        assert [(call["tool"], call["arguments"]) for call in calls] == [
            (step["tool"], step["arguments"]) for step in TASKS[task]["gold"]
        ]
        assert {call["state"] for call in calls} == {"done"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(
    postgres_dsn: str, template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `megamcp serve`, on a database with the bundled environments."""
    name, log = f"mm_e2e_{secrets.token_hex(4)}", tmp_path_factory.mktemp("serve") / "log"
    admin = await asyncpg.connect(postgres_dsn)
    await admin.execute(f'create database "{name}" template "{template_database}"')
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "megamcp", "serve", "--port", "0"),
            env={
                **os.environ,
                "MEGAMCP_DATABASE_URL": make_url(postgres_dsn).set(database=name).render_as_string(False),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
        )
    try:
        async with httpx.AsyncClient(base_url=await _ready(process, log), timeout=60) as client:
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0, log.read_text()
        await admin.execute(f'drop database "{name}" with (force)')
        await admin.close()


async def _ready(process: asyncio.subprocess.Process, log: Path) -> str:
    """The address that the process says it is ready at."""
    for _ in range(600):
        _, _, address = log.read_text().partition("ready at ")
        if "\n" in address:
            return address.split()[0]
        assert process.returncode is None, log.read_text()
        await asyncio.sleep(0.05)
    raise AssertionError(log.read_text())


@pytest_asyncio.fixture(loop_scope="session")
async def rollout(http: httpx.AsyncClient) -> Rollout:
    answer = await http.post("/v1/rollouts", json={"environment": "retail"})
    opened = answer.raise_for_status().json()["rollouts"][0]
    return Rollout(http, opened["id"], opened["url"])


@dataclass(slots=True)
class Script:
    """The gold calls of a task, handed out one by one."""

    task: str
    asked: int = 0
    seen_tools: set[str] = field(default_factory=set)

    def next(self, tools: list[str], results: list[str]) -> dict[str, Any] | None:
        """The next call, or None at the end. Every call so far must have its result."""
        assert len(results) == self.asked
        assert all(results)
        self.seen_tools.update(tools)
        gold = TASKS[self.task]["gold"]
        if self.asked == len(gold):
            return None
        self.asked += 1
        step: dict[str, Any] = gold[self.asked - 1]
        assert step["tool"] in tools
        return step


@pytest.mark.parametrize("task", ["retail-001", "retail-007"])
async def test_pydantic_ai_finishes_a_task(rollout: Rollout, task: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.mcp import MCPToolset
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    script = Script(task)

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        results = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
        step = script.next([tool.name for tool in info.function_tools], [str(part.content) for part in results])
        if step is None:
            return ModelResponse(parts=[TextPart(DONE)])
        return ModelResponse(parts=[ToolCallPart(step["tool"], step["arguments"])])

    before = await rollout.reached(task)
    agent = Agent(FunctionModel(model), toolsets=[MCPToolset(rollout.url)])
    answer = await agent.run(TASKS[task]["instruction"])
    assert answer.output == DONE
    assert script.seen_tools == await rollout.tools()
    await rollout.demand(task, before)


@pytest.mark.parametrize("task", ["retail-003", "retail-010"])
async def test_openai_agents_finishes_a_task(rollout: Rollout, task: str) -> None:
    from agents import Agent, Model, ModelResponse, Runner, Usage, set_tracing_disabled
    from agents.mcp import MCPServerStreamableHttp
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    set_tracing_disabled(True)
    script = Script(task)

    class Scripted(Model):
        async def get_response(self, *_: Any, input: Any, tools: Any, **__: Any) -> Any:
            items = [] if isinstance(input, str) else input
            results = [item["output"] for item in items if item.get("type") == "function_call_output"]
            step = script.next([tool.name for tool in tools], [json.dumps(result) for result in results])
            output: Any
            if step is None:
                text = ResponseOutputText(type="output_text", text=DONE, annotations=[])
                output = ResponseOutputMessage(
                    id="m", type="message", role="assistant", status="completed", content=[text]
                )
            else:
                output = ResponseFunctionToolCall(
                    type="function_call",
                    call_id=f"call-{script.asked}",
                    name=step["tool"],
                    arguments=json.dumps(step["arguments"]),
                )
            return ModelResponse(output=[output], usage=Usage(), response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    before = await rollout.reached(task)
    async with MCPServerStreamableHttp({"url": rollout.url}) as server:
        agent = Agent(name="desk", model=Scripted(), mcp_servers=[server])
        answer = await Runner.run(agent, TASKS[task]["instruction"])
    assert answer.final_output == DONE
    assert script.seen_tools == await rollout.tools()
    await rollout.demand(task, before)


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28", "auto"])
@pytest.mark.parametrize("task", ["retail-005"])
async def test_the_official_client_finishes_a_task(rollout: Rollout, task: str, mode: str) -> None:
    before = await rollout.reached(task)
    async with Client(rollout.url, mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == await rollout.tools()
        for step in TASKS[task]["gold"]:
            result = await client.call_tool(step["tool"], step["arguments"])
            assert not result.is_error, result
            assert (result.structured_content is not None) == (tools[step["tool"]].output_schema is not None)
    await rollout.demand(task, before)


async def test_frameworks_at_once_do_not_meet(http: httpx.AsyncClient) -> None:
    """One gateway, twelve rollouts, twelve tasks at once: each agent finishes its own, and no other's."""
    answer = await http.post("/v1/rollouts", json={"environment": "retail", "count": len(TASKS)})
    rollouts = [Rollout(http, each["id"], each["url"]) for each in answer.json()["rollouts"]]

    async def work(rollout: Rollout, task: str) -> None:
        async with Client(rollout.url) as client:
            for step in TASKS[task]["gold"]:
                assert not (await client.call_tool(step["tool"], step["arguments"])).is_error

    await asyncio.gather(*(work(rollout, task) for rollout, task in zip(rollouts, TASKS, strict=True)))
    for rollout, own in zip(rollouts, TASKS, strict=True):
        assert all((await rollout.reached(own)).values()), own
        calls = await rollout.calls()
        assert [call["tool"] for call in calls] == [step["tool"] for step in TASKS[own]["gold"]]

"""A client that uses all that a server offers: it lists, calls each tool, reads each resource, gets each prompt.

For each scenario of the suite's client part it makes an environment of the suite's server, opens a rollout of it and
talks to the gateway by the `mcp` SDK, in the scenario's era; so what the suite sees is the gateway's own client.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequestParams,
    ElicitRequestURLParams,
    ElicitResult,
    ListRootsResult,
    Root,
    TextContent,
    Tool,
)

ResultT = TypeVar("ResultT")

AT_ONCE = 4
CONSENTS = 5
"""Times that a request is repeated after the user has been sent to a page."""
DEADLINE_S = 100


@dataclass(slots=True)
class Task:
    """What the suite asks of its client."""

    scenario: str
    revision: str
    context: dict[str, Any]
    url: str
    log: list[str] = field(default_factory=list)


class Driver:
    """Serves `client` at a unix socket. `gateway` is None where the suite's server is to be talked to directly; `era`
    is given where it isn't to be the scenario's."""

    def __init__(self, folder: Path, gateway: str | None, era: str | None) -> None:
        self._folder = folder
        self._gateway = gateway
        self._era = era
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._number = 0

    async def serve(self, socket: Path) -> asyncio.Server:
        return await asyncio.start_unix_server(self._accept, socket)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = Task(**json.loads(await reader.readline()))
        failed = ""
        try:
            async with self._turns, asyncio.timeout(DEADLINE_S):
                await self._do(task)
        except Exception as error:
            failed = "\n".join(_told(error))
        writer.write(json.dumps({"log": task.log, "failed": failed}).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def _do(self, task: Task) -> None:
        if self._gateway is None:
            await use(task, task.url, self._era)
            return
        async with httpx.AsyncClient(base_url=self._gateway, timeout=60) as http:
            name = await self._load(http, task)
            opened = await http.post("/v1/rollouts", json={"environment": name})
            rollout = _checked(opened)["rollouts"][0]
            try:
                await use(task, rollout["url"], self._era)
            finally:
                await http.delete(f"/v1/rollouts/{rollout['id']}")

    async def _load(self, http: httpx.AsyncClient, task: Task) -> str:
        self._number += 1
        name = f"{re.sub(r'[^A-Za-z0-9]+', '-', task.scenario)}-{self._number}"
        folder = self._folder / name
        folder.mkdir(parents=True)
        lines = [f'name = "{name}"', "[servers.suite]", f"url = {json.dumps(task.url)}"]
        if oauth := _oauth(task, folder):
            lines += ["[servers.suite.oauth]", *(f"{key} = {json.dumps(text)}" for key, text in oauth.items())]
        (folder / "environment.toml").write_text("\n".join(lines) + "\n")
        _checked(await http.post("/v1/environments", json={"path": str(folder)}))
        return name


def _oauth(task: Task, folder: Path) -> dict[str, str]:
    """What the environment says of the gateway as an OAuth client; secrets lie in files beside it."""
    if task.scenario == "auth/basic-cimd":
        return {"client_metadata_url": "https://conformance-test.local/client-metadata.json"}
    given = {
        "client_id": task.context.get("client_id"),
        "client_secret": task.context.get("client_secret"),
        "private_key": task.context.get("private_key_pem"),
        "algorithm": task.context.get("signing_algorithm"),
        "issuer": task.context.get("issuer"),
    }
    if task.scenario.startswith("auth/client-credentials"):
        given["grant"] = "client_credentials"
    told = {key: text for key, text in given.items() if text is not None}
    for key in told.keys() & {"client_secret", "private_key"}:
        file = folder / key
        file.write_text(told[key])
        told[key] = f"${{file:{file}}}"
    return told


def _checked(answer: httpx.Response) -> Any:
    if answer.is_error:
        raise RuntimeError(f"{answer.request.url.path}: {answer.status_code} {answer.text[:500]}")
    return answer.json()


def _told(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [line for each in error.exceptions for line in _told(each)]
    return [f"{type(error).__name__}: {error}"]


async def use(task: Task, url: str, era: str | None) -> None:
    """All that there is behind a URL."""

    async def elicited(context: Any, params: ElicitRequestParams) -> ElicitResult:
        return await _elicited(task, params)

    handshake = era == "handshake" or (era is None and task.revision < "2026")
    client = Client(
        url,
        mode="legacy" if handshake else "auto",
        cache=None,
        elicitation_callback=elicited,
        sampling_callback=_sampled,
        list_roots_callback=_roots,
        read_timeout_seconds=60,
    )
    async with client:
        offered = client.server_capabilities
        if offered.tools is not None:
            tools = (await consented(task, client.list_tools)).tools
            for name, arguments in calls(task, tools):
                await told(task, f"call {name}", partial(client.call_tool, name, arguments))
        if offered.resources is not None:
            for resource in (await consented(task, client.list_resources)).resources:
                await told(task, f"read {resource.uri}", partial(client.read_resource, resource.uri))
        if offered.prompts is not None:
            for prompt in (await consented(task, client.list_prompts)).prompts:
                given = {argument.name: "text" for argument in prompt.arguments or () if argument.required}
                await told(task, f"get {prompt.name}", partial(client.get_prompt, prompt.name, given))


async def told(task: Task, what: str, request: Callable[[], Awaitable[Any]]) -> None:
    """One of many: what it fails with is noted, and the rest is done."""
    try:
        answer = await consented(task, request)
    except Exception as error:
        task.log += [f"{what}: {line}" for line in _told(error)]
    else:
        task.log.append(f"{what}: {answer.model_dump_json(exclude_none=True)[:300]}")


async def consented(task: Task, request: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """A request, repeated each time the user has been where its error sends them."""
    for _ in range(CONSENTS):
        try:
            return await request()
        except MCPError as error:
            url = page_of(error)
            if url is None:
                raise
            await visit(task, url)
    return await request()


def page_of(error: MCPError) -> str | None:
    """Where an error sends the user: the protocol's own (-32042), or the gateway's `authorization_required`."""
    data = error.error.data if isinstance(error.error.data, dict) else {}
    pages = data.get("elicitations") or [data]
    url = pages[0].get("url") if isinstance(pages[0], dict) else None
    return url if isinstance(url, str) else None


async def visit(task: Task, url: str) -> None:
    """As a browser would: to the last redirect."""
    async with httpx.AsyncClient(follow_redirects=True, timeout=60) as browser:
        page = await browser.get(url)
    task.log.append(f"visited {url.partition('?')[0]}, came to {str(page.url).partition('?')[0]}: {page.status_code}")


def calls(task: Task, tools: list[Tool]) -> list[tuple[str, dict[str, Any]]]:
    """Those that the suite asks for, else each tool once."""
    if asked := task.context.get("toolCalls"):
        return [(call["name"], call["arguments"]) for call in asked]
    known = {tool.name: tool.input_schema for tool in tools}
    return [
        # This one wants to see another's schema as it came to the client.
        (name, {"schema": known["json_schema_2020_12_tool"]})
        if name == "json_schema_echo"
        else (name, {key: value(schema, schema["properties"][key]) for key in schema.get("required", ())})
        for name, schema in known.items()
    ]


def value(root: dict[str, Any], schema: dict[str, Any]) -> Any:
    """One that a schema allows, near enough."""
    if (pointer := schema.get("$ref", "")).startswith("#/"):
        target: Any = root
        for part in pointer[2:].split("/"):
            target = target[part]
        return value(root, target)
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "number" | "integer":
            return 1
        case "boolean":
            return True
        case "array":
            return []
        case "object":
            return {key: value(root, schema["properties"][key]) for key in schema.get("required", ())}
        case "null":
            return None
    return "text"


async def _elicited(task: Task, params: ElicitRequestParams) -> ElicitResult:
    if isinstance(params, ElicitRequestURLParams):
        await visit(task, params.url)
        return ElicitResult(action="accept")
    schema = params.requested_schema
    return ElicitResult(action="accept", content={key: value(schema, s) for key, s in schema["properties"].items()})


async def _sampled(context: Any, params: CreateMessageRequestParams) -> CreateMessageResult:
    return CreateMessageResult(role="assistant", content=TextContent(text="text"), model="none")


async def _roots(context: Any) -> ListRootsResult:
    return ListRootsResult(roots=[Root(uri="file:///workspace", name="workspace")])

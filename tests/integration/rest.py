"""The gateway as a program meets it over HTTP: REST and raw MCP, with the shapes of their errors checked."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

MODERN = "2026-07-28"
_META = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}


@dataclass(frozen=True, slots=True)
class Rest:
    """Requests to one gateway. `refused` demands the documented shape of an error."""

    http: httpx.AsyncClient

    async def open(self, **options: Any) -> str:
        answer = await self.http.post("/v1/rollouts", json={"environment": "ledger", **options})
        assert answer.status_code == 201, answer.text
        rollout: str = answer.json()["rollouts"][0]["id"]
        return rollout

    async def done(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """The document of an answer that must be a success."""
        answer = await self.http.request(method, path, json=body, **more)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    async def call(self, rollout: str, tool: str, **arguments: Any) -> Any:
        """A tool's structured result; the call must succeed."""
        result = await self.done("POST", f"/v1/rollouts/{rollout}/call", {"tool": tool, "arguments": arguments})
        assert not result.get("isError"), result
        structured = result["structuredContent"]
        return structured["result"] if set(structured) == {"result"} else structured

    async def items(self, rollout: str) -> dict[str, str]:
        """The items that the seed didn't put there."""
        found = await self.call(rollout, "items")
        return {key: value for key, value in found.items() if not key.startswith("base-")}

    async def failed(self, rollout: str, tool: str, **arguments: Any) -> dict[str, Any]:
        """A tool's error result: HTTP 200, `isError`, text, and a code for programs."""
        answer = await self.http.post(f"/v1/rollouts/{rollout}/call", json={"tool": tool, "arguments": arguments})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        assert result["isError"] is True, result
        assert result["content"][0]["type"] == "text"
        assert result["content"][0]["text"]
        return result

    async def refused(self, status: int, code: str, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """The problem document of an answer that must be this error."""
        content = {"json": body} if body is not None else {}
        answer = await self.http.request(method, path, **content, **more)
        return problem(answer, status, code)

    async def digest(self, rollout: str) -> str:
        digest: str = (await self.done("GET", f"/v1/rollouts/{rollout}/digest"))["digest"]
        return digest

    async def calls(self, rollout: str) -> list[dict[str, Any]]:
        """The journal's rows of calls."""
        page = await self.done("GET", f"/v1/rollouts/{rollout}/events?limit=1000")
        return [event for event in page["events"] if event["kind"] == "call"]

    async def mcp(self, rollout: str, method: str, params: Any = None, *, modern: bool = False, **headers: str) -> Any:
        """The answer to one MCP request, in either era."""
        params = dict(params or {})
        sent = {"accept": "application/json, text/event-stream", **headers}
        if modern:
            params["_meta"] = {**_META, **params.get("_meta", {})}
            sent |= {"mcp-protocol-version": MODERN, "mcp-method": method}
            if "name" in params:
                sent["mcp-name"] = params["name"]
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return await self.http.post(f"/r/{rollout}/mcp", json=message, headers=sent)

    async def mcp_call(self, rollout: str, tool: str, *, modern: bool = False, **arguments: Any) -> httpx.Response:
        answer: httpx.Response = await self.mcp(
            rollout, "tools/call", {"name": tool, "arguments": arguments}, modern=modern
        )
        return answer


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The answer's document. Demands RFC 9457 and this status and code."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["code"] == code, document
    assert document["status"] == status
    assert document["type"].endswith(f"/{code}")
    assert document["title"]
    assert document["detail"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    return document


def rpc_error(answer: httpx.Response, code: str) -> dict[str, Any]:
    """The JSON-RPC error of an answer. Demands its shape and this `data.code`."""
    document = json.loads(answer.text.removeprefix("event: message\ndata: "))
    assert set(document) == {"jsonrpc", "id", "error"}, document
    error: dict[str, Any] = document["error"]
    assert isinstance(error["code"], int)
    assert error["message"]
    assert error["data"]["code"] == code, error
    return error

"""A tool server made with the official SDK, as a stranger would write it.

`official_server.py SOCKET|PORT|stdio [options]`
Options: `--stateful` keeps handshake-era sessions, `--json` answers in JSON where it may, `--sse` speaks the transport
of 2024-11-05, `--die` ends at once.
"""

import os
import sys
import time
from typing import Annotated

import anyio
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import ToolAnnotations
from pydantic import Field

server = MCPServer("official", instructions="Count and echo.")
counts: dict[str, int] = {}


@server.tool()
async def echo(value: str) -> str:
    """Gives the value back."""
    return value


@server.tool()
async def count(name: str) -> int:
    """Counts how often it ran."""
    counts[name] = counts.get(name, 0) + 1
    return counts[name]


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
async def pid() -> int:
    """The process."""
    return os.getpid()


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
async def peek(name: str, seconds: float = 0.0) -> int:
    """Reads a counter, slowly."""
    await anyio.sleep(seconds)
    return counts.get(name, 0)


@server.tool()
async def slow(name: str, seconds: float) -> int:
    """Counts, after a while."""
    counts[name + ".started"] = counts.get(name + ".started", 0) + 1
    try:
        await anyio.sleep(seconds)
    except BaseException:
        counts[name + ".cancelled"] = counts.get(name + ".cancelled", 0) + 1
        raise
    counts[name] = counts.get(name, 0) + 1
    return counts[name]


@server.tool()
async def steps(context: Context, number: int) -> str:
    """Reports progress."""
    for step in range(number):
        await context.report_progress(step + 1, number, f"step {step + 1}")
    return "done"


@server.tool()
async def regional(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
    """Wants its argument in a header too; the SDK refuses a call without."""
    return region


@server.tool()
async def trace(context: Context) -> dict[str, str]:
    """The trace that the call came with."""
    meta = context.request_context.meta or {}
    return {name: str(value) for name, value in meta.items() if name.startswith("trace")}


@server.tool()
async def broken() -> str:
    """Raises."""
    raise ValueError("it broke")


@server.tool()
async def block(seconds: float) -> str:
    """Blocks the whole process."""
    sys.stderr.write("blocking now\n")
    time.sleep(seconds)  # noqa: ASYNC251
    return "awake"


@server.tool()
async def crash(path: str) -> str:
    """Ends the process, unless the file at path exists already."""
    if os.path.exists(path):
        return "survived"
    open(path, "w").close()  # noqa: ASYNC230
    os._exit(3)


def main() -> None:
    where, options = sys.argv[1], sys.argv[2:]
    if "--die" in options:
        raise SystemExit("I die at once")
    if where == "stdio":
        server.run("stdio")
        return
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    if "--sse" in options:
        app = server.sse_app(transport_security=security)
    else:
        app = server.streamable_http_app(
            stateless_http="--stateful" not in options,
            json_response="--json" in options,
            transport_security=security,
        )
    place = {"port": int(where)} if where.isdigit() else {"uds": where}
    uvicorn.run(app, log_level="warning", **place)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

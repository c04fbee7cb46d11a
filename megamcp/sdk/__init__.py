"""Write a shared tool server: typed functions become MCP tools that work on a rollout's own state.

    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncConnection
    from megamcp.sdk import Server, ToolError

    server = Server("retail")

    @server.tool
    async def cancel_order(db: AsyncConnection, order_id: str) -> Order: ...

Parameters of type `AsyncConnection`, `Clock`, `Random` and `Context` are handed in; all others are the tool's
arguments, whose JSON Schema comes from the annotations and whose descriptions come from the docstring. Each
call is one transaction that holds its record, its effects and its result; a tool never commits. Raise
`ToolError` to refuse.

A plain class is a tool server too: `megamcp.sdk.classes`.

The modules, from the author's side to the machine's: server (registry), classes (plain ones), signature and docstring
(schemas), inject, results, calls (exactly once), documents and instances (state of kind `document`), database (the
guarded pool), rpc and endpoint (the wire), process (the runner).
"""

from typing import TYPE_CHECKING, Any

from megamcp.documents.table import Table
from megamcp.sdk.classes import read_only
from megamcp.sdk.inject import Clock, Context, Random
from megamcp.sdk.results import ToolError
from megamcp.sdk.server import Server, Tool
from megamcp.sdk.signature import ToolSignatureError

if TYPE_CHECKING:
    from megamcp.sdk.process import serve_tool_server

__all__ = [
    "Clock",
    "Context",
    "Random",
    "Server",
    "Table",
    "Tool",
    "ToolError",
    "ToolSignatureError",
    "read_only",
    "serve_tool_server",
]


def __getattr__(name: str) -> Any:
    # uvicorn is needed to serve, not to define tools: a test that imports a tool server doesn't pay for it.
    if name == "serve_tool_server":
        from megamcp.sdk.process import serve_tool_server

        return serve_tool_server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

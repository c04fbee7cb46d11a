"""An MCP server over stdio in plain Python, without any SDK: keeps jottings, and loads and dumps them."""

import json
import os
import sys
from typing import Any

state: dict[str, Any] = {"jottings": []}


def tool(name: str, read_only: bool = False, **arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    entry: dict[str, Any] = {"name": name, "description": f"The tool {name}.", "inputSchema": schema}
    return {**entry, "annotations": {"readOnlyHint": True}} if read_only else entry


TOOLS = [
    tool("jot", text="string"),
    tool("jottings", read_only=True),
    tool("refuse", text="string"),
    tool("crash", text="string"),
    tool("junk", text="string"),
    tool("process", read_only=True),
    tool("secrets", read_only=True),
    tool("export_state"),
    tool("import_state", state=os.environ.get("JOTTER_TAKES", "object")),
]


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def call(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    global state
    match name:
        case "jot":
            state["jottings"].append(arguments["text"])
            return str(len(state["jottings"])), False
        case "jottings":
            return json.dumps(state["jottings"]), False
        case "refuse":
            state["jottings"].append(arguments["text"])
            return "I would rather not.", True
        case "crash":
            state["jottings"].append(arguments["text"])
            sys.stderr.write("something is very wrong\n")
            sys.stderr.flush()
            os._exit(3)
        case "junk":
            write("this is no JSON")
            return "junk", False
        case "process":
            return str(os.getpid()), False
        case "secrets":
            return json.dumps([name for name in os.environ if "DSN" in name]), False
        case "export_state":
            return json.dumps(state), False
        case "import_state":
            given = arguments["state"]
            state = json.loads(given) if isinstance(given, str) else given
            state["jottings"].extend([])
            return "Done.", False
    return f"There is no tool {name}.", True


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    params = message.get("params") or {}
    match message["method"]:
        case "initialize":
            about = {"name": "jotter", "version": "1"}
            result: dict[str, Any] = {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": about,
            }
        case "tools/list":
            half = len(TOOLS) // 2
            result = {"tools": TOOLS[half:]} if params.get("cursor") else {"tools": TOOLS[:half], "nextCursor": "more"}
        case "tools/call":
            text, failed = call(params["name"], params.get("arguments") or {})
            result = {"content": [{"type": "text", "text": text}], "isError": failed}
        case _:
            result = {}
    write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}))

"""An MCP server over stdio in plain Python: keeps words in a file and in its memory."""

import json
import os
import sys
from pathlib import Path
from typing import Any

FILE = Path("kept.txt")
memory: list[str] = []
TOOLS = [
    {"name": "keep", "inputSchema": {"type": "object", "properties": {"word": {"type": "string"}}}},
    {"name": "kept", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
    {"name": "crash", "inputSchema": {"type": "object"}},
]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "keep":
        memory.append(arguments["word"])
        FILE.write_text("".join(f"{word}\n" for word in [*words(), arguments["word"]]))
    if name == "crash":
        sys.stderr.write("out of marbles\n")
        sys.stderr.flush()
        os._exit(3)
    return {"file": words(), "memory": memory}


def words() -> list[str]:
    return FILE.read_text().split() if FILE.exists() else []


for line in sys.stdin:
    if not line.strip():  # ends what a gateway that was killed had begun
        continue
    message = json.loads(line)
    if "id" not in message:
        continue
    params = message.get("params") or {}
    match message["method"]:
        case "initialize":
            about = {"name": "keeping", "version": "1"}
            result: dict[str, Any] = {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": about,
            }
        case "tools/list":
            result = {"tools": TOOLS}
        case "tools/call":
            told = call(params["name"], params.get("arguments") or {})
            result = {"content": [{"type": "text", "text": json.dumps(told)}], "structuredContent": told}
        case _:
            result = {}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
    sys.stdout.flush()

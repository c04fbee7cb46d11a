"""The tool server that `benchmarks.sandbox` measures: it keeps `MEGAMCP_HEAP_MB` megabytes of small objects.

    python -m benchmarks.heap_server

speaks MCP on its standard input and output, as any stdio server does.
"""

import os
import sys

from megamcp.sdk import Server
from megamcp.sdk.lines import Lines

_OBJECT_BYTES = 400
"""What one of `orders` takes: measured, with its strings and its place in the list."""

server = Server("heap")
orders = [
    {"id": number, "customer": f"customer {number}", "items": [number, number + 1], "note": f"note of order {number}"}
    for number in range((int(os.environ.get("MEGAMCP_HEAP_MB", "25")) << 20) // _OBJECT_BYTES)
]


@server.tool
def touch(order: int) -> str:
    """Reads an order and writes to it."""
    found = orders[order % len(orders)]
    found["note"] = f"touched {order}"
    return str(found["customer"])


def main() -> None:
    """Until standard input ends."""
    lines = Lines(server)

    def send(line: bytes) -> None:
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()

    for line in sys.stdin.buffer:
        lines.handle(line, send)


if __name__ == "__main__":
    main()

"""The same tool server as `echo`, on the official `mcp` SDK: stateless, answers in JSON.

python -m benchmarks.peers.official PORT
"""

import logging
import sys

import uvicorn
from mcp.server import MCPServer

server = MCPServer("echo", instructions="A tool that does nothing but answer.")


@server.tool()
def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: light rain, 11 degrees, wind from the west at 14 km/h."


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    app = server.streamable_http_app(json_response=True, stateless_http=True)
    uvicorn.run(app, port=int(sys.argv[1]), access_log=False, log_level="error", timeout_keep_alive=75)

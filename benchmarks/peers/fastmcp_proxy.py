"""FastMCP's proxy in front of a tool server, as its documentation recommends it. Runs in the peer's own environment.

    python fastmcp_proxy.py UPSTREAM_URL PORT

Nothing in it may import this project: it isn't there.
"""

import logging
import sys

from fastmcp.server import create_proxy

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    create_proxy(sys.argv[1], name="proxy").run(
        transport="http",
        port=int(sys.argv[2]),
        json_response=True,
        show_banner=False,
        log_level="error",
        uvicorn_config={"access_log": False, "timeout_keep_alive": 75},
    )

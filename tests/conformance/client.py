"""What the suite starts as the client under test: it hands its task to the harness, which waits at a unix socket.

The harness has everything imported already and drives the gateway (`driver`). So this needs the standard library only
and starts in a fraction of the time: the suite starts one of them for each scenario, all at once.
"""

import json
import os
import socket
import sys


def main() -> int:
    context = os.environ.get("MCP_CONFORMANCE_CONTEXT")
    task = {
        "scenario": os.environ["MCP_CONFORMANCE_SCENARIO"],
        "revision": os.environ["MCP_CONFORMANCE_PROTOCOL_VERSION"],
        "context": json.loads(context) if context else {},
        "url": sys.argv[1],
    }
    with socket.socket(socket.AF_UNIX) as harness:
        harness.connect(os.environ["MEGAMCP_CONFORMANCE_SOCKET"])
        harness.sendall(json.dumps(task).encode() + b"\n")
        with harness.makefile("rb") as answers:
            answer = json.loads(answers.readline() or b'{"failed": "the harness went away"}')
    for line in answer.get("log", ()):
        print(line)
    if failed := answer.get("failed"):
        print(failed, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

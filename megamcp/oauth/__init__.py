"""Authorization at tool servers that other people run: MCP's, as its client.

In this room is what the gateway shows at a server's door and how it comes by it: metadata, registration, consent,
tokens, and where they are kept. That requests are repeated with them is the data plane's (`dataplane.authorized`).
"""

from megamcp.oauth.authorities import Authorities

__all__ = ["Authorities"]

"""Requests to a server that wants to know who calls: each one goes out with what the server's `Authority` says.

A refusal is answered once or twice within the same request (a token was renewed, or changed for one with more scopes);
who may not come in is told so by the authority's errors. Only a POST raises them, since only that can be what a call
begins with: a GET goes on with a call that runs already, and has the refusal for its answer. The module knows no OAuth.
"""

from typing import Protocol

from megamcp.dataplane.http import Response
from megamcp.dataplane.ports import Authority
from megamcp.errors import MegaMCPError

_CHALLENGES = 3
"""Refusals that one request is repeated after: a token that is too old, one without a scope, and one to spare."""


class Requests(Protocol):
    """`http.Pool` as its users see it."""

    async def request(self, method: bytes, fields: bytes, body: bytes, target: bytes | None = None) -> Response: ...

    async def aclose(self) -> None: ...


class Authorized:
    """The same requests, each with the authority's header lines."""

    def __init__(self, requests: Requests, authority: Authority) -> None:
        self._requests = requests
        self._authority = authority

    async def request(self, method: bytes, fields: bytes, body: bytes, target: bytes | None = None) -> Response:
        """See `Pool.request`. Raises also what `Authority` raises: the server has not begun with the request then."""
        sent = await self._authority.fields()
        for _ in range(_CHALLENGES):
            response = await self._requests.request(method, fields + sent, body, target)
            if response.status not in (401, 403):
                return response
            try:
                challenge = response.field(b"www-authenticate")
                better = await self._authority.challenged(sent, response.status, challenge)
            except MegaMCPError:
                if method != b"POST":
                    return response
                response.close()
                raise
            except BaseException:
                response.close()
                raise
            if better is None:
                return response
            response.close()
            sent = better
        return await self._requests.request(method, fields + sent, body, target)

    async def aclose(self) -> None:
        await self._requests.aclose()

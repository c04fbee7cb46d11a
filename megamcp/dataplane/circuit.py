"""A server that can't be reached is left alone for a while: calls of it fail at once instead of waiting for it each.

After a few failures to connect in a row the circuit is open; when its time is over one request at a time is let
through as a probe, and what becomes of that closes the circuit or opens it again, for longer. A connection that breaks
later says nothing here: the server was there.
"""

import asyncio

from megamcp.dataplane.authorized import Requests
from megamcp.dataplane.http import ConnectFailed, Response

_FAILURES = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class Circuit:
    """Requests to one server, with a memory of whether it could be reached."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._failures = 0
        self._closed_again_at = 0.0
        self._probing = False
        self.reached = False
        """Whether a connection was ever made."""

    @property
    def open_s(self) -> float:
        """Seconds until the next probe; 0 when requests go through."""
        if self._failures < _FAILURES:
            return 0.0
        return max(0.0, self._closed_again_at - asyncio.get_running_loop().time())

    @property
    def broken(self) -> bool:
        """Whether it could not be reached, the last times."""
        return self._failures >= _FAILURES

    async def request(self, method: bytes, fields: bytes, body: bytes, target: bytes | None = None) -> Response:
        """See `Pool.request`. Raises ConnectFailed at once while the circuit is open."""
        if self.broken and (self._probing or self.open_s > 0):
            raise ConnectFailed("it could not be reached, the last times", retry_s=max(self.open_s, 0.1))
        self._probing = self.broken
        try:
            response = await self._requests.request(method, fields, body, target)
        except ConnectFailed as failed:
            self._failures += 1
            if self.broken:
                pause = min(_FIRST_PAUSE_S * 2 ** (self._failures - _FAILURES), _LONGEST_PAUSE_S)
                self._closed_again_at = asyncio.get_running_loop().time() + pause
                failed.retry_s = pause
            raise
        finally:
            self._probing = False
        self._failures, self.reached = 0, True
        return response

    async def aclose(self) -> None:
        await self._requests.aclose()

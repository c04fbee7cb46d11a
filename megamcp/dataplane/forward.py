"""Requests that only another gateway process can go on with, handed to it whole: its answer is the client's.

What belongs to one process says so in its name (`peer_of`): a question that a server put to a client, a call that is
held for answers, a stream that may be resumed. A request is handed on once: what the other doesn't know is gone.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable

from megamcp.dataplane.asgi import Receive, Scope, Send, disconnected
from megamcp.dataplane.http import Address, Broken, ConnectFailed, Pool, Response

FORWARDED = b"megamcp-forwarded"
_HOP_BY_HOP = frozenset(
    {b"host", b"content-length", b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect"}
)
_CONNECT_S = 2.0
_NAMED = re.compile(r"([0-9a-f]{8})-")


class Elsewhere(Exception):
    """The request is for another gateway process."""

    def __init__(self, peer: str, *, answered: bool) -> None:
        super().__init__(peer)
        self.peer = peer
        self.answered = answered
        """The message wants an answer, if only that its process is gone."""


def named(peer: str) -> str:
    """A new name, unguessable, of something that this process has."""
    return f"{peer}-{secrets.token_urlsafe(15)}"


def peer_of(name: str) -> str:
    """The process that has what is named so; empty for a name that is none of ours."""
    found = _NAMED.match(name)
    return found[1] if found else ""


class Forwarder:
    """Hands requests on. `find` gives a process's address (`unix:/path` or `http://host:port`), None for none."""

    def __init__(self, find: Callable[[str], Awaitable[str | None]]) -> None:
        self._find = find

    async def forward(self, peer: str, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """False where that process can't be reached: nothing was sent."""
        if (address := await self._find(peer)) is None:
            return False
        path = scope["path"] + ("?" + scope["query_string"].decode("latin-1") if scope.get("query_string") else "")
        socket = address.removeprefix("unix:") if address.startswith("unix:") else None
        url = f"http://localhost{path}" if socket else address + path
        pool = Pool(Address.of(url, socket), limit=1, idle_s=0.0, connect_s=_CONNECT_S)
        fields = b"%b: 1\r\n" % FORWARDED + b"".join(
            b"%b: %b\r\n" % (name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP
        )
        try:
            try:
                response = await pool.request(scope["method"].encode(), fields, body)
            except (ConnectFailed, Broken, OSError):
                return False
            headers = [(name, value) for name, value in response.fields.items() if name not in _HOP_BY_HOP]
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            leaving = asyncio.create_task(disconnected(receive))
            passing = asyncio.create_task(_pass_on(response, send))
            try:
                await asyncio.wait({leaving, passing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (leaving, passing):
                    task.cancel()
                await asyncio.gather(leaving, passing, return_exceptions=True)
                response.close()
            return True
        finally:
            await pool.aclose()


async def _pass_on(response: Response, send: Send) -> None:
    with contextlib.suppress(Broken):
        while (chunk := await response.next_chunk()) is not None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def was_forwarded(scope: Scope) -> bool:
    return any(name == FORWARDED for name, _ in scope["headers"])

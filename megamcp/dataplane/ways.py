"""The ways that a call may take to its server: at an address, or to a process that the gateway keeps alive.

A way hides lives: when a process dies, the next call gets a client for its successor. It decides nothing about calls;
`calls` says when a server seems stuck. Processes of one rollout each are in `dedicated`.
"""

import asyncio
import contextlib
from typing import Protocol

from megamcp.dataplane.children import Running, SocketChild, SocketFolder
from megamcp.dataplane.legacy import LegacyUpstream
from megamcp.dataplane.ports import ChildTarget, Limits, SocketTarget, UrlTarget
from megamcp.dataplane.protocol import Era, Upstream, UpstreamLost
from megamcp.dataplane.upstream import HttpUpstream
from megamcp.errors import MegaMCPError, UpstreamError

_CHILD_URL = "http://tool-server/mcp"


class Way(Protocol):
    """How the calls of a rollout reach one server."""

    comes_back: bool
    """Whether a server that is gone is started again, so that what it has not seen may be sent again."""

    async def warm(self) -> None:
        """Does what `upstream` would need long for, or fail at, where that is known before a call. Raises the same."""
        ...

    async def upstream(self) -> Upstream:
        """A client of the server as it lives now. Raises UpstreamError, DeadlineExceeded; see also `ControlPort`."""
        ...

    async def lost(self) -> None:
        """A connection broke: if the server is dying, waits for the end, so that the next try meets its successor."""
        ...

    def seems_stuck(self) -> bool:
        """A call ran past its deadline and was cancelled. Whether the server's process was ended for that."""
        ...

    @property
    def tail(self) -> str:
        """What the server printed last, where that is known."""
        ...


class Remote:
    """A server that somebody else runs."""

    comes_back = False
    tail = ""

    def __init__(self, name: str, target: UrlTarget | SocketTarget, limits: Limits) -> None:
        self.client: HttpUpstream | LegacyUpstream
        match target:
            case SocketTarget(path):
                self.client = HttpUpstream(name, _CHILD_URL, limits=limits, socket=path, era=Era.MODERN)
            case UrlTarget(url, headers, authority, sse):
                kind = LegacyUpstream if sse else HttpUpstream
                try:
                    self.client = kind(name, url, limits=limits, headers=headers, authority=authority)
                except ValueError as error:
                    raise UpstreamError(
                        f"Tool server {name!r} can't be used: {error}.", code="bad_server_address"
                    ) from None

    async def warm(self) -> None:
        pass

    async def upstream(self) -> Upstream:
        return self.client

    async def lost(self) -> None:
        pass

    def seems_stuck(self) -> bool:
        return False

    @property
    def state(self) -> str:
        """In a word: `unreachable` while calls of it fail at once, `reached`, or `unused`."""
        circuit = self.client.circuit
        return "unreachable" if circuit.broken else "reached" if circuit.reached else "unused"

    async def aclose(self) -> None:
        await self.client.aclose()


class Supervised:
    """A child of the gateway that serves all rollouts."""

    comes_back = True

    def __init__(self, name: str, target: ChildTarget, sockets: SocketFolder, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        self.child = SocketChild(name, target, sockets, limits)
        self._running: Running | None = None
        self._client: HttpUpstream | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[None] | None = None

    @property
    def tail(self) -> str:
        return self.child.tail

    @property
    def state(self) -> str:
        """In a word: `failing` while it isn't started again, `ready`, `starting` or `unused`."""
        if self.child.running is not None:
            return "ready"
        return "starting" if self.child.starting else "failing" if self.child.failing else "unused"

    async def warm(self) -> None:
        pass

    async def upstream(self) -> Upstream:
        running = self._running
        if running is None or not running.alive:
            running = await self.child.ready()
            if running is not self._running:
                if self._client is not None:
                    self._retire(self._client)
                self._running = running
                self._client = self._connect()
        assert self._client is not None
        return self._client

    def _connect(self) -> HttpUpstream:
        return HttpUpstream(self._name, _CHILD_URL, limits=self._limits, socket=self.child.socket, era=Era.MODERN)

    def _retire(self, client: HttpUpstream) -> None:
        task = asyncio.create_task(client.aclose())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def lost(self) -> None:
        await self.child.end()

    def seems_stuck(self) -> bool:
        """A child that answers nothing at all within the grace is killed.

        A tool that merely takes long was cancelled when its connection was dropped; one that blocks its
        process takes every other call on it along, and only a kill helps.
        """
        running = self.child.running
        if running is None or (self._probing and not self._probing.done()):
            return False
        self._probing = asyncio.create_task(self._probe(running), name=f"probe {self._name}")
        return False

    async def _probe(self, running: Running) -> None:
        # With a connection of its own: those of the pool may all be waiting for slow, healthy tools.
        limits = self._limits
        probe = self._connect()
        try:
            async with asyncio.timeout(limits.probe_s):
                await probe.request("server/discover", {})
        except (TimeoutError, UpstreamLost):
            running.kill(f"it blocked: no answer for {limits.probe_s:g} s after a call's deadline")
        except MegaMCPError:
            pass  # an answer, if an odd one: it is alive
        finally:
            await probe.aclose()

    async def aclose(self) -> None:
        if self._probing is not None and not self._probing.done():
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._probing
        await self.child.aclose()
        if self._client is not None:
            await self._client.aclose()

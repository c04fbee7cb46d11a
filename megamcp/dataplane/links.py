"""The way to each tool server of an environment: the process behind it, the client for it, its list of tools.

One link per (environment, server), made on first use and shared by all rollouts. A link hides lives: when a
child dies, the next call gets a client for its successor, while the tool list stays what it was. It decides
nothing about calls; `calls` says when a server seems stuck.
"""

import asyncio
import base64
import contextlib
import hashlib
import logging
from dataclasses import dataclass

import msgspec

from megamcp.dataplane import mirrored, wire
from megamcp.dataplane.children import Child, Running, SocketFolder
from megamcp.dataplane.mirrored import MirroredParameter
from megamcp.dataplane.ports import ChildTarget, EnvironmentView, Limits, ServerView, SocketTarget, UrlTarget
from megamcp.dataplane.protocol import Era, UpstreamLost
from megamcp.dataplane.upstream import Upstream
from megamcp.errors import DeadlineExceeded, MegaMCPError, NotFound, UpstreamError

log = logging.getLogger(__name__)

_MOST_PAGES = 100
_CHILD_URL = "http://tool-server/mcp"


class _Annotations(msgspec.Struct):
    readOnlyHint: bool | None = None


class _ToolHead(msgspec.Struct):
    name: str
    annotations: _Annotations | None = None
    inputSchema: msgspec.Raw = wire.ABSENT


class _ToolsPage(msgspec.Struct):
    tools: list[msgspec.Raw]
    nextCursor: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool as its server describes it. `text` is the description's own bytes."""

    name: str
    text: bytes
    read_only: bool
    mirrored: tuple[MirroredParameter, ...]


class Link:
    """One server of one environment."""

    def __init__(self, server: ServerView, sockets: SocketFolder, limits: Limits) -> None:
        self.server = server
        self._limits = limits
        self._child: Child | None = None
        self._running: Running | None = None
        self._upstream: Upstream | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._tools: dict[str, Tool] | None = None
        self._listing: asyncio.Task[dict[str, Tool]] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._instructions: str | None = None
        match server.target:
            case ChildTarget() as target:
                self._child = Child(server.name, target, sockets, limits)
            case SocketTarget(path):
                self._upstream = Upstream(server.name, _CHILD_URL, limits=limits, socket=path, era=Era.MODERN)
            case UrlTarget(url, headers):
                try:
                    self._upstream = Upstream(server.name, url, limits=limits, headers=headers)
                except ValueError as error:
                    raise UpstreamError(
                        f"Tool server {server.name!r} can't be used: {error}.", code="bad_server_address"
                    ) from None
                self._upstream.on_list_changed = self._forget_tools

    @property
    def child(self) -> Child | None:
        return self._child

    async def upstream(self) -> Upstream:
        """A client of the server as it lives now. Raises UpstreamError, DeadlineExceeded."""
        if self._child is None:
            assert self._upstream is not None
            return self._upstream
        running = self._running
        if running is None or not running.alive:
            running = await self._child.ready()
            if running is not self._running:
                if self._upstream is not None:
                    self._retire(self._upstream)
                self._running = running
                self._upstream = Upstream(
                    self.server.name, _CHILD_URL, limits=self._limits, socket=running.socket, era=Era.MODERN
                )
        assert self._upstream is not None
        return self._upstream

    def _retire(self, upstream: Upstream) -> None:
        task = asyncio.create_task(upstream.aclose())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def lost(self) -> None:
        """A connection broke: if the child is dying, waits for the end, so that the next try meets its successor."""
        running = self._running
        if self._child is not None and running is not None and running.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await running.ended.wait()

    def seems_stuck(self) -> None:
        """A call ran past its deadline: a child that answers nothing at all within the grace is killed.

        A tool that merely takes long was cancelled when its connection was dropped; one that blocks its
        process takes every other call on it along, and only a kill helps.
        """
        if self._running is None or not self._running.alive or (self._probing and not self._probing.done()):
            return
        self._probing = asyncio.create_task(self._probe(self._running), name=f"probe {self.server.name}")

    async def _probe(self, running: Running) -> None:
        # With a connection of its own: those of the pool may all be waiting for slow, healthy tools.
        limits = self._limits
        probe = Upstream(self.server.name, _CHILD_URL, limits=limits, socket=running.socket, era=Era.MODERN)
        try:
            async with asyncio.timeout(limits.probe_s):
                await probe.request("server/discover", {})
        except (TimeoutError, UpstreamLost):
            running.kill(f"it blocked: no answer for {limits.probe_s:g} s after a call's deadline")
        except MegaMCPError:
            pass  # an answer, if an odd one: it is alive
        finally:
            await probe.aclose()

    async def tools(self) -> dict[str, Tool]:
        """Its tools by name, in its own order; asked for once. Raises UpstreamError, DeadlineExceeded."""
        if self._tools is not None:
            return self._tools
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list(), name=f"list {self.server.name}")
            self._listing.add_done_callback(_retrieve)
        return await asyncio.shield(self._listing)

    def known_tool(self, name: str) -> Tool | None:
        return self._tools.get(name) if self._tools is not None else None

    async def instructions(self) -> str | None:
        await self.tools()
        return self._instructions

    def _forget_tools(self) -> None:
        self._tools = None

    async def _list(self) -> dict[str, Tool]:
        try:
            async with asyncio.timeout(self._limits.start_timeout_s + self._limits.list_timeout_s):
                try:
                    return await self._ask()
                except UpstreamLost:  # asking twice does no harm
                    await self.lost()
                    return await self._ask()
        except TimeoutError:
            raise DeadlineExceeded(
                f"Tool server {self.server.name!r} did not list its tools in time.",
                code="tool_server_timeout",
            ) from None

    async def _ask(self) -> dict[str, Tool]:
        upstream = await self.upstream()
        if self._child is not None:
            discovered = await upstream.request("server/discover", {})
            if not discovered.failed:
                with contextlib.suppress(msgspec.DecodeError):
                    found = msgspec.json.decode(discovered.body, type=dict[str, object]).get("instructions")
                    self._instructions = found if isinstance(found, str) else None
        tools: dict[str, Tool] = {}
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            reply = await upstream.request("tools/list", {"cursor": cursor} if cursor else {})
            if reply.failed:
                _, why, _ = wire.peek_error(reply.body)
                raise UpstreamError(
                    f"Tool server {self.server.name!r} does not list its tools: {why}",
                    code="tool_server_protocol",
                )
            try:
                page = msgspec.json.decode(reply.body, type=_ToolsPage)
                for text in page.tools:
                    tool = _tool(bytes(text))
                    tools.setdefault(tool.name, tool)
            except msgspec.DecodeError as error:
                raise UpstreamError(
                    f"Tool server {self.server.name!r} lists its tools in a way that is not MCP: {error}",
                    code="tool_server_protocol",
                ) from None
            cursor = page.nextCursor
            if not cursor:
                break
        if self._child is None:
            self._instructions = upstream.instructions
        self._tools = tools
        return tools

    async def aclose(self) -> None:
        for task in (self._listing, self._probing):
            if task is not None and not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        if self._child is not None:
            await self._child.aclose()
        if self._upstream is not None:
            await self._upstream.aclose()


def _tool(text: bytes) -> Tool:
    head = msgspec.json.decode(text, type=_ToolHead)
    read_only = head.annotations is not None and head.annotations.readOnlyHint is True
    return Tool(head.name, text, read_only, mirrored.parameters(head.inputSchema))


def _retrieve(task: asyncio.Task[dict[str, Tool]]) -> None:
    if not task.cancelled():
        task.exception()


@dataclass(frozen=True, slots=True)
class Route:
    """Where a tool name leads."""

    link: Link
    tool: Tool


@dataclass(frozen=True, slots=True)
class ToolList:
    """An environment's tools as clients see them: the JSON texts, and the same joined into pages."""

    texts: tuple[bytes, ...]
    pages: tuple[bytes, ...]
    tag: str

    def cursor(self, page: int) -> str:
        return base64.urlsafe_b64encode(f"{self.tag}.{page}".encode()).decode()

    def page_of(self, cursor: str) -> int | None:
        """The page that a cursor of ours stands for."""
        for page in range(1, len(self.pages)):
            if self.cursor(page) == cursor:
                return page
        return None


class Environment:
    """An environment's links and the names of its tools: plain for one server, `server__tool` for several."""

    def __init__(self, view: EnvironmentView, sockets: SocketFolder, limits: Limits) -> None:
        self.view = view
        self.links = {server.name: Link(server, sockets, limits) for server in view.servers}
        self._single = next(iter(self.links.values())) if len(self.links) == 1 else None
        # A server's name may hold "__" itself: the longest that fits wins.
        self._prefixes = sorted(((f"{name}__", link) for name, link in self.links.items()), key=_longest_first)
        self._limits = limits
        self._list: ToolList | None = None
        self._listed: tuple[dict[str, Tool], ...] = ()

    def known_route(self, name: str) -> Route | None:
        """The route, if that needs no question to a server."""
        link, own = self._addressed(name)
        tool = link.known_tool(own) if link is not None else None
        return Route(link, tool) if link is not None and tool is not None else None

    async def route(self, name: str) -> Route:
        """Raises NotFound, UpstreamError, DeadlineExceeded; asks no other server than the tool's own."""
        link, own = self._addressed(name)
        if link is not None and (tool := (await link.tools()).get(own)) is not None:
            return Route(link, tool)
        raise NotFound(
            f"Environment {self.view.name!r} has no tool {name[:200]!r}.",
            code="unknown_tool",
            hint="tools/list names the tools.",
        )

    def _addressed(self, name: str) -> tuple[Link | None, str]:
        if self._single is not None:
            return self._single, name
        for prefix, link in self._prefixes:
            if name.startswith(prefix):
                return link, name[len(prefix) :]
        return None, name

    async def tool_list(self) -> ToolList:
        """All tools, servers in the environment's order. One server that fails fails the list: a shorter one
        would be another environment to the model."""
        listed = tuple([await link.tools() for link in self.links.values()])
        if self._list is None or any(new is not old for new, old in zip(listed, self._listed, strict=True)):
            texts: list[bytes] = []
            for link, tools in zip(self.links.values(), listed, strict=True):
                if self._single:
                    texts.extend(tool.text for tool in tools.values())
                else:
                    prefix = f"{link.server.name}__"
                    texts.extend(_renamed(tool, prefix + tool.name) for tool in tools.values())
            size = self._limits.tools_per_page
            pages = tuple(b",".join(texts[i : i + size]) for i in range(0, len(texts), size)) or (b"",)
            tag = hashlib.sha256(b"\n".join(pages)).hexdigest()[:12]
            self._list, self._listed = ToolList(tuple(texts), pages, tag), listed
        return self._list

    async def instructions(self, timeout: float) -> str | None:
        """What the environment says, else what its servers say. Nothing when one can't say it in time."""
        if self.view.instructions is not None:
            return self.view.instructions
        said: list[str | None] = []
        with contextlib.suppress(TimeoutError, MegaMCPError):
            async with asyncio.timeout(timeout):
                said = [await link.instructions() for link in self.links.values()]
        return "\n\n".join(text for text in said if text) or None

    async def aclose(self) -> None:
        await asyncio.gather(*(link.aclose() for link in self.links.values()))


def _longest_first(entry: tuple[str, Link]) -> int:
    return -len(entry[0])


def _renamed(tool: Tool, name: str) -> bytes:
    """The tool under another name; every other value keeps its bytes."""
    members = msgspec.json.decode(tool.text, type=dict[str, msgspec.Raw])
    members["name"] = msgspec.Raw(wire.encode(name))
    return wire.encode(members)


class Environments:
    """All environments in use by this process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sockets = SocketFolder()
        self._known: dict[int, Environment] = {}

    def of(self, view: EnvironmentView) -> Environment:
        known = self._known.get(view.id)
        if known is None:
            known = self._known[view.id] = Environment(view, self._sockets, self._limits)
        return known

    async def forget(self, environment_id: int) -> None:
        """Stops an environment's servers; a later use starts them again."""
        if (known := self._known.pop(environment_id, None)) is not None:
            await known.aclose()

    async def aclose(self) -> None:
        await asyncio.gather(*(known.aclose() for known in self._known.values()))
        self._known.clear()
        self._sockets.remove()

"""The tool servers of an environment as calls see them: the way to each, its list of tools, the tools' names.

One link per (environment, server), made on first use and shared by all rollouts. The tool list stays what it was while
processes come and go; that of a dedicated server is taken from the first process that says it, since all run the
same program. The module decides nothing about calls.
"""

import asyncio
import base64
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from megamcp.dataplane import mirrored, wire
from megamcp.dataplane.children import SocketFolder
from megamcp.dataplane.dedicated import Dedicated, DedicatedServer
from megamcp.dataplane.mirrored import MirroredParameter
from megamcp.dataplane.ports import (
    ChildTarget,
    ControlPort,
    DedicatedTarget,
    EnvironmentView,
    Limits,
    RolloutView,
    ServerView,
    SocketTarget,
    UrlTarget,
)
from megamcp.dataplane.protocol import About, Client, UpstreamLost
from megamcp.dataplane.ways import Remote, Supervised, Way
from megamcp.errors import BadRequest, DeadlineExceeded, MegaMCPError, NotFound, UpstreamError

log = logging.getLogger(__name__)

_MOST_PAGES = 100


class _Annotations(msgspec.Struct):
    readOnlyHint: bool | None = None


class _ToolHead(msgspec.Struct):
    name: str
    annotations: _Annotations | None = None
    inputSchema: msgspec.Raw = wire.ABSENT


class _ToolsPage(msgspec.Struct):
    tools: list[msgspec.Raw]
    nextCursor: str | None = None
    ttlMs: int | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool as its server describes it. `text` is the description's own bytes."""

    name: str
    text: bytes
    read_only: bool
    mirrored: tuple[MirroredParameter, ...]


class Link:
    """One server of one environment. `rollout` says whose process answers, where each has its own."""

    def __init__(self, server: ServerView, sockets: SocketFolder, dedicated: Dedicated, limits: Limits) -> None:
        self.server = server
        self._limits = limits
        self._tools: dict[str, Tool] | None = None
        self._lists = 0
        """How often the list was given up for a newer one."""
        self._listings: dict[str | None, asyncio.Task[dict[str, Tool]]] = {}
        self._about = About()
        self._stale_at = math.inf
        self._dedicated = dedicated
        self._way: Remote | Supervised | DedicatedServer
        match server.target:
            case ChildTarget() as target:
                self._way = Supervised(server.name, target, sockets, limits)
            case DedicatedTarget(restart_on_move):
                starts = asyncio.Semaphore(limits.dedicated_starts)
                self._way = DedicatedServer(server.name, restart_on_move, self.forget_tools, starts)
            case SocketTarget() | UrlTarget() as target:
                self._way = Remote(server.name, target, limits)
                self._way.client.on_list_changed = self.forget_tools

    def way(self, rollout: RolloutView | None) -> Way:
        """How calls of a rollout reach the server. Raises BadRequest where that takes a rollout."""
        if not isinstance(self._way, DedicatedServer):
            return self._way
        if rollout is None:
            raise BadRequest(
                f"Tool server {self.server.name!r} has a process for each rollout, and this request names none.",
                code="rollout_required",
                hint="Open one with POST /v1/rollouts and use its url.",
            )
        return self._dedicated.way(rollout, self._way)

    async def tools(self, rollout: RolloutView | None) -> dict[str, Tool]:
        """Its tools by name, in its own order; asked for once. Raises UpstreamError, DeadlineExceeded, BadRequest."""
        if self._tools is not None and time.monotonic() < self._stale_at:
            return self._tools
        way = self.way(rollout)
        # Rollouts ask their own processes side by side: what ails one is no answer for another.
        asked = rollout.id if rollout is not None and isinstance(self._way, DedicatedServer) else None
        listing = self._listings.get(asked)
        if listing is None:
            listing = self._listings[asked] = asyncio.create_task(self._list(way), name=f"list {self.server.name}")
            listing.add_done_callback(lambda task: self._listed(asked, task))
        return await asyncio.shield(listing)

    async def reach(self) -> None:
        """Asks for its tools, whatever is known of them. Raises what `tools` does, AuthorizationRequired."""
        await self._list(self.way(None))

    def _listed(self, asked: str | None, task: "asyncio.Task[dict[str, Tool]]") -> None:
        del self._listings[asked]
        if not task.cancelled():
            task.exception()  # whoever asked may have left

    def known_tool(self, name: str) -> Tool | None:
        return self._tools.get(name) if self._tools is not None else None

    async def about(self, rollout: RolloutView | None) -> About:
        """What the server says about itself. Raises what `tools` raises."""
        await self.tools(rollout)
        return self._about

    @property
    def known(self) -> About:
        """The same, as far as it was asked."""
        return self._about

    @property
    def dedicated(self) -> bool:
        return isinstance(self._way, DedicatedServer)

    def modern(self, rollout: RolloutView | None) -> bool:
        """Whether it speaks 2026-07-28, as far as that is known."""
        if isinstance(self._way, DedicatedServer):
            return rollout is not None and self._dedicated.way(rollout, self._way).modern
        return not isinstance(self._way, Remote) or self._way.client.modern

    @property
    def state(self) -> str:
        """How it stands with the server, in a word."""
        return "a process each" if isinstance(self._way, DedicatedServer) else self._way.state

    @property
    def starts(self) -> int | None:
        """How often its process was started; None where it is no child for all rollouts."""
        return self._way.child.starts if isinstance(self._way, Supervised) else None

    @property
    def sessions(self) -> int:
        """Sessions of clients that it keeps."""
        return self._way.client.sessions if isinstance(self._way, Remote) else 0

    @property
    def shared(self) -> bool:
        """Whether it says the same to all who listen, since it keeps no sessions apart."""
        return isinstance(self._way, Remote) and self._way.client.sessionless

    def keeps(self, session: str) -> bool:
        """Whether the server has a session for a client's."""
        return isinstance(self._way, Remote) and self._way.client.keeps(session)

    async def tell(self, rollout: RolloutView | None, method: str, client: Client) -> None:
        """A notification of a client, if the server is there and knows it."""
        if isinstance(self._way, Remote):
            await self._way.client.tell(method, client)
        elif isinstance(self._way, DedicatedServer) and rollout is not None:
            await self._dedicated.way(rollout, self._way).tell(method, client)

    async def end(self, session: str) -> None:
        """A client's session, or all of a rollout's, are over."""
        if isinstance(self._way, Remote):
            await self._way.client.end(session)

    def forget_tools(self) -> None:
        self._tools = None
        self._lists += 1

    async def _list(self, way: Way) -> dict[str, Tool]:
        try:
            async with asyncio.timeout(self._limits.start_timeout_s + self._limits.list_timeout_s):
                try:
                    return await self._ask(way)
                except UpstreamLost:  # asking twice does no harm
                    await way.lost()
                    return await self._ask(way)
        except TimeoutError:
            raise DeadlineExceeded(
                f"Tool server {self.server.name!r} did not list its tools in time.",
                code="tool_server_timeout",
            ) from None

    async def _ask(self, way: Way) -> dict[str, Tool]:
        lists = self._lists
        upstream = await way.upstream()
        about = await upstream.about()
        tools: dict[str, Tool] = {}
        cursor: str | None = None
        fresh_s = math.inf
        for _ in range(_MOST_PAGES if "tools" in about.capabilities or not about.capabilities else 0):
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
                    try:
                        tool = _tool(bytes(text), mirrors=upstream.modern)
                    except mirrored.Invalid as reason:  # 2026-07-28: a client leaves such a tool out
                        log.warning("a tool of server %s is left out: %s", self.server.name, reason)
                        continue
                    tools.setdefault(tool.name, tool)
            except msgspec.DecodeError as error:
                raise UpstreamError(
                    f"Tool server {self.server.name!r} lists its tools in a way that is not MCP: {error}",
                    code="tool_server_protocol",
                ) from None
            fresh_s = min(fresh_s, page.ttlMs / 1000 if page.ttlMs else math.inf)
            cursor = page.nextCursor
            if not cursor:
                break
        self._about = about
        self._stale_at = time.monotonic() + fresh_s
        if lists == self._lists:
            self._tools = tools
        return tools

    async def aclose(self) -> None:
        for task in list(self._listings.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        if not isinstance(self._way, DedicatedServer):
            await self._way.aclose()


def _tool(text: bytes, *, mirrors: bool) -> Tool:
    """`mirrors`: its server is of the revision that has headers for arguments. Raises mirrored.Invalid."""
    head = msgspec.json.decode(text, type=_ToolHead)
    read_only = head.annotations is not None and head.annotations.readOnlyHint is True
    return Tool(head.name, text, read_only, mirrored.parameters(head.inputSchema) if mirrors else ())


@dataclass(frozen=True, slots=True)
class Route:
    """Where a tool name leads."""

    server: ServerView
    way: Way
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

    def __init__(self, view: EnvironmentView, sockets: SocketFolder, dedicated: Dedicated, limits: Limits) -> None:
        self.view = view
        self.links = {server.name: Link(server, sockets, dedicated, limits) for server in view.servers}
        self._single = next(iter(self.links.values())) if len(self.links) == 1 else None
        # A server's name may hold "__" itself: the longest that fits wins.
        self._prefixes = sorted(((f"{name}__", link) for name, link in self.links.items()), key=_longest_first)
        self._limits = limits
        self.may_ask = not all(server.exactly_once for server in view.servers)
        """Whether a server may ask the client something while it works on a request: those of our SDK don't."""
        self._list: ToolList | None = None
        self._listed: tuple[dict[str, Tool], ...] = ()

    def known_route(self, name: str, rollout: RolloutView) -> Route | None:
        """The route, if that needs no question to a server."""
        link, own = self._addressed(name)
        tool = link.known_tool(own) if link is not None else None
        return Route(link.server, link.way(rollout), tool) if link is not None and tool is not None else None

    async def route(self, name: str, rollout: RolloutView) -> Route:
        """Raises NotFound, UpstreamError, DeadlineExceeded; asks no other server than the tool's own."""
        link, own = self._addressed(name)
        if link is not None and (tool := (await link.tools(rollout)).get(own)) is not None:
            return Route(link.server, link.way(rollout), tool)
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

    async def tool_list(self, rollout: RolloutView | None) -> ToolList:
        """All tools, servers in the environment's order. One server that fails fails the list: a shorter one
        would be another environment to the model."""
        listed = tuple([await link.tools(rollout) for link in self.links.values()])
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

    async def about(self, rollout: RolloutView | None, timeout: float) -> About:
        """What the environment says about itself, and its servers together; without those that can't say it in time."""
        said = await asyncio.gather(*(self._said(link, rollout, timeout) for link in self.links.values()))
        capabilities: dict[str, Any] = {"tools": {}}
        for one in said:
            capabilities = _merged(capabilities, one.capabilities)
        instructions = self.view.instructions
        if instructions is None:
            instructions = "\n\n".join(one.instructions for one in said if one.instructions) or None
        return About(instructions, capabilities)

    async def _said(self, link: Link, rollout: RolloutView | None, timeout: float) -> About:
        with contextlib.suppress(TimeoutError, MegaMCPError):
            async with asyncio.timeout(timeout):
                return await link.about(rollout)
        return About()

    def able(self, capability: str) -> list[Link]:
        """The servers that have declared a capability, in the environment's order."""
        return [link for link in self.links.values() if capability in link.known.capabilities]

    @property
    def single(self) -> Link | None:
        return self._single

    def addressed(self, name: str) -> tuple[Link | None, str]:
        """The server that a prefixed name is for, and the name that the server knows."""
        return self._addressed(name)

    def prefixed(self, link: Link, name: str) -> str:
        return name if self._single is not None else f"{link.server.name}__{name}"

    async def end(self, session: str) -> None:
        """A client's session, or all of a rollout's, are over."""
        for link in self.links.values():
            await link.end(session)

    async def aclose(self) -> None:
        await asyncio.gather(*(link.aclose() for link in self.links.values()))


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What either can do."""
    found = dict(one)
    for name, value in other.items():
        known = found.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            found[name] = _merged(known, value)
        elif isinstance(known, bool) and isinstance(value, bool):
            found[name] = known or value
        else:
            found.setdefault(name, value)
    return found


def _longest_first(entry: tuple[str, Link]) -> int:
    return -len(entry[0])


def _renamed(tool: Tool, name: str) -> bytes:
    """The tool under another name; every other value keeps its bytes."""
    members = msgspec.json.decode(tool.text, type=dict[str, msgspec.Raw])
    members["name"] = msgspec.Raw(wire.encode(name))
    return wire.encode(members)


class Environments:
    """All environments in use by this process."""

    def __init__(self, control: ControlPort, limits: Limits) -> None:
        self._limits = limits
        self._sockets = SocketFolder()
        self._known: dict[int, Environment] = {}
        self.dedicated = Dedicated(control, limits)

    def of(self, view: EnvironmentView) -> Environment:
        known = self._known.get(view.id)
        if known is None:
            known = self._known[view.id] = Environment(view, self._sockets, self.dedicated, self._limits)
        return known

    def states(self) -> dict[str, dict[str, str]]:
        """How it stands with the servers that this process has had to do with, by environment."""
        return {
            f"{one.view.name}@{one.view.version}": {name: link.state for name, link in one.links.items()}
            for one in self._known.values()
        }

    def starts(self) -> dict[tuple[str, str], int]:
        """How often the process of each server that all rollouts share was started, by environment and server."""
        found: dict[tuple[str, str], int] = {}
        for one in self._known.values():
            for name, link in one.links.items():
                if (starts := link.starts) is not None:
                    found[one.view.name, name] = found.get((one.view.name, name), 0) + starts
        return found

    def sessions(self) -> int:
        """Sessions of clients that servers keep."""
        return sum(link.sessions for one in self._known.values() for link in one.links.values())

    async def end(self, environment_id: int, session: str) -> None:
        """A client's session is over."""
        if (known := self._known.get(environment_id)) is not None:
            await known.end(session)

    async def forget(self, environment_id: int) -> None:
        """Stops an environment's servers; a later use starts them again."""
        if (known := self._known.pop(environment_id, None)) is not None:
            await known.aclose()
            await self.dedicated.forget(environment_id)

    async def aclose(self) -> None:
        await asyncio.gather(self.dedicated.aclose(), *(known.aclose() for known in self._known.values()))
        self._known.clear()
        self._sockets.remove()

"""What servers offer beside tools, merged and routed: resources, prompts, completion, log levels, tasks.

Prompts are named like tools. A URI is its server's own and keeps its bytes: it belongs to the first server that knows
it, asked in the environment's order, and remembered. Lists are gone through server after server, a page at a time; a
cursor holds the server and its own cursor. Nothing here is journaled: what changes state is a tool.
"""

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import msgspec

from megamcp.dataplane import messages, rounds, wire
from megamcp.dataplane.links import Environment, Link
from megamcp.dataplane.patience import patient
from megamcp.dataplane.ports import Limits, RolloutView
from megamcp.dataplane.protocol import Client, UpstreamLost
from megamcp.errors import DeadlineExceeded, NotFound, UpstreamError

Params = dict[str, msgspec.Raw]

_LISTS = {
    "resources/list": ("resources", "resources"),
    "resources/templates/list": ("resources", "resourceTemplates"),
    "prompts/list": ("prompts", "prompts"),
}
_BY_URI = frozenset({"resources/read", "resources/subscribe", "resources/unsubscribe"})
SESSIONS_OWN = frozenset({"resources/subscribe", "resources/unsubscribe", "logging/setLevel"})
"""What 2026-07-28 has no methods for: requests and subscriptions say it themselves there."""
_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_KEPT = 4096
_UNKNOWN = (wire.METHOD_NOT_FOUND, wire.INVALID_PARAMS, -32002)
"""How a server says that it doesn't know what is asked for."""


_Ask = Callable[[Link, Params], Awaitable[wire.Reply]]


class _Page(msgspec.Struct):
    nextCursor: str | None = None


class _Reference(msgspec.Struct):
    type: str
    name: str | None = None
    uri: str | None = None


class Features:
    """Does the requests of rollouts that are no tool calls."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._owners: OrderedDict[tuple[int, str], Link] = OrderedDict()

    async def request(
        self, environment: Environment, rollout: RolloutView | None, method: str, params: Params, client: Client
    ) -> tuple[wire.Reply, list[Link]]:
        """The reply, and the servers that it is of.

        Raises RpcFailure for a method that nobody here knows, NotFound, DeadlineExceeded, UpstreamError.
        """
        # What can be done here is known once each server was asked; that is done once, not for each request.
        await environment.about(rollout, self._limits.list_timeout_s)
        asked: list[Link] = []

        async def ask(link: Link, changed: Params) -> wire.Reply:
            reply = await self._ask(link, rollout, method, changed, client)
            if not reply.failed:
                asked.append(link)
            return reply

        return await self._routed(environment, method, params, ask), asked

    async def _routed(self, environment: Environment, method: str, params: Params, ask: _Ask) -> wire.Reply:
        if method in _LISTS:
            return await self._list(environment, method, params, ask)
        if method in _BY_URI:
            return await self._by_uri(environment, params, ask)
        if method == "prompts/get":
            link, own = environment.addressed(wire.read_string(params.get("name"), "name"))
            if link is None:
                raise no_prompt(own)
            return await ask(link, {**params, "name": msgspec.Raw(wire.encode(own))})
        if method == "completion/complete":
            return await self._complete(environment, params, ask)
        if method == "logging/setLevel" and environment.may_ask:
            if (level := wire.read_string(params.get("level"), "level")) not in _LEVELS:
                raise wire.RpcFailure(
                    wire.INVALID_PARAMS,
                    f"There is no log level {level[:50]!r}: it is one of {', '.join(_LEVELS)}.",
                    data={"code": "invalid_params"},
                )
            return await self._everywhere(environment.able("logging"), params, ask)
        if method.startswith("tasks/"):
            return await self._first(list(environment.links.values()), params, ask)
        if environment.single is not None and not environment.single.server.exactly_once:
            return await ask(environment.single, params)  # an extension that the two sides agree on
        raise no_method(method)

    async def _ask(
        self, link: Link, rollout: RolloutView | None, method: str, params: Params, client: Client
    ) -> wire.Reply:
        way = link.way(rollout)
        try:
            async with asyncio.timeout(link.server.call_timeout_s or self._limits.call_timeout_s) as scope:
                with patient(client, scope) as asker:

                    async def send(more: rounds.More) -> wire.Reply:
                        upstream = await way.upstream()
                        if upstream.modern and method in SESSIONS_OWN:
                            return wire.Reply(b"{}")  # `listening` and `methods` keep it
                        return await upstream.request(method, {**params, **more}, asker)

                    try:
                        return await rounds.settled(send, asker)
                    except UpstreamLost:  # asking twice does no harm
                        await way.lost()
                        return await rounds.settled(send, asker)
        except TimeoutError:
            raise DeadlineExceeded(
                f"Tool server {link.server.name!r} did not answer {method} in time.", code="tool_server_timeout"
            ) from None

    async def _list(
        self,
        environment: Environment,
        method: str,
        params: Params,
        ask: _Ask,
    ) -> wire.Reply:
        capability, key = _LISTS[method]
        links = environment.able(capability)
        if not links:
            raise no_method(method)
        if environment.single is not None:
            return await ask(links[0], params)
        place, cursor = 0, params.get("cursor")
        if cursor is not None and bytes(cursor) != b"null":
            place, cursor = _place(wire.read_string(cursor, "cursor"), links)
        rest = {name: value for name, value in params.items() if name != "cursor"}
        link = links[place]
        reply = await ask(link, {**rest, "cursor": cursor} if cursor is not None else rest)
        if reply.failed:
            return reply
        try:
            members = wire.read_members(reply.body, "result")
            following = msgspec.json.decode(reply.body, type=_Page).nextCursor
            if key == "prompts":
                members[key] = _renamed(members.get(key, msgspec.Raw(b"[]")), environment, link)
        except (wire.RpcFailure, msgspec.DecodeError) as error:
            raise UpstreamError(
                f"Tool server {link.server.name!r} lists its {key} in a way that is not MCP: {error}",
                code="tool_server_protocol",
            ) from None
        if following:
            members["nextCursor"] = _cursor(link, following)
        elif place + 1 < len(links):
            members["nextCursor"] = _cursor(links[place + 1], None)
        return wire.Reply(wire.encode(members))

    async def _by_uri(self, environment: Environment, params: Params, ask: _Ask) -> wire.Reply:
        if not (links := environment.able("resources")):
            raise no_method("resources/…")
        key = environment.view.id, wire.read_string(params.get("uri"), "uri")
        if (owner := self._owners.get(key)) is not None and owner in links:
            links = [owner]
        reply, link = await self._found(links, params, ask)
        if link is not None and len(environment.links) > 1:
            self._owners[key] = link
            self._owners.move_to_end(key)
            if len(self._owners) > _KEPT:
                self._owners.popitem(last=False)
        return reply

    async def _complete(self, environment: Environment, params: Params, ask: _Ask) -> wire.Reply:
        raw = params.get("ref", msgspec.Raw(b"null"))
        try:
            reference = msgspec.json.decode(raw, type=_Reference)
        except msgspec.DecodeError:
            raise wire.RpcFailure(
                wire.INVALID_PARAMS, "ref names a prompt or a resource template.", data={"code": "invalid_params"}
            ) from None
        if reference.name is None:
            return await self._first(environment.able("completions"), params, ask)
        link, own = environment.addressed(reference.name)
        if link is None:
            raise no_prompt(own)
        members = {**wire.read_members(raw, "ref"), "name": msgspec.Raw(wire.encode(own))}
        return await ask(link, {**params, "ref": msgspec.Raw(wire.encode(members))})

    async def _everywhere(self, links: list[Link], params: Params, ask: _Ask) -> wire.Reply:
        replies = await asyncio.gather(*(ask(link, params) for link in links))
        return next((reply for reply in replies if reply.failed), wire.Reply(b"{}"))

    async def _first(self, links: list[Link], params: Params, ask: _Ask) -> wire.Reply:
        return (await self._found(links, params, ask))[0]

    async def _found(self, links: list[Link], params: Params, ask: _Ask) -> tuple[wire.Reply, Link | None]:
        """The reply of the first server that knows what is asked for; else the last one's refusal."""
        reply = wire.Reply(messages.NO_METHOD, failed=True)
        for link in links:
            reply = await ask(link, params)
            if not reply.failed:
                return reply, link
            if wire.peek_error(reply.body)[0] not in _UNKNOWN:
                break
        return reply, None


def no_prompt(name: str) -> NotFound:
    return NotFound(
        f"There is no prompt {name[:200]!r}.", code="unknown_prompt", hint="prompts/list names the prompts."
    )


def no_method(method: str) -> wire.RpcFailure:
    return wire.RpcFailure(
        wire.METHOD_NOT_FOUND,
        f"There is no method {method[:100]!r} here.",
        status=404,
        data={"code": "method_not_found"},
    )


def _cursor(link: Link, own: str | None) -> msgspec.Raw:
    text = msgspec.json.encode([link.server.name, own])
    return msgspec.Raw(wire.encode(base64.urlsafe_b64encode(text).decode()))


def _place(cursor: str, links: list[Link]) -> tuple[int, msgspec.Raw | None]:
    try:
        name, own = msgspec.json.decode(base64.urlsafe_b64decode(cursor), type=tuple[str, str | None])
        place = [link.server.name for link in links].index(name)
    except ValueError:  # also those of msgspec and binascii
        raise wire.RpcFailure(
            wire.INVALID_PARAMS, "This cursor is not one of ours.", data={"code": "bad_cursor"}
        ) from None
    return place, msgspec.Raw(wire.encode(own)) if own is not None else None


def _renamed(items: msgspec.Raw, environment: Environment, link: Link) -> msgspec.Raw:
    """Prompts under the environment's names; every other value keeps its bytes."""
    found = []
    for item in wire.read_batch(bytes(items)):
        members = wire.read_members(item, "prompt")
        own = wire.read_string(members.get("name"), "name")
        members["name"] = msgspec.Raw(wire.encode(environment.prefixed(link, own)))
        found.append(msgspec.Raw(wire.encode(members)))
    return msgspec.Raw(wire.encode(found))

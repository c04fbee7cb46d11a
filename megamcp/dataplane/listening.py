"""What servers say of their own accord, to the clients that listen: on a session's GET stream, or a subscription.

That a list has changed is the same for everybody, so one stream to each server serves all. What belongs to one client
(updates of resources that it subscribed to, log messages outside of requests) comes by a stream of its own session,
begun when it asks for such a thing. Servers of our SDK say nothing of their own accord. In memory of this process: a
session is heard where its stream is open.
"""

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from megamcp.dataplane import clients, eras, messages, wire
from megamcp.dataplane.asgi import Receive, disconnected, not_acceptable
from megamcp.dataplane.clients import Answers, SessionClient
from megamcp.dataplane.links import Environment, Environments, Link
from megamcp.dataplane.ports import Limits, RolloutView
from megamcp.dataplane.protocol import SUBSCRIPTION_KEY, Client, Sink
from megamcp.dataplane.request import Request
from megamcp.dataplane.streams import EventStream
from megamcp.errors import MegaMCPError

_CHANGES = {
    "notifications/tools/list_changed": ("toolsListChanged", "tools"),
    "notifications/prompts/list_changed": ("promptsListChanged", "prompts"),
    "notifications/resources/list_changed": ("resourcesListChanged", "resources"),
}
_UPDATED = "notifications/resources/updated"
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 30.0
_REMEMBERED = 10_000


@dataclass(slots=True, eq=False)
class _Interest:
    """What one session wants of one server."""

    uris: set[str] = field(default_factory=set)
    log: bool = False


@dataclass(slots=True, eq=False)
class _Standing:
    """A session's open stream."""

    client: Client
    sink: Sink
    environment: Environment
    rollout: RolloutView
    tasks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """The stream of this session to a server, by the server's name."""


class _Method(msgspec.Struct):
    method: str = ""
    params: msgspec.Raw = msgspec.Raw(b"{}")


class Listening:
    """All open streams of this process."""

    def __init__(self, environments: Environments, answers: Answers, limits: Limits) -> None:
        self._environments = environments
        self._answers = answers
        self._limits = limits
        self._standing: dict[str, _Standing] = {}
        self._interests: OrderedDict[str, dict[str, _Interest]] = OrderedDict()
        self._changes: dict[Link, set[Sink]] = {}
        self._watching: dict[Link, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self.open = 0
        """Clients that listen now."""

    async def stand(
        self, environment: Environment, rollout: RolloutView, session: str, stream: EventStream, receive: Receive
    ) -> None:
        """Serves a session's GET stream until its client leaves. A newer one takes its place."""
        capabilities = clients.unpacked(eras.capabilities_of_session(session))
        client = SessionClient(session, capabilities, stream, self._answers, self._limits.ask_timeout_s)
        standing = _Standing(client, stream.event, environment, rollout)
        await stream.start()
        self._standing[session] = standing
        await environment.about(rollout, self._limits.list_timeout_s)
        links = [link for link in environment.links.values() if not link.server.exactly_once]
        try:
            for link in links:
                self._watch(link, stream.event)
            self._poke(standing, environment, rollout)
            for name, interest in self._interests.get(session, {}).items():
                if name in environment.links:
                    self._hear(standing, environment.links[name], rollout, interest)
            await self._until_over(receive)
        finally:
            if self._standing.get(session) is standing:
                del self._standing[session]
            for link in links:
                self._unwatch(link, stream.event)
            await _ended(list(standing.tasks.values()))
        await stream.finish()

    async def subscribe(
        self,
        environment: Environment,
        rollout: RolloutView | None,
        request: Request,
        params: dict[str, msgspec.Raw],
        client: Client,
    ) -> wire.Reply:
        """`subscriptions/listen`: returns when the gateway stops, and is cancelled when the client leaves."""
        if request.stream is None:
            raise not_acceptable("text/event-stream")
        try:
            wants = msgspec.json.decode(params.get("notifications", msgspec.Raw(b"null")), type=dict[str, Any])
            uris = msgspec.convert(wants.get("resourceSubscriptions") or [], list[str])
        except msgspec.DecodeError:
            raise wire.RpcFailure(
                wire.INVALID_PARAMS,
                "notifications must be an object, its resourceSubscriptions a list of URIs.",
                data={"code": "invalid_params"},
            ) from None
        number = request.id or b"null"
        honoured = {
            wanted: True
            for wanted, capability in _CHANGES.values()
            if wants.get(wanted) is True and environment.able(capability)
        }
        watched = [link for link in environment.able("resources") if _subscribes(link)]
        filter_: dict[str, Any] = {**honoured, **({"resourceSubscriptions": uris} if uris and watched else {})}
        await request.stream.event(
            messages.notification(
                "notifications/subscriptions/acknowledged",
                {"notifications": filter_, "_meta": {SUBSCRIPTION_KEY: msgspec.Raw(number)}},
            )
        )
        stream = request.stream

        async def sink(message: bytes) -> None:
            if (text := _for_subscription(message, number, filter_)) is not None:
                await stream.event(text)

        links = [link for link in environment.links.values() if not link.server.exactly_once] if honoured else []
        tasks = []
        try:
            for link in links:
                self._watch(link, sink)
            for link in environment.links.values():
                own = {"resourceSubscriptions": uris} if uris and link in watched else {}
                # A server of the handshake era may tell each session apart what has changed.
                if own or (link in links and not link.shared):
                    tasks.append(asyncio.create_task(self._listen(link, rollout, own, client, sink)))
            await self._until_over(request.receive)
        finally:
            for link in links:
                self._unwatch(link, sink)
            await _ended(tasks)
        return wire.Reply(wire.encode({"resultType": "complete", "_meta": {SUBSCRIPTION_KEY: msgspec.Raw(number)}}))

    def heed(self, session: str, links: list[Link], rollout: RolloutView | None, method: str, value: str) -> None:
        """A session has subscribed to something, or set its log level, at these servers."""
        interests = self._interests.setdefault(session, {})
        self._interests.move_to_end(session)
        if len(self._interests) > _REMEMBERED:
            self._interests.popitem(last=False)
        standing = self._standing.get(session)
        for link in links:
            interest = interests.setdefault(link.server.name, _Interest())
            if method == "logging/setLevel":
                interest.log = True
            elif method == "resources/subscribe":
                interest.uris.add(value)
            else:
                interest.uris.discard(value)
            if standing is not None and rollout is not None:
                self._hear(standing, link, rollout, interest)

    def hear_of(self, session: str, method: str, value: str) -> None:
        """The same of a session whose stream is open here, said to another process: which server it was isn't known."""
        if (standing := self._standing.get(session)) is not None:
            able = "logging" if method == "logging/setLevel" else "resources"
            links = [link for link in standing.environment.able(able) if not link.server.exactly_once]
            self.heed(session, links, standing.rollout, method, value)

    def poke(self, session: str, environment: Environment, rollout: RolloutView) -> None:
        """A session has made a request: a server may have begun to keep one for it, in which it says things."""
        if (standing := self._standing.get(session)) is not None:
            self._poke(standing, environment, rollout)

    def _poke(self, standing: _Standing, environment: Environment, rollout: RolloutView) -> None:
        for name, link in environment.links.items():
            known = standing.tasks.get(name)
            if (known is None or known.done()) and link.keeps(standing.client.session):
                interest = self._interests.get(standing.client.session, {}).get(name)
                self._hear(standing, link, rollout, interest or _Interest())

    def forget(self, session: str) -> None:
        self._interests.pop(session, None)

    def stop(self) -> None:
        """The gateway is about to stop: streams end."""
        self._stopping.set()

    async def aclose(self) -> None:
        self.stop()
        await _ended(list(self._watching.values()))

    async def _until_over(self, receive: Receive) -> None:
        leaving = asyncio.create_task(disconnected(receive))
        stopping = asyncio.create_task(self._stopping.wait())
        self.open += 1
        try:
            await asyncio.wait({leaving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.open -= 1
            await _ended([leaving, stopping])

    # What belongs to one session

    def _hear(self, standing: _Standing, link: Link, rollout: RolloutView, interest: _Interest) -> None:
        """Begins its stream to a server, anew where it is to a subscription that names what it wants."""
        name = link.server.name
        known = standing.tasks.get(name)
        if known is not None:
            if not known.done() and not link.modern(rollout):
                return
            known.cancel()
        # A session that is begun anew after the server was lost knows nothing of what was subscribed to.
        names_all = link.modern(rollout) or known is not None
        wants: dict[str, Any] = {"resourceSubscriptions": sorted(interest.uris)} if names_all else {}

        async def sink(message: bytes) -> None:
            if not link.shared or msgspec.json.decode(message, type=_Method).method not in _CHANGES:
                await standing.sink(message)

        standing.tasks[name] = asyncio.create_task(self._listen(link, rollout, wants, standing.client, sink))

    async def _listen(
        self, link: Link, rollout: RolloutView | None, wants: dict[str, Any], client: Client, sink: Sink
    ) -> None:
        with contextlib.suppress(MegaMCPError):
            upstream = await link.way(rollout).upstream()
            await upstream.listen(wants, client, sink)

    # What is the same for everybody

    def _watch(self, link: Link, sink: Sink) -> None:
        self._changes.setdefault(link, set()).add(sink)
        if link not in self._watching and link.shared and _changes(link):
            self._watching[link] = asyncio.create_task(self._watched(link), name=f"watch {link.server.name}")

    def _unwatch(self, link: Link, sink: Sink) -> None:
        sinks = self._changes.get(link, set())
        sinks.discard(sink)
        if not sinks:
            self._changes.pop(link, None)
            if (task := self._watching.pop(link, None)) is not None:
                task.cancel()

    async def _watched(self, link: Link) -> None:
        nobody = clients.Caller("")

        async def fan(message: bytes) -> None:
            method = msgspec.json.decode(message, type=_Method).method
            if method in _CHANGES:
                if method == "notifications/tools/list_changed":
                    link.forget_tools()
                await asyncio.gather(*(sink(message) for sink in list(self._changes.get(link, ()))))

        pause = _FIRST_RETRY_S
        while True:
            with contextlib.suppress(MegaMCPError):
                upstream = await link.way(None).upstream()
                await upstream.listen(_changes(link), nobody, fan)
                pause = _LAST_RETRY_S  # it has no such stream, or ended it
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_RETRY_S)


def _changes(link: Link) -> dict[str, Any]:
    """The lists that a server says may change."""
    found = {}
    for wanted, capability in _CHANGES.values():
        declared = link.known.capabilities.get(capability)
        if isinstance(declared, dict) and declared.get("listChanged") is True:
            found[wanted] = True
    return found


def _subscribes(link: Link) -> bool:
    declared = link.known.capabilities.get("resources")
    return isinstance(declared, dict) and declared.get("subscribe") is True


def _for_subscription(message: bytes, number: bytes, wants: dict[str, Any]) -> bytes | None:
    """A notification as one of a subscription; None where it was not asked for."""
    told = msgspec.json.decode(message, type=_Method)
    if told.method in _CHANGES:
        if not wants.get(_CHANGES[told.method][0]):
            return None
    elif told.method != _UPDATED:
        return None
    try:
        members = wire.read_members(told.params, "params")
        meta = wire.read_members(members.get("_meta", msgspec.Raw(b"{}")), "_meta")
        uri = wire.read_string(members.get("uri"), "uri") if told.method == _UPDATED else None
    except wire.RpcFailure:
        return None  # it tells nothing
    if uri is not None and uri not in wants.get("resourceSubscriptions", ()):
        return None
    meta[SUBSCRIPTION_KEY] = msgspec.Raw(number)
    return messages.notification(told.method, {**members, "_meta": meta})


async def _ended(tasks: list["asyncio.Task[None]"] | list[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

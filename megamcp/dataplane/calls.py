"""The one path of a tool call, whoever makes it: an agent over MCP or a program over REST.

    name → route → turn in the rollout's queue → handle or intent → the tool server → what it answered

Every way a call can end is settled with the control plane before it is told to the caller:

- *exactly once* (schema state): the server records the call in the transaction of its effects. When its answer
  does not arrive, `end_call` decides what happened. After a server's death the call is run once more under a new
  handle, which is safe because the old one can take no effect any more.
- *at most once* (everything else): an intent row is durable before the server sees the call, the outcome before
  the caller does. A call that was cut off is never run again.

What it does not do: read arguments or results, hold locks (PostgreSQL does), know HTTP or JSON-RPC ids.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from megamcp.dataplane import mirrored, rounds, watched, wire
from megamcp.dataplane.gate import Gates
from megamcp.dataplane.links import Environment, Environments, Route
from megamcp.dataplane.patience import patient
from megamcp.dataplane.ports import ControlPort, Intent, Limits, RolloutView
from megamcp.dataplane.protocol import Client, ToolCall, UpstreamLost, header_value
from megamcp.dataplane.unanswered import as_result, too_late, with_tail
from megamcp.dataplane.watched import Blind, Watcher
from megamcp.dataplane.ways import Way
from megamcp.errors import (
    AuthorizationRequired,
    BadRequest,
    DeadlineExceeded,
    MegaMCPError,
    NoCapacity,
    Unavailable,
    UpstreamError,
)

log = logging.getLogger(__name__)

MAX_KEY_BYTES = 512
_UNSEEN_TRIES = 3


class Cancelled(MegaMCPError):
    """The caller cancelled the call or left. Recorded, never raised."""

    status, jsonrpc, default_code = 499, -32800, "cancelled"


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call as its maker wrote it. `call.name` is the name in the environment's list. `mirrored` are the
    `Mcp-Param-*` headers of a 2026-07-28 client, None where the maker knows none."""

    call: ToolCall
    idempotency_key: str | None = None
    mirrored: Sequence[tuple[bytes, bytes]] | None = None


class Calls:
    """Runs calls. Holds nothing about a rollout that has none in flight."""

    def __init__(
        self, control: ControlPort, environments: Environments, limits: Limits, watcher: Watcher | None = None
    ) -> None:
        self._control = control
        self._environments = environments
        self._limits = limits
        self._watcher = watcher or Blind()
        self._gates = Gates(limits.readers_per_rollout, limits.waiting_per_rollout)
        self._running = 0
        self._callers: set[asyncio.Task[Any]] = set()
        self._stopped = False
        self._settling: set[asyncio.Task[Any]] = set()

    @property
    def in_flight(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        """Of those, calls that wait for their turn in their rollout."""
        return self._gates.waiting

    async def call(self, rollout: RolloutView, request: CallRequest, client: Client | None = None) -> wire.Reply:
        """Runs one call to its end. A tool's own error is a reply, not an exception.

        Raises NotFound (no such tool), NoCapacity, DeadlineExceeded, UpstreamError, Unavailable, and what the
        control plane raises. Cancelling the task cancels the call, and returns when that is settled.
        """
        doing = watched.begin_call(rollout.id)
        try:
            reply = await self._admitted(rollout, request, client)
        except BaseException as error:
            self._watcher.ended(doing, None, error)
            raise
        self._watcher.ended(doing, reply, None)
        return reply

    async def _admitted(self, rollout: RolloutView, request: CallRequest, client: Client | None) -> wire.Reply:
        if self._running >= self._limits.calls_in_flight:
            raise NoCapacity(f"{self._running} calls are in flight in this gateway process.")
        if (key := request.idempotency_key) is not None and ("\0" in key or not 0 < len(key.encode()) <= MAX_KEY_BYTES):
            raise BadRequest(
                f"An idempotency key has 1 to {MAX_KEY_BYTES} bytes, none of them NUL.", code="bad_idempotency_key"
            )
        self._running += 1
        task = asyncio.current_task()
        assert task is not None
        self._callers.add(task)
        try:
            return await self._queued(rollout, request, client)
        except asyncio.CancelledError:
            if not self._stopped or task.uncancel() > 0:
                raise
            raise Unavailable(
                "The gateway is stopping; the call was ended.",
                code="gateway_stopping",
                hint="Repeat it with its idempotency key when the gateway is back: what it did is told, and done once.",
            ) from None
        finally:
            self._callers.discard(task)
            self._running -= 1

    def stop(self) -> None:
        """The gateway is stopping: calls that still run are ended, and their callers told why."""
        self._stopped = True
        for task in self._callers:
            task.cancel()

    async def _queued(self, rollout: RolloutView, request: CallRequest, client: Client | None) -> wire.Reply:
        view = await self._control.environment(rollout.environment_id)
        environment = self._environments.of(view)
        doing = watched.current()
        doing.environment = view.name
        started = asyncio.get_running_loop().time()
        with doing.queue:
            route = environment.known_route(request.call.name, rollout)
            if route is None or not self._gates.enter_now(rollout.id, writes=_writes(route)):
                route = await self._turn(rollout, environment, request.call.name, started)
        doing.server, doing.tool = route.server.name, route.tool.name
        own = route.server.call_timeout_s
        deadline = started + (self._limits.call_timeout_s if own is None else own)
        try:
            job = _Job(rollout, route, _addressed(request, route), request.idempotency_key, deadline, client)
            if route.server.exactly_once:
                return await self._exactly_once(job)
            if not route.server.journaled:
                return await self._unrecorded(job)
            return await self._at_most_once(job)
        finally:
            self._gates.leave(rollout.id, writes=_writes(route))

    async def _turn(self, rollout: RolloutView, environment: Environment, name: str, started: float) -> Route:
        """Finds the tool's server and waits for the call's turn in the rollout's queue."""
        try:
            async with asyncio.timeout_at(started + self._limits.call_timeout_s) as scope:
                route = await environment.route(name, rollout)
                if (own := route.server.call_timeout_s) is not None:
                    scope.reschedule(started + own)
                await self._gates.enter(rollout.id, writes=_writes(route))
        except TimeoutError:
            raise DeadlineExceeded(
                f"The call of {name[:200]!r} did not get its turn before its deadline; it was not run."
            ) from None
        return route

    # Exactly once

    async def _exactly_once(self, job: "_Job") -> wire.Reply:
        rollout, route, call, deadline, client = job.rollout, job.route, job.call, job.deadline, job.client
        way = route.way
        remaining = deadline - asyncio.get_running_loop().time()
        unseen = deaths = 0
        began = time.time()
        while True:
            handle = self._control.mint(
                rollout,
                route.server.name,
                tool=call.name,
                arguments=call.arguments,
                writable=not route.tool.read_only,
                idempotency_key=job.key,
                deadline=time.time() + remaining,
            )
            try:
                async with asyncio.timeout_at(deadline):
                    upstream = await way.upstream()
                    if not route.server.own_database:
                        with watched.current().upstream:
                            return await upstream.call(call, handle=handle, client=client)
                    database = await self._control.database(rollout, route.server.name)
                    with watched.current().upstream:
                        answer = await upstream.call(call, handle=handle, database=database, client=client)
                    # In the journal before anybody is told: a state cluster may lose more than the journal does.
                    await self._record(rollout, handle, call, answer, began)
                    return answer
            except TimeoutError:
                way.seems_stuck()
                return await self._settle(rollout, handle, call, too_late(call, route, "nothing of it was kept"))
            except UpstreamLost as error:
                lost = with_tail(error, way)
                unseen, deaths = (unseen, deaths + 1) if error.sent else (unseen + 1, deaths)
                if deaths > 1 or unseen > _UNSEEN_TRIES:
                    return await self._settle(rollout, handle, call, lost)
                await way.lost()
                if not error.sent:
                    continue
                if (reply := await self._ended(rollout, handle, call, None)) is not None:
                    return reply
                log.info(
                    "%s died with a call of %s; it had no effect and is run again",
                    route.server.name,
                    call.name,
                )
            except UpstreamError as error:
                # The answer makes no sense, or the server could not be started: the call may have run.
                return await self._settle(rollout, handle, call, error)
            except asyncio.CancelledError:
                cancelled = Cancelled("The call was cancelled.")
                await self._sheltered(self._settle(rollout, handle, call, cancelled))
                raise
            remaining = deadline - asyncio.get_running_loop().time()

    async def _record(self, rollout: RolloutView, handle: str, call: ToolCall, reply: wire.Reply, began: float) -> None:
        if reply.failed:  # a refusal of the SDK: nothing was done
            return
        with watched.current().journal:
            await self._control.record_call(
                rollout,
                handle,
                tool=call.name,
                arguments=call.arguments,
                result=reply.body,
                is_error=wire.is_tool_error(reply.body),
                began=began,
            )

    async def _settle(self, rollout: RolloutView, handle: str, call: ToolCall, error: MegaMCPError) -> wire.Reply:
        """The result of a call without an answer if it did commit one; else `error` is recorded and raised."""
        reply = await self._ended(rollout, handle, call, as_result(error))
        if reply is None:
            raise error
        return reply

    async def _ended(self, rollout: RolloutView, handle: str, call: ToolCall, error: bytes | None) -> wire.Reply | None:
        tool, arguments = call.name, call.arguments
        with watched.current().journal:
            recorded = await self._control.end_call(rollout, handle, tool=tool, arguments=arguments, error=error)
        if recorded is None:
            return None
        if (size := len(recorded.result)) > self._limits.response_bytes:
            raise UpstreamError(
                f"The call was done, but its result has {size} bytes, over {self._limits.response_bytes}.",
                code="result_too_large",
                hint="The journal has it. Ask for less at once, or raise MEGAMCP_MAX_RESULT_BYTES.",
            )
        return wire.result_as_reply(recorded.result, recorded.is_error)

    # Without a journal

    async def _unrecorded(self, job: "_Job") -> wire.Reply:
        if job.key is not None:
            raise BadRequest(
                "This environment keeps no journal, so nothing here knows what was called by an idempotency key.",
                code="bad_idempotency_key",
                hint='Leave the key out, or take journal = "none" out of the environment.',
            )
        try:
            return (await self._exchanged(job))[0]
        except TimeoutError:
            job.route.way.seems_stuck()
            raise too_late(job.call, job.route, "what it had done until then stays") from None

    async def _exchanged(self, job: "_Job") -> tuple[wire.Reply, str | None]:
        """The answer to a call, after what its server asked the client for; and the sandbox that gave it.

        Raises TimeoutError at the deadline. A call that waits for its client gives up its turn meanwhile.
        """
        sandbox: str | None = None
        async with asyncio.timeout_at(job.deadline) as scope:
            with patient(job.client, scope, lambda away: self._gates.away(job.rollout.id, away=away)) as asker:

                async def send(more: rounds.More) -> wire.Reply:
                    nonlocal sandbox
                    call = rounds.with_more(job.call, more)
                    answer, sandbox = await _until_seen(job.route.way, call, asker, job.deadline)
                    return answer

                reply = await rounds.settled(send, asker)
        return reply, sandbox

    # At most once

    async def _at_most_once(self, job: "_Job") -> wire.Reply:
        try:
            async with asyncio.timeout_at(job.deadline):
                await job.route.way.warm()  # what fails here was not run: its key is free for another try
        except TimeoutError:
            raise DeadlineExceeded(
                f"Tool server {job.route.server.name!r} was not ready before the call's deadline; it was not run."
            ) from None
        run = _Run()
        # In a task of its own: a cancellation may cut the exchange with the server, never the two rows around it.
        task = asyncio.create_task(self._intended(run, job))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise
            run.cancelled = True
            if run.exchanging:
                task.cancel()
            self._keep(task)
            await asyncio.wait({task})
            raise

    async def _intended(self, run: "_Run", job: "_Job") -> wire.Reply:
        route, call, way = job.route, job.call, job.route.way
        journal = watched.current().journal
        with journal:
            intent = await self._control.call_intent(
                job.rollout,
                route.server.name,
                tool=call.name,
                arguments=call.arguments,
                idempotency_key=job.key,
            )
        if intent.replayed is not None:
            return wire.result_as_reply(intent.replayed.result, intent.replayed.is_error)
        error: MegaMCPError
        try:
            if run.cancelled:
                raise asyncio.CancelledError
            run.exchanging = True
            reply, sandbox = await self._exchanged(job)
            run.exchanging = False
        except TimeoutError:
            ended = way.seems_stuck()
            error = too_late(
                call,
                route,
                "since it did not heed that, its process was ended with it, and what that had in memory"
                if ended
                else "what it had done until then stays",
            )
        except UpstreamLost as lost:
            error = with_tail(lost, way)
        except asyncio.CancelledError:
            error = Cancelled("The call was cancelled.")
        except AuthorizationRequired as required:
            run.exchanging = False
            await self._control.call_refused(intent, as_result(required))
            raise
        except MegaMCPError as other:
            error = other
        else:
            result, is_error = reply.body, reply.failed or wire.is_tool_error(reply.body)
            if reply.failed:
                result = wire.error_as_result(reply.body, wire.peek_error(reply.body)[1])
            try:
                with journal:
                    await self._control.call_outcome(intent, result, is_error, answered=True, sandbox=sandbox)
                return reply
            except UpstreamError as gone:
                error = gone
        run.exchanging = False
        await self._fail(intent, error)
        raise error

    async def _fail(self, intent: Intent, error: MegaMCPError) -> None:
        with watched.current().journal:
            await self._control.call_outcome(intent, as_result(error), True, answered=False)

    # Endings that outlive their caller

    async def _sheltered(self, settling: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(settling)
        self._keep(task)
        await asyncio.wait({task})

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._settling.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[Any]) -> None:
        self._settling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, MegaMCPError):
                log.info("cancelled call: %s", error.message)
            else:
                log.error("a cancelled call could not be settled", exc_info=error)

    async def aclose(self) -> None:
        """Waits until every ending is recorded."""
        while self._settling:
            await asyncio.wait(self._settling)


async def _until_seen(
    way: Way, call: ToolCall, client: Client | None, deadline: float
) -> tuple[wire.Reply, str | None]:
    """Sends a call until a server has seen it, which happens at most once. Its answer, and the sandbox that gave it."""
    clock = watched.current().upstream
    for _ in range(_UNSEEN_TRIES):
        upstream = await way.upstream()
        try:
            with clock:
                return await upstream.call(call, client=client, deadline=deadline), upstream.sandbox
        except UpstreamLost as error:
            if error.sent or not way.comes_back:
                raise
            await way.lost()
    upstream = await way.upstream()
    with clock:
        return await upstream.call(call, client=client, deadline=deadline), upstream.sandbox


@dataclass(frozen=True, slots=True)
class _Job:
    """A call that has its turn. `call` is what its server is sent, `deadline` a time of the loop."""

    rollout: RolloutView
    route: Route
    call: ToolCall
    key: str | None
    deadline: float
    client: Client | None


class _Run:
    """What the owner of an at-most-once call must know to cancel it at the right place."""

    __slots__ = ("cancelled", "exchanging")

    def __init__(self) -> None:
        self.cancelled = False
        self.exchanging = False


def _writes(route: Route) -> bool:
    """Whether a call needs its rollout alone. A server without state of ours has none that parallel calls harm."""
    return route.server.exactly_once and not route.tool.read_only


def _addressed(request: CallRequest, route: Route) -> ToolCall:
    """The call under the name that its server knows, with the headers that the tool asks for."""
    call, tool = request.call, route.tool
    if not tool.mirrored and call.name == tool.name:
        return call
    headers: tuple[tuple[str, str], ...] = ()
    if tool.mirrored:
        if request.mirrored is not None:
            try:
                mirrored.check(tool.mirrored, call.arguments, request.mirrored)
            except mirrored.Mismatch as error:
                raise wire.RpcFailure(wire.HEADER_MISMATCH, f"{error}.", data={"code": "header_mismatch"}) from None
        headers = tuple(
            (header, header_value(text)) for header, text in mirrored.headers_for(tool.mirrored, call.arguments)
        )
    return ToolCall(tool.name, call.arguments, call.meta, call.modern, call.more, headers, call.progress_token)

"""The data plane put together: one object for the application to host, call and close."""

from megamcp.dataplane import wire
from megamcp.dataplane.asgi import Receive, Scope, Send
from megamcp.dataplane.calls import CallRequest, Calls
from megamcp.dataplane.clients import Caller
from megamcp.dataplane.endpoint import Endpoint
from megamcp.dataplane.links import Environments
from megamcp.dataplane.ports import ChildTarget, ControlPort, Limits
from megamcp.dataplane.protocol import CHECK_DOCUMENT, ToolCall
from megamcp.dataplane.watched import Watcher
from megamcp.errors import BY_RPC, MegaMCPError, NotFound, Unprocessable, UpstreamError


class Dataplane:
    """An ASGI application for the paths that `serves` says are its own, and the calls behind it.

    An async context manager; leaving it settles what is being recorded, then stops every child. Children start
    when they are first needed.
    """

    def __init__(self, control: ControlPort, limits: Limits | None = None, watcher: Watcher | None = None) -> None:
        limits = limits or Limits()
        self._control = control
        self._environments = Environments(control, limits)
        self._calls = Calls(control, self._environments, limits, watcher)
        self._endpoint = Endpoint(control, self._environments, self._calls, limits)

    async def __aenter__(self) -> "Dataplane":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)

    @staticmethod
    def serves(path: str) -> bool:
        return Endpoint.serves(path)

    @property
    def in_flight(self) -> int:
        """Calls that run or wait now."""
        return self._calls.in_flight

    @property
    def waiting(self) -> int:
        """Of those, calls that wait for their turn in their rollout."""
        return self._calls.waiting

    @property
    def streams(self) -> int:
        """Clients that listen now: sessions' own streams, and subscriptions."""
        return self._endpoint.streams

    @property
    def sessions(self) -> int:
        """Sessions of clients that tool servers keep."""
        return self._environments.sessions()

    @property
    def dedicated(self) -> int:
        """Processes that serve one rollout each."""
        return len(self._environments.dedicated)

    @property
    def starts(self) -> dict[tuple[str, str], int]:
        """How often the process of each server that all rollouts share was started, by environment and server."""
        return self._environments.starts()

    def cancel(self, rollout_id: str, session: str, request_id: str) -> bool:
        """For `ControlPort.cancel_elsewhere` of another process."""
        return self._endpoint.cancel(rollout_id, session, request_id)

    def session_said(self, session: str, method: str, value: str) -> None:
        """For `ControlPort.session_said` of another process."""
        self._endpoint.session_said(session, method, value)

    async def tools(self, rollout_id: str) -> tuple[bytes, ...]:
        """JSON texts of the rollout's tools, as its agent sees them. Raises NotFound, Gone, UpstreamError."""
        rollout = await self._control.rollout(rollout_id)
        environment = self._environments.of(await self._control.environment(rollout.environment_id))
        return (await environment.tool_list(rollout)).texts

    async def started(self, environment_id: int, server: str) -> bool:
        """Starts a server that is a child for all rollouts, and asks for its tools; False for any other. Raises
        UpstreamError, DeadlineExceeded."""
        link = self._environments.of(await self._control.environment(environment_id)).links[server]
        if not isinstance(link.server.target, ChildTarget):
            return False
        await link.tools(None)
        return True

    async def demand_document(self, environment_id: int, server: str, document: object) -> None:
        """Raises Unprocessable where such a server can't load this document."""
        link = self._environments.of(await self._control.environment(environment_id)).links[server]
        reply = await (await link.way(None).upstream()).request(CHECK_DOCUMENT, {"document": document})
        if reply.failed:
            raise _as_error(reply.body)

    async def call(self, rollout_id: str, tool: str, arguments: bytes, *, idempotency_key: str | None = None) -> bytes:
        """One tool call on the path that agents' calls take; `arguments` is the JSON text of an object.

        Returns the JSON text of the CallToolResult, a tool's own error included. Raises what `Calls.call`
        raises; a tool server's JSON-RPC error is Unprocessable (arguments) or UpstreamError.
        """
        rollout = await self._control.rollout_for_call(rollout_id)
        request = CallRequest(ToolCall(tool, arguments), idempotency_key)
        reply = await self._calls.call(rollout, request, Caller(rollout.id))
        if reply.failed:
            raise _as_error(reply.body)
        return reply.body

    def server_states(self) -> dict[str, dict[str, str]]:
        """How it stands with the servers that this process has used: by environment and name, in a word each."""
        return self._environments.states()

    async def interrupt(self, rollout_id: str) -> None:
        """A rollout is about to be rolled back: calls that its dedicated servers are at end with their process."""
        await self._environments.dedicated.interrupt(rollout_id)

    async def moved(self, rollout_id: str, epoch: int | None) -> None:
        """A rollout was rolled back and began an epoch, or is over (None): its dedicated servers that can't be kept, or
        are still at a call of before, are stopped."""
        await self._environments.dedicated.moved(rollout_id, epoch)

    def let_go(self, sandbox: str) -> bool:
        """Another gateway process wants a sandbox: this one lets go of it as soon as nothing is under way there. False
        where it doesn't have it."""
        return self._environments.dedicated.let_go(sandbox)

    async def reach(self, environment_id: int, server: str) -> None:
        """Asks a server that serves all rollouts something that does no harm. Raises NotFound, UpstreamError,
        AuthorizationRequired, DeadlineExceeded."""
        environment = self._environments.of(await self._control.environment(environment_id))
        if (link := environment.links.get(server)) is None:
            raise NotFound(f"The environment has no server {server[:100]!r}.", code="server_not_found")
        await link.reach()

    async def forget(self, environment_id: int) -> None:
        """An environment was unloaded: stops its servers."""
        await self._environments.forget(environment_id)

    def stop_calls(self) -> None:
        """The gateway is about to stop: calls that still run end now, as `gateway_stopping`."""
        self._calls.stop()
        self._endpoint.stop()
        self._environments.dedicated.leave()

    async def aclose(self) -> None:
        """Waits for endings that are being recorded, then stops every child."""
        self._environments.dedicated.leave()
        await self._endpoint.aclose()
        await self._calls.aclose()
        await self._environments.aclose()


def _as_error(error: bytes) -> MegaMCPError:
    code, message, name = wire.peek_error(error)
    if code == wire.INVALID_PARAMS:
        return Unprocessable(message, code=name or "invalid_params")
    # Only a server on our SDK names its errors in `data.code`; the number alone may mean anything.
    return (
        BY_RPC.get(code, UpstreamError)(message, code=name)
        if name
        else UpstreamError(message, code="tool_server_error")
    )

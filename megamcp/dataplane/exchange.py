"""One POST to a tool server and what comes back: a reply, at once or at the end of a stream of events.

What the server says before its reply belongs to the request: progress and log messages go to the client, questions
(sampling, elicitation, roots) are put to it, and its answers posted back, while the stream is read on. A stream of the
handshake era that breaks off is resumed where it stopped. Sessions are `upstream`'s.
"""

import asyncio
import contextlib
from collections.abc import Callable

from megamcp.dataplane import messages, wire
from megamcp.dataplane.authorized import Requests
from megamcp.dataplane.http import Broken, ConnectFailed, Response, TooMuch
from megamcp.dataplane.ports import Limits
from megamcp.dataplane.protocol import Client, UpstreamLost
from megamcp.dataplane.sse import SseReader
from megamcp.errors import MegaMCPError, UpstreamError

_RESUME_ATTEMPTS = 3
_LONGEST_RETRY_S = 30.0


class SessionGone(Exception):
    """HTTP 404: the server does not know the session (any more)."""


class Post:
    """A request to one server. `session` receives the id that the server gives a new session."""

    __slots__ = ("_asking", "client", "fields", "number", "resumable", "session_id", "token")

    def __init__(
        self,
        number: bytes,
        fields: bytes,
        *,
        client: Client | None = None,
        token: bytes | None = None,
        session_id: str | None = None,
        resumable: bool = False,
    ) -> None:
        self.number = number
        self.fields = fields
        self.client = client
        self.token = token
        """The client's own progress token, where the one that was sent is ours."""
        self.session_id = session_id
        self.resumable = resumable
        self._asking: dict[bytes, asyncio.Task[None]] = {}

    @property
    def asking(self) -> dict[bytes, "asyncio.Task[None]"]:
        """Questions of the server that wait for the client, by their ids."""
        return self._asking


def unreachable(server: str, error: ConnectFailed) -> UpstreamLost:
    lost = UpstreamLost(f"Tool server {server!r} can't be reached: {error}", sent=False, code="tool_server_unreachable")
    if error.retry_s is not None:
        lost.extra["retry_after"] = round(error.retry_s, 1)
    return lost


class Exchanger:
    """Does POSTs of one server."""

    def __init__(self, name: str, http: Requests, limits: Limits) -> None:
        self.name = name
        self._http = http
        self._limits = limits
        self.on_list_changed: Callable[[], None] | None = None

    async def reply(self, post: Post, body: bytes) -> wire.Reply:
        """Raises UpstreamLost, UpstreamError, SessionGone."""
        response: Response | None = None
        try:
            response = await self._http.request(b"POST", post.fields, body)
            in_session = post.session_id is not None
            if not in_session:
                post.session_id = response.field(b"mcp-session-id")
            kind = response.field(b"content-type") or ""
            if response.status == 404 and in_session:
                return await self._not_found(response, post, kind)
            if kind.startswith("application/json"):
                return self._read_reply(await response.read(self._limits.response_bytes), post, response.status)
            if response.status == 200 and kind.startswith("text/event-stream"):
                return await self._read_stream(response, post)
            raise UpstreamError(
                f"Tool server {self.name!r} answered HTTP {response.status} ({kind or 'untyped'}).",
                code="tool_server_protocol",
            )
        except ConnectFailed as error:
            raise unreachable(self.name, error) from None
        except (Broken, ValueError) as error:
            raise UpstreamLost(f"Tool server {self.name!r} broke off during a call: {error}", sent=True) from None
        except TooMuch:
            raise UpstreamError(
                f"Tool server {self.name!r} sent more than {self._limits.response_bytes} bytes for one call.",
                code="result_too_large",
            ) from None
        finally:
            # An incomplete response (we were cancelled, or refuse it) closes the connection; the server sees that.
            if response is not None:
                response.release()
            for task in post.asking.values():
                task.cancel()

    async def quietly(self, body: bytes, fields: bytes) -> None:
        """Posts what nobody waits for an answer to."""
        # Also where it lacks authorization: what is sent beside a call says nothing of whether that ran.
        with contextlib.suppress(ConnectFailed, Broken, TimeoutError, MegaMCPError):
            async with asyncio.timeout(self._limits.grace_s):
                (await self._http.request(b"POST", fields, body)).close()

    async def _not_found(self, response: Response, post: Post, kind: str) -> wire.Reply:
        """404 means that the session has expired, unless it is the answer to a method that isn't there."""
        if kind.startswith("application/json"):
            with contextlib.suppress(UpstreamError):
                reply = self._read_reply(await response.read(self._limits.response_bytes), post, response.status)
                if reply.failed and wire.peek_error(reply.body)[0] == wire.METHOD_NOT_FOUND:
                    return reply
        raise SessionGone

    def _read_reply(self, body: bytes, post: Post, status: int) -> wire.Reply:
        envelope = self.parse(body)
        reply = messages.reply_in(envelope, post.number)
        if reply is not None:
            return reply
        if envelope.error is not wire.ABSENT:  # `id: null`: refused before the id was read
            return wire.Reply(bytes(envelope.error), failed=True)
        raise UpstreamError(
            f"Tool server {self.name!r} answered HTTP {status} with something that is no response.",
            code="tool_server_protocol",
        )

    def parse(self, body: bytes) -> wire.Envelope:
        """Raises UpstreamError."""
        return messages.read(self.name, body, 10 * self._limits.depth)

    async def _read_stream(self, response: Response, post: Post) -> wire.Reply:
        """Reads events until the response."""
        reader = self.reader()
        current = response
        try:
            for _ in range(_RESUME_ATTEMPTS):
                while (chunk := await current.next_chunk()) is not None:
                    for data in reader.feed(chunk):
                        envelope = self.parse(data)
                        if (reply := messages.reply_in(envelope, post.number)) is not None:
                            return reply
                        await self.aside(envelope, data, post)
                if reader.last_id is None or not post.resumable:
                    break
                # 2025-11-25 lets a server close the stream and be polled: go on after the last event seen.
                current.release()
                current = await self.stream(post.fields, reader)
                if current.status != 200:
                    break
        finally:
            if current is not response:
                current.release()
        raise UpstreamLost(f"Tool server {self.name!r} ended the stream without a response.", sent=True)

    def reader(self) -> SseReader:
        return SseReader(self._limits.response_bytes)

    async def stream(self, fields: bytes, reader: SseReader | None) -> Response:
        """A GET stream: a new one, or the rest of one, after the time that the server asked to wait."""
        if reader is not None:
            reader.restart()
            await asyncio.sleep(min((1000 if reader.retry_ms is None else reader.retry_ms) / 1000, _LONGEST_RETRY_S))
            if reader.last_id is not None:
                fields += b"Last-Event-ID: %b\r\n" % reader.last_id.encode("ascii", "ignore")
        return await self._http.request(b"GET", fields, b"")

    async def aside(self, envelope: wire.Envelope, data: bytes, post: Post) -> None:
        """What a server says before its reply."""
        client = post.client
        if envelope.method is None:
            return  # a reply to something else
        if envelope.id is not wire.ABSENT:
            self._put(envelope, post)
        elif envelope.method == "notifications/cancelled":
            wanted = messages.cancels(envelope.params)
            if wanted is not None and (task := post.asking.get(wanted)) is not None:
                task.cancel()
        else:
            if envelope.method == "notifications/tools/list_changed" and self.on_list_changed is not None:
                self.on_list_changed()
            if client is not None:
                if envelope.method == "notifications/progress" and post.token is not None:
                    data = messages.progress_for(envelope.params, post.token) or b""
                if data:
                    await client.notify(data)

    def _put(self, envelope: wire.Envelope, post: Post) -> None:
        """Puts a question of the server to the client, and its answer to the server."""
        number = bytes(envelope.id)
        if number in post.asking:
            return  # it has asked that
        task = asyncio.create_task(self._answer(envelope, post))
        post.asking[number] = task
        task.add_done_callback(lambda _: post.asking.pop(number, None))

    async def _answer(self, envelope: wire.Envelope, post: Post) -> None:
        if post.client is None or envelope.method == "ping":
            answer = messages.answer_to(envelope)
        else:
            params = b"{}" if envelope.params is wire.ABSENT else bytes(envelope.params)
            reply = await post.client.ask(envelope.method or "", params)
            answer = wire.reply_message(bytes(envelope.id), reply)
        await self.quietly(answer, post.fields)

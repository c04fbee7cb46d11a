"""A small HTTP/1.1 client for one address: the part of HTTP that carrying MCP to a tool server needs.

Why not aiohttp: measured side by side, a POST costs it more CPU than everything else that the gateway does for a
call. Kept: keep-alive with a bounded pool, TLS, chunked and close-delimited bodies, back-pressure. Left out, and
wanted so: redirects (a state handle must not travel on), cookies, proxies, compression, retries. Leaving a request
before its response is complete closes the connection, which is how MCP servers learn of a cancellation.
"""

import asyncio
import re
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

_PAUSE_BYTES = 1 << 20
_FIELD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class ConnectFailed(Exception):
    """No connection: the server has seen nothing. `retry_s`: no other try will be made before."""

    def __init__(self, message: str, *, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Broken(Exception):
    """The connection broke, or what came over it is not HTTP: the server may have seen the request."""


class TooMuch(Exception):
    """A body over the caller's limit."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: a unix socket, or host and port."""

    target: bytes
    authority: bytes
    host: str
    port: int
    tls: bool
    socket: str | None
    ip: str | None = None
    """Where to connect, for a host that has been looked up already."""

    @classmethod
    def of(cls, url: str, socket: str | None = None) -> "Address":
        """Raises ValueError for what is no http or https URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
            raise ValueError(f"not an http URL in ASCII: {url!r}")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        tls = parts.scheme == "https"
        usual = 443 if tls else 80
        port = parts.port or usual
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        authority = host if port == usual else f"{host}:{port}"
        return cls(target.encode(), authority.encode(), parts.hostname, port, tls, socket)


def field_lines(fields: Mapping[str, str]) -> bytes:
    """Header lines. Raises ValueError for names and values that HTTP can't carry."""
    for name, value in fields.items():
        if not _FIELD.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"header {name!r} can't be sent")
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode("latin-1")


class Response(asyncio.Protocol):
    """One connection, and the response that is arriving on it. Owned by one request at a time.

    The methods up to `close` are the caller's; the others are called by the parser and the event loop.
    """

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._began = False
        self._done = False
        self._reusable = False
        self._error: str | None = None
        self.lost = False
        self.idle_since = 0.0
        self.status = 0
        self.fields: dict[bytes, bytes] = {}

    async def head(self) -> None:
        """Waits until status and fields are there."""
        while not self._began:
            await self._more()

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises TooMuch over `limit` bytes."""
        declared = self.fields.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise TooMuch
        while not self._done:
            if self._buffered > limit:
                raise TooMuch
            # The whole is wanted, so nothing is gained by making the server wait.
            self._resume()
            await self._more()
        if self._buffered > limit:
            raise TooMuch
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def next_chunk(self) -> bytes | None:
        """The next part of the body as it arrives; None at its end."""
        while not self._chunks:
            if self._done:
                return None
            await self._more()
        chunks, self._chunks, self._buffered = self._chunks, [], 0
        self._resume()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def field(self, name: bytes) -> str | None:
        value = self.fields.get(name)
        return value.decode("latin-1") if value is not None else None

    def release(self) -> None:
        """Gives the connection back if the response is complete; else closes it."""
        whole = self._done and not self.lost and self._error is None and not self._paused
        self._pool.put_back(self, reusable=whole and self._reusable)

    def close(self) -> None:
        self._pool.put_back(self, reusable=False)

    def begin(self, head: bytes, body: bytes) -> None:
        """Writes a request."""
        self._parser = httptools.HttpResponseParser(self)
        self._chunks, self._buffered = [], 0
        self._began = self._done = self._reusable = False
        self.status, self.fields = 0, {}
        assert self._transport is not None
        self._transport.write(head + body if len(body) < 65536 else head)
        if len(body) >= 65536:
            self._transport.write(body)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise Broken(self._error)
        if self.lost:
            raise Broken("the server closed the connection")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume(self) -> None:
        if self._paused and not self.lost:
            assert self._transport is not None
            self._paused = False
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._done:
            self.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = f"not HTTP: {error}"
            self.abort()
            self._wake()
        if self._buffered > _PAUSE_BYTES and not self._paused and not self.lost:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._began and not self._done and exc is None and self._error is None:
            # Neither a length nor chunks: the body ends with the connection.
            ended = b"content-length" not in self.fields and b"transfer-encoding" not in self.fields
            self._done = ended
        self._wake()

    # httptools

    def on_message_begin(self) -> None:
        if self._done:
            self._error = "it answered twice"
        self.status, self.fields = 0, {}

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key == b"www-authenticate" and key in self.fields:
            value = self.fields[key] + b", " + value  # a list that may come in parts
        self.fields[key] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._began = True
            self._wake()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered += len(body)
        self._wake()

    def on_message_complete(self) -> None:
        if self.status >= 200:  # 100 and 103 come before the response
            self._done = True
            self._reusable = bool(self._parser.should_keep_alive())  # the parser forgets it right after
            self._wake()


class Pool:
    """Connections to one address. Waiting for one counts against the caller's deadline."""

    def __init__(self, address: Address, *, limit: int, idle_s: float, connect_s: float) -> None:
        self._address = address
        self._limit = limit
        self._idle_s = idle_s
        self._connect_s = connect_s
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[Response] = []
        self._used: set[Response] = set()
        self._opening = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False

    async def request(self, method: bytes, fields: bytes, body: bytes, target: bytes | None = None) -> Response:
        """Sends a request and waits for the head of its response; `release` or `close` it.

        Raises ConnectFailed, Broken. `fields` are header lines; Host and Content-Length are added. `target` is another
        path and query at the same host.
        """
        response = await self._take()
        try:
            address = self._address
            response.begin(
                b"%b %b HTTP/1.1\r\nHost: %b\r\n%bContent-Length: %d\r\n\r\n"
                % (method, target or address.target, address.authority, fields, len(body)),
                body,
            )
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    async def aclose(self) -> None:
        self._closed = True
        for response in (*self._idle, *self._used):
            response.abort()
        self._idle.clear()

    def put_back(self, response: Response, *, reusable: bool) -> None:
        if response not in self._used:
            return
        self._used.remove(response)
        if reusable and not self._closed:
            response.idle_since = time.monotonic()
            self._idle.append(response)
        else:
            response.abort()
        self._next()

    def _next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _take(self) -> Response:
        while True:
            if self._closed:
                raise ConnectFailed("this client has been closed")
            while self._idle:
                response = self._idle.pop()
                if not response.lost and time.monotonic() - response.idle_since < self._idle_s:
                    self._used.add(response)
                    return response
                response.abort()
            if len(self._used) + self._opening < self._limit:
                return await self._open()
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._next()
                raise

    async def _open(self) -> Response:
        loop = asyncio.get_running_loop()
        address = self._address
        self._opening += 1
        response: Response | None = None
        try:
            async with asyncio.timeout(self._connect_s):
                if address.socket is not None:
                    _, response = await loop.create_unix_connection(lambda: Response(self), address.socket)
                else:
                    _, response = await loop.create_connection(
                        lambda: Response(self),
                        address.ip or address.host,
                        address.port,
                        ssl=self._tls,
                        server_hostname=address.host if self._tls is not None else None,
                    )
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:
            raise ConnectFailed(error.strerror or str(error)) from None
        finally:
            self._opening -= 1
            if response is None:
                self._next()
        self._used.add(response)
        return response

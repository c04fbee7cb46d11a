"""The HTTP client, against servers that say exactly these bytes."""

import asyncio
import contextlib
import shutil
import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamcp.dataplane.http import Address, Broken, ConnectFailed, Pool, TooMuch, field_lines
from megamcp.dataplane.ports import Limits
from megamcp.dataplane.protocol import ToolCall
from megamcp.dataplane.upstream import HttpUpstream


@contextlib.asynccontextmanager
async def saying(*answers, limit=4, connect_s=2.0):
    """A server that gives one answer a request, in turn; None closes without one, a float waits first."""
    requests = []
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                requests.append(head + await reader.readexactly(length))
                answer = answers[len(requests) - 1]
                for part in answer if isinstance(answer, list) else [answer]:
                    if part is None:
                        writer.close()
                        return
                    if isinstance(part, float):
                        await asyncio.sleep(part)
                    else:
                        writer.write(part)
                        await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp?x=1"
    pool = Pool(Address.of(url), limit=limit, idle_s=4.0, connect_s=connect_s)
    try:
        yield pool, requests, connections, url
    finally:
        await pool.aclose()
        server.close()
        for writer in connections:
            writer.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nhi"


async def body(pool, limit=1000):
    response = await pool.request(b"POST", b"X: y\r\n", b"{}")
    try:
        return await response.read(limit)
    finally:
        response.release()


async def test_a_request_is_what_it_should_be_and_its_connection_is_used_again():
    async with saying(OK, OK, OK) as (pool, requests, connections, url):
        assert [await body(pool) for _ in range(3)] == [b"hi"] * 3
        host = url.split("/")[2].encode()
        assert requests[0] == (b"POST /mcp?x=1 HTTP/1.1\r\nHost: %b\r\nX: y\r\nContent-Length: 2\r\n\r\n{}" % host)
        assert len(connections) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1;x=y\r\ni\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhi", None],
        [b"HTTP/1.0 200 OK\r\n\r\nhi", None],
        [bytes([octet]) for octet in OK],
    ],
)
async def test_bodies_of_every_kind(answer):
    async with saying(answer, OK) as (pool, *_):
        assert await body(pool) == b"hi"
        assert await body(pool) == b"hi"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhi", None],
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
async def test_what_breaks_off_is_broken_and_the_next_request_is_not(answer):
    async with saying(answer, OK) as (pool, *_):
        with pytest.raises(Broken):
            await body(pool)
        assert await body(pool) == b"hi"


async def test_too_much_is_refused_declared_or_not():
    declared = b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n"
    streamed = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"5\r\nhello\r\n" * 50
    async with saying(declared, streamed, OK) as (pool, *_):
        for _ in range(2):
            with pytest.raises(TooMuch):
                await body(pool, limit=100)
        assert await body(pool) == b"hi"


async def test_nobody_there_is_not_the_same_as_broken():
    pool = Pool(Address.of("http://127.0.0.1:9/mcp"), limit=1, idle_s=4.0, connect_s=1.0)
    for _ in range(3):
        with pytest.raises(ConnectFailed):
            await body(pool)
    missing = Pool(Address.of("http://x/mcp", "/nonexistent.sock"), limit=1, idle_s=4.0, connect_s=1.0)
    with pytest.raises(ConnectFailed):
        await body(missing)


async def test_leaving_closes_the_connection_and_frees_its_place():
    async with saying([30.0], OK, limit=1) as (pool, _, connections, _url):
        task = asyncio.create_task(body(pool))
        await asyncio.sleep(0.05)
        behind = asyncio.create_task(body(pool))
        await asyncio.sleep(0.05)
        task.cancel()
        assert await behind == b"hi"
        assert len(connections) == 2


async def test_no_more_connections_than_allowed():
    async with saying(*[[0.02, OK]] * 9, limit=2) as (pool, _, connections, _url):
        assert await asyncio.gather(*(body(pool) for _ in range(9))) == [b"hi"] * 9
        assert len(connections) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 3))
def test_no_place_is_lost_whoever_leaves(leaves, limit):
    async def run():
        async with saying(*[[0.001, OK]] * (len(leaves) + limit), limit=limit) as (pool, *_):
            tasks = [asyncio.create_task(body(pool)) for _ in leaves]
            await asyncio.sleep(0.001)
            for task, leave in zip(tasks, leaves, strict=True):
                if leave:
                    await asyncio.sleep(0)
                    task.cancel()
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
            assert not pool._used
            assert not pool._opening
            last = await asyncio.wait_for(asyncio.gather(*(body(pool) for _ in range(limit))), 10)
            assert last == [b"hi"] * limit

    asyncio.run(run())


def test_lines_that_would_split_a_request_are_refused():
    assert field_lines({"A": "b c"}) == b"A: b c\r\n"
    for fields in ({"A": "b\r\nC: d"}, {"A b": "c"}, {"A": "b\0"}, {"": "x"}):
        with pytest.raises(ValueError, match="can't be sent"):
            field_lines(fields)
    for url in ("ftp://x", "http://", "http://höst/"):
        with pytest.raises(ValueError, match="not an http URL"):
            Address.of(url)


async def test_a_stream_that_was_closed_is_gone_on_with_after_its_last_event():
    sse = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    started = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nMcp-Session-Id: s1\r\nContent-Length: %d\r\n\r\n%b"
    initialized = b'{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-11-25","capabilities":{}}}'
    accepted = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"
    reply = b'data: {"jsonrpc":"2.0","id":2,"result":{"content":[]}}\n\n'
    answers = [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        started % (len(initialized), initialized),
        accepted,
        [sse + b"id: e1\nretry: 10\ndata: \n\n", None],
        [sse + reply, None],
    ]
    async with saying(*answers) as (_, requests, _connections, url):
        upstream = HttpUpstream("other", url, limits=Limits())
        try:
            answer = await upstream.call(ToolCall("x", b"{}"))
        finally:
            await upstream.aclose()
    assert answer.body == b'{"content":[]}'
    assert requests[4].startswith(b"GET ")
    assert b"Last-Event-ID: e1\r\n" in requests[4]
    assert b"Mcp-Session-Id: s1\r\n" in requests[4]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
async def test_https_is_spoken_only_with_a_certificate_that_is_trusted(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    making = await asyncio.create_subprocess_exec(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "1"),
        *("-keyout", str(key), "-out", str(certificate)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await making.wait() == 0
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def serve(reader, writer):
        await reader.readuntil(b"{}")
        writer.write(OK)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    address = Address.of(f"https://localhost:{server.sockets[0].getsockname()[1]}/mcp")
    try:
        stranger = Pool(address, limit=1, idle_s=4.0, connect_s=5.0)
        with pytest.raises(ConnectFailed):
            await body(stranger)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        pool = Pool(address, limit=1, idle_s=4.0, connect_s=5.0)
        assert await body(pool) == b"hi"
        await pool.aclose()
        await asyncio.sleep(0.05)
    finally:
        server.close()

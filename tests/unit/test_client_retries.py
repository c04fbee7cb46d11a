"""What the client sends again and what it never does; how answers become errors. Against a real, scripted server."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from megamcp import errors
from megamcp.client import Client, MegaMCPError, Retry

QUICK = Retry(attempts=4, first_s=0.01, longest_s=0.5)
NOW = "2026-01-15T09:00:00Z"
ROLLOUT = {
    "id": "ro_1",
    "url": "http://x/r/ro_1/mcp",
    "environment": "retail@0",
    "group": "g",
    "turn": 0,
    "depth": 0,
    "seq": 1,
    "status": "open",
    "parent_checkpoint": None,
    "checkpoint": None,
    "seed": 0,
    "labels": {},
    "created_at": NOW,
    "expires_at": NOW,
}
CHECKPOINT = {
    "id": "cp_1",
    "rollout": "ro_1",
    "environment": "retail@0",
    "parent": None,
    "turn": 1,
    "depth": 1,
    "seq": 2,
    "digest": "sha256:0",
    "label": None,
    "created_at": NOW,
    "expires_at": NOW,
}
RESULT = {"content": [{"type": "text", "text": "done"}], "structuredContent": {"result": [1, 2]}}


@dataclass(frozen=True)
class Answer:
    """One scripted answer; `drop` closes the connection after reading the request."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    wait_s: float = 0


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


def problem(status: int, code: str, **extra: Any) -> Answer:
    body = {"type": "t", "title": "T", "status": status, "detail": "what was wrong", "code": code, "hint": "do this"}
    return Answer(status, {**body, **extra}, {"Content-Type": "application/problem+json"})


class Script:
    """A server that gives its answers in order, the last one for ever."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = list(answers)
        self.requests: list[Request] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *lines = head.decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (x.partition(": ") for x in lines if x)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = line.split(" ")
                self.requests.append(Request(method, path, headers, json.loads(body) if body else None))
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                await asyncio.sleep(answer.wait_s)
                if answer.drop:
                    break
                await self._write(writer, answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content)), **answer.headers}
        head = f"HTTP/1.1 {answer.status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        writer.write(head.encode() + b"\r\n" + content)
        await writer.drain()


@asynccontextmanager
async def scripted(*answers: Answer, retry: Retry = QUICK, **options: Any) -> AsyncIterator[tuple[Client, Script]]:
    script = Script(answers)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with Client(script.url, retry=retry, **options) as client:
            yield client, script
    finally:
        server.close()


BUSY = problem(429, "control_busy")
AWAY = problem(503, "database_unavailable")


async def test_a_read_is_repeated_while_the_gateway_is_away() -> None:
    async with scripted(AWAY, AWAY, Answer(body=ROLLOUT)) as (client, script):
        assert (await client.rollout("ro_1")).id == "ro_1"
    assert len(script.requests) == 3


async def test_patience_ends_with_the_last_error() -> None:
    async with scripted(AWAY) as (client, script):
        with pytest.raises(errors.Unavailable) as caught:
            await client.rollout("ro_1")
    assert caught.value.code == "database_unavailable"
    assert len(script.requests) == QUICK.attempts


async def test_a_refusal_for_want_of_capacity_is_repeated_when_the_gateway_says_when() -> None:
    soon = Answer(BUSY.status, BUSY.body, {**BUSY.headers, "Retry-After": "0"})
    async with scripted(Answer(body=ROLLOUT), soon, soon, Answer(201, CHECKPOINT)) as (client, script):
        point = await (await client.rollout("ro_1")).checkpoint("here")
    assert point.id == "cp_1"
    assert [r.method for r in script.requests] == ["GET", "POST", "POST", "POST"]


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "60"}])
async def test_a_refusal_without_a_time_or_with_a_long_one_is_told_at_once(headers: dict[str, str]) -> None:
    async with scripted(Answer(429, BUSY.body, headers)) as (client, script):
        with pytest.raises(errors.NoCapacity) as caught:
            await client.rollout("ro_1")
    assert len(script.requests) == 1
    assert caught.value.retry_after == float(headers.get("Retry-After", 1))


@pytest.mark.parametrize("failure", [AWAY, Answer(drop=True)])
@pytest.mark.parametrize("operation", ["checkpoint", "score"])
async def test_what_could_be_done_twice_is_not_repeated(failure: Answer, operation: str) -> None:
    async with scripted(Answer(body=ROLLOUT), failure) as (client, script):
        rollout = await client.rollout("ro_1")
        with pytest.raises(errors.Unavailable):
            await (rollout.checkpoint() if operation == "checkpoint" else rollout.score("reward", 1.0))
    assert len(script.requests) == 2


@pytest.mark.parametrize("failure", [AWAY, Answer(drop=True)])
async def test_a_call_is_repeated_with_one_key_after_a_lost_answer(failure: Answer) -> None:
    async with scripted(Answer(body=ROLLOUT), failure, failure, Answer(body=RESULT)) as (client, script):
        result = await (await client.rollout("ro_1")).call("cancel", {"a": 1}, order_id="W1")
    calls = [request.body for request in script.requests[1:]]
    assert len(calls) == 3
    assert calls[0] == calls[1] == calls[2]
    assert calls[0]["arguments"] == {"a": 1, "order_id": "W1"}
    assert len(calls[0]["idempotency_key"]) == 32
    assert (result.text, result.value, result.is_error) == ("done", [1, 2], False)


async def test_two_calls_have_two_keys() -> None:
    async with scripted(Answer(body=ROLLOUT), Answer(body=RESULT)) as (client, script):
        rollout = await client.rollout("ro_1")
        await rollout.call("get")
        await rollout.call("get")
    first, second = (request.body["idempotency_key"] for request in script.requests[1:])
    assert first != second


async def test_a_call_whose_outcome_stays_unknown_gives_the_key_to_ask_again_with() -> None:
    slow = Answer(body=RESULT, wait_s=5)
    async with scripted(Answer(body=ROLLOUT), slow, timeout=0.2) as (client, script):
        rollout = await client.rollout("ro_1")
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await rollout.call("slow")
    assert caught.value.code == "client_timeout"
    assert caught.value.extra["idempotency_key"] == script.requests[1].body["idempotency_key"]
    assert len(script.requests) == 2, "a call that ran out of time is not sent again by itself"


async def test_where_nothing_listens_the_error_says_so() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with Client(f"http://127.0.0.1:{port}", retry=QUICK) as client:
        with pytest.raises(errors.Unavailable) as caught:
            await client.environments()
    assert caught.value.code == "gateway_unreachable"
    assert "megamcp serve" in str(caught.value.hint)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8600", "ftp://x", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(errors.BadRequest):
        Client(url)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "invalid_request", errors.BadRequest),
        (401, "unauthorized", errors.Unauthorized),
        (404, "rollout_not_found", errors.NotFound),
        (409, "checkpoint_pinned", errors.Conflict),
        (410, "rollout_closed", errors.Gone),
        (413, "too_large", errors.TooLarge),
        (422, "idempotency_key_reused", errors.Unprocessable),
        (422, "unsupported_schema", errors.UnsupportedSchema),
        (422, "unsupported_statement", errors.UnsupportedStatement),
        (502, "upstream_error", errors.UpstreamError),
        (504, "query_timeout", errors.DeadlineExceeded),
        (405, "method_not_allowed", MegaMCPError),
    ],
)
async def test_a_problem_document_becomes_its_error(status: int, code: str, expected: type[MegaMCPError]) -> None:
    async with scripted(problem(status, code, problems=[{"object": "t"}])) as (client, _):
        with pytest.raises(MegaMCPError) as caught:
            await client.environments()
    error = caught.value
    assert type(error) is expected
    assert (error.message, error.code, error.hint) == ("what was wrong", code, "do this")
    assert error.extra["problems"] == [{"object": "t"}]
    assert error.problem()["status"] == status


@pytest.mark.parametrize("body", [b"<html>no</html>", b"[]", b'{"detail": "x"}', b"\xff"])
async def test_an_error_that_is_no_problem_document_keeps_its_class(body: bytes) -> None:
    async with scripted(Answer(404, body)) as (client, _):
        with pytest.raises(errors.NotFound) as caught:
            await client.environments()
    assert caught.value.code == "http_error"


async def test_an_answer_that_is_none_of_a_gateway_is_an_upstream_error() -> None:
    async with scripted(Answer(body=b"<html>hello</html>")) as (client, _):
        with pytest.raises(errors.UpstreamError) as caught:
            await client.environments()
    assert caught.value.code == "unexpected_answer"


async def test_the_key_is_sent_as_a_bearer() -> None:
    async with scripted(Answer(body={"environments": []}), api_key="k") as (client, script):
        await client.environments()
    assert script.requests[0].headers["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("options", "sent"), [({}, "Bearer of the variable"), ({"api_key": "k"}, "Bearer k"), ({"api_key": ""}, None)]
)
async def test_the_variables_key_is_sent_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sent: str | None
) -> None:
    monkeypatch.setenv("MEGAMCP_API_KEY", "of the variable")
    async with scripted(Answer(body={"environments": []}), **options) as (client, script):
        await client.environments()
    assert script.requests[0].headers.get("authorization") == sent


async def test_input_that_can_not_be_right_is_not_sent() -> None:
    async with scripted(Answer(body=ROLLOUT)) as (client, script):
        with pytest.raises(errors.BadRequest):
            await client.open_many("retail", 0)
        rollout = await client.rollout("ro_1")
        with pytest.raises(errors.BadRequest) as caught:
            await rollout.call("get", {"when": object()})
    assert caught.value.code == "not_json"
    assert len(script.requests) == 1


async def test_pages_are_fetched_until_the_last() -> None:
    pages = (
        Answer(body={"rollouts": [ROLLOUT], "next_cursor": "next"}),
        Answer(body={"rollouts": [{**ROLLOUT, "id": "ro_2"}], "next_cursor": None}),
    )
    async with scripted(*pages) as (client, script):
        found = [rollout.id async for rollout in client.rollouts(group="g")]
    assert found == ["ro_1", "ro_2"]
    assert "cursor=next" in script.requests[1].path


async def test_following_goes_on_after_a_cut_stream_without_losing_or_repeating() -> None:
    def stream(*seqs: int) -> Answer:
        rows = [{"rollout": "ro_1", "seq": seq, "kind": "call", "at": NOW} for seq in seqs]
        text = ": still here\n\n" + "".join(f"id: {r['seq']}\nevent: call\ndata: {json.dumps(r)}\n\n" for r in rows)
        return Answer(body=text.encode(), headers={"Content-Type": "text/event-stream", "Connection": "close"})

    closed = {**ROLLOUT, "status": "closed"}
    last = {"events": [{"rollout": "ro_1", "seq": 5, "kind": "close", "at": NOW}], "next_after": None}
    answers = (
        Answer(body=ROLLOUT),
        stream(1, 2),
        Answer(body=ROLLOUT),
        stream(3, 4),
        Answer(body=closed),
        Answer(body=last),
    )
    async with scripted(*answers) as (client, script):
        rollout = await client.rollout("ro_1")
        seen = [event.seq async for event in rollout.follow()]
    assert seen == [1, 2, 3, 4, 5]
    streams = [request for request in script.requests if request.headers.get("accept") == "text/event-stream"]
    assert [request.path.partition("after=")[2] for request in streams] == ["0", "2"]


def test_pauses_grow_are_jittered_and_end() -> None:
    retry = Retry(attempts=4, first_s=1, longest_s=3)
    for attempt, most in ((1, 1), (2, 2), (3, 3)):
        pauses = {retry.pause(attempt, None) for _ in range(50)}
        assert len(pauses) > 1
        assert all(pause is not None and most / 2 <= pause <= most for pause in pauses)
    assert retry.pause(4, None) is None
    assert retry.pause(1, 3.1) is None

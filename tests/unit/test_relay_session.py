"""However the network cuts a stream, each side gets the other's bytes, and nothing before the backend has let it in."""

import asyncio
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megamcp.relay import messages
from megamcp.relay.backend import Backend, Gate, Route
from megamcp.relay.memory import WHOLE_LIMIT
from megamcp.relay.messages import Client, Server, message
from megamcp.relay.session import Session
from megamcp.relay.wire import Wire

ENTER, LEAVE = b"<enter>", b"<leave>"
LET_IN = message(ord("V"), b"\xff\xff\xff\xff") + messages.ready()


class Tape(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.bytes += data

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0


class Marked(Gate):
    """A gate whose messages can be told from others."""

    def enter(self) -> bytes:
        return ENTER

    def leave(self) -> bytes:
        return LEAVE


class Stage:
    """A session between two tapes."""

    def __init__(self) -> None:
        async def nowhere() -> Route:
            raise AssertionError("nobody should ask")

        self.client, self.backend = Wire(), Wire()
        self.to_client, self.to_backend = Tape(), Tape()
        self.client.connection_made(self.to_client)
        self.backend.connection_made(self.to_backend)
        self.session = Session(
            self.client, nowhere, {}, patience_s=60, connect_timeout_s=5, on_end=lambda: self.ended.append(True)
        )
        self.ended: list[bool] = []
        self.session._take(Backend(self.backend, Route("/", 1, "d", "u", "p"), 1, b"key!", Marked(1, 2), {}))
        self.client.attach(self.session)

    def says(self, wire: Wire, data: bytes, cuts: list[int]) -> None:
        for start, end in pairwise([0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]):
            if start < end:
                wire.data_received(data[start:end])


cuts = st.lists(st.integers(0, 10_000), max_size=12)
bodies = st.binary(max_size=300)
asked = st.lists(
    st.one_of(
        st.builds(message, st.sampled_from([Client.QUERY, Client.FUNCTION_CALL]), bodies),
        st.builds(lambda rest: message(Client.BIND, b"p\0a\0" + rest), bodies),
        st.just(message(Client.EXECUTE, b"p\0" + bytes(4))),
        st.builds(
            lambda size: messages.parse("a", "x" * size), st.sampled_from([0, 50, WHOLE_LIMIT - 9, WHOLE_LIMIT + 9])
        ),
        st.just(messages.SYNC),
    ),
    min_size=1,
)
answered = st.lists(
    st.one_of(
        st.builds(
            message,
            st.sampled_from(
                [Server.DATA_ROW, Server.COPY_DATA, Server.NOTICE, Server.NOTIFICATION, Server.ROW_DESCRIPTION]
            ),
            bodies,
        ),
        st.builds(lambda value: messages.parameter_status("TimeZone", value), st.sampled_from(["UTC", "Asia/Tokyo"])),
        st.just(message(Server.COMMAND_COMPLETE, b"SELECT 1\0")),
        st.just(messages.ready(b"T")),
    )
)


def passed(parts: list[bytes]) -> bytes:
    """What goes to the backend before it has answered anything: an Execute of what may be a DISCARD ALL, since it was
    too long to be read, waits for the answers to what was sent before, which are asked for."""
    unread = False
    for number, part in enumerate(parts):
        unread = unread or (part[0] == Client.PARSE and len(part) > WHOLE_LIMIT)
        if unread and part[0] == Client.EXECUTE:
            return b"".join(parts[:number])
    return b"".join(parts)


@settings(deadline=None)
@given(asked, cuts)
def test_a_backend_gets_every_byte_in_order_after_it_has_let_the_client_in(parts: list[bytes], cut: list[int]) -> None:
    async def play() -> None:
        stage = Stage()
        data = b"".join(parts)
        stage.says(stage.client, data, cut)
        assert stage.to_backend.bytes == ENTER
        stage.backend.data_received(LET_IN)
        sent = stage.to_backend.bytes
        while passed(parts) != data and sent.endswith(messages.FLUSH):
            sent = sent.removesuffix(messages.FLUSH)
        assert sent == ENTER + passed(parts)
        assert stage.to_client.bytes == b""
        stage.session.fail("57P01", "the end")

    asyncio.run(play())


@settings(deadline=None)
@given(answered, cuts)
def test_a_client_gets_every_byte_in_order(parts: list[bytes], cut: list[int]) -> None:
    async def play() -> None:
        stage = Stage()
        stage.client.data_received(message(Client.QUERY, b"select\0"))
        stage.backend.data_received(LET_IN)
        data = b"".join(parts)
        stage.says(stage.backend, data, cut)
        assert stage.to_client.bytes == data
        stage.session.fail("57P01", "the end")

    asyncio.run(play())


@settings(deadline=None)
@given(st.binary(max_size=400), cuts)
def test_no_bytes_of_a_client_get_past_the_lock_or_crash_the_session(data: bytes, cut: list[int]) -> None:
    async def play() -> None:
        stage = Stage()
        stage.says(stage.client, data, cut)
        assert stage.to_backend.bytes in (b"", ENTER, message(Client.TERMINATE), ENTER + message(Client.TERMINATE))
        if not stage.ended:
            stage.session.fail("57P01", "the end")
        assert stage.to_client.closed

    asyncio.run(play())


async def test_a_backend_that_goes_between_transactions_takes_nothing_with_it() -> None:
    stage = Stage()
    stage.client.data_received(message(Client.QUERY, b"select\0"))
    stage.backend.data_received(LET_IN)
    answer = message(Server.COMMAND_COMPLETE, b"SELECT 1\0") + messages.ready()
    stage.backend.data_received(answer + messages.error_response("57P01", "I go"))
    stage.backend.connection_lost(None)
    assert stage.to_client.bytes == answer
    assert not stage.ended
    stage.session.fail("57P01", "the end")


async def test_a_backend_that_goes_within_a_transaction_takes_the_client_with_it() -> None:
    stage = Stage()
    stage.client.data_received(message(Client.QUERY, b"begin\0"))
    stage.backend.data_received(LET_IN)
    answer = message(Server.COMMAND_COMPLETE, b"BEGIN\0") + messages.ready(b"T")
    gone = messages.error_response("57P01", "I go")
    stage.backend.data_received(answer + gone)
    stage.backend.connection_lost(None)
    assert stage.to_client.bytes == answer + gone
    assert stage.ended


async def test_it_lingers_for_the_next_transaction_and_then_leaves() -> None:
    stage = Stage()
    select, answer = (
        message(Client.QUERY, b"select\0"),
        message(Server.COMMAND_COMPLETE, b"SELECT 1\0") + messages.ready(),
    )
    stage.client.data_received(select)
    stage.backend.data_received(LET_IN)
    for _ in range(3):
        stage.backend.data_received(answer)
        stage.client.data_received(select)
    assert stage.to_backend.bytes == ENTER + select * 4
    stage.backend.data_received(answer)
    while not stage.to_backend.bytes.endswith(LEAVE):
        await asyncio.sleep(0)
    stage.client.data_received(select)
    assert stage.to_backend.bytes == ENTER + select * 4 + LEAVE + ENTER
    stage.backend.data_received(LET_IN + LET_IN)
    assert stage.to_backend.bytes.endswith(ENTER + select)
    assert stage.to_client.bytes == answer * 4
    stage.session.fail("57P01", "the end")

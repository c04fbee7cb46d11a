"""Frames, startup packets and the bookkeeping of who owes an answer."""

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamcp import errors
from megamcp.relay import messages
from megamcp.relay.backend import Route
from megamcp.relay.conversation import Conversation
from megamcp.relay.login import Cancel, Greeting, Turned, greeting
from megamcp.relay.memory import Memory
from megamcp.relay.messages import Client, ProtocolViolation, Server
from megamcp.relay.wire import Wire

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(texts.filter(bool), texts))
def test_every_startup_packet_is_read_back(parameters: dict[str, str]) -> None:
    packet = messages.startup(parameters)
    assert struct.unpack_from("!I", packet) == (len(packet),)
    assert messages.parse_startup(packet[8:]) == parameters


@given(st.binary(max_size=60))
def test_no_startup_packet_crashes_the_parser(body: bytes) -> None:
    try:
        found = messages.parse_startup(body)
    except ProtocolViolation:
        return
    assert messages.startup(found)[8:].count(b"\0") <= body.count(b"\0")


@given(st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_only_postgresqls_own_letters_and_lengths_pass(kind: int, length: int) -> None:
    try:
        messages.check_client_message(kind, length)
    except ProtocolViolation:
        assert chr(kind) not in "BFPQdCcDEfHSX" or length < 4 or length > 10_000
    else:
        assert 4 <= length < 1 << 30


def test_error_responses_hold_what_clients_read() -> None:
    response = messages.refusal(errors.Gone("It was released.", hint="Open another."))
    fields = messages.error_fields(response[5:])
    assert fields == {"S": "FATAL", "V": "FATAL", "C": "57P04", "M": "It was released.", "H": "Open another."}


@given(st.binary(max_size=40))
def test_no_text_breaks_out_of_an_error_response(text: bytes) -> None:
    shown = text.decode("latin-1")
    response = messages.error_response("XX000", shown)
    assert messages.error_fields(response[5:]).get("M", "") == shown.replace("\0", "")


def test_a_route_does_not_show_its_password() -> None:
    assert "hunter2" not in repr(Route("/tmp", 5432, "d", "u", "hunter2"))


async def greeted(*packets: bytes) -> tuple[Greeting | Cancel, list[bytes]]:
    """What is made of packets, and what was answered."""
    said: list[bytes] = []

    class Deaf(asyncio.Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            said.append(bytes(data))

        def pause_reading(self) -> None: ...

        def resume_reading(self) -> None: ...

    wire = Wire()
    wire.connection_made(Deaf())
    for packet in packets:
        wire.data_received(packet)
    async with asyncio.timeout(5):
        return await greeting(wire), said


SSL, GSS = messages.untagged(messages.SSL_REQUEST, b""), messages.untagged(messages.GSS_REQUEST, b"")


async def test_encryption_is_declined_and_the_startup_goes_on() -> None:
    found, said = await greeted(SSL, GSS, messages.startup({"user": "u", "application_name": "a"}))
    assert found == Greeting("u", "u", {"application_name": "a"}, messages.PROTOCOL_3_2)
    assert said == [b"N", b"N"]


async def test_newer_protocols_and_unknown_options_are_negotiated_down() -> None:
    found, said = await greeted(messages.startup({"user": "u", "_pq_.wish": "1"}, (3 << 16) | 9))
    assert found == Greeting("u", "u", {}, messages.PROTOCOL_3_2)
    assert said == [messages.negotiate(["_pq_.wish"])]


@pytest.mark.parametrize(
    "packets",
    [
        (SSL, SSL),
        (b"GET / HTTP/1.1\r\n\r\n",),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",),
        (struct.pack("!I", 7) + b"abc",),
        (struct.pack("!I", 10_001) + bytes(10_001),),
        (messages.untagged(messages.CANCEL_REQUEST, b"abc"),),
        (messages.untagged(messages.CANCEL_REQUEST, bytes(300)),),
        (messages.untagged(messages.PROTOCOL_3_0, b"user\0u\0"),),
    ],
)
async def test_what_is_no_startup_packet_is_refused(packets: tuple[bytes, ...]) -> None:
    with pytest.raises((ProtocolViolation, Turned)):
        await greeted(*packets)


@pytest.mark.parametrize(
    "packet",
    [
        messages.startup({"user": "u"}, 2 << 16),
        messages.startup({"database": "d"}),
        messages.startup({"user": "u", "replication": "database"}),
    ],
)
async def test_what_the_relay_does_not_do_is_said(packet: bytes) -> None:
    with pytest.raises(Turned) as away:
        await greeted(packet)
    assert messages.error_fields(away.value.response[5:])["S"] == "FATAL"


# -- conversation ------------------------------------------------------------------------------------------------------


def talk(*steps: str) -> Conversation:
    """`>x` a client's message, `<x` a server's; `<ZI` with its status."""
    conversation = Conversation(Memory())
    for step in steps:
        kind = ord(step[1])
        if step[0] == ">":
            whole = messages.parse("a", "select 1") if kind == Client.PARSE else b""
            conversation.sent(kind, whole or (messages.message(Client.CLOSE, b"Sa\0") if kind == Client.CLOSE else b""))
        else:
            conversation.received(kind, step[2:].encode() if kind == Server.READY else b"SELECT 1\0")
    return conversation


@pytest.mark.parametrize(
    "steps",
    [
        "",
        ">Q <T <D <C <ZI",
        ">P >B >D >E >S <1 <2 <T <D <C <ZI",
        ">P >S >P >S <1 <ZI <1 <ZI",
        ">P >B >E <1 <E >B >E >Q >S <ZI",  # all up to the Sync is ignored, the Query too
        ">P >B >E >S <1 <2 <G >d >c >S <C <ZI",  # the first Sync is read as part of the COPY
        ">P >B >E >S >d >c >S <1 <2 <G <C <ZI",
        ">Q <G >d >f <E <ZI",
        ">Q >c <C <ZI",
        ">c",
        ">F <V <ZI",
        ">Q <T <C <ZT >Q <C <ZI",
        ">S <E <ZI",  # a commit that fails
    ],
)
def test_it_is_over_when_all_is_answered(steps: str) -> None:
    assert talk(*steps.split()).idle


@pytest.mark.parametrize(
    "steps",
    [
        ">Q",
        ">Q <T <D <C",
        ">Q <C <ZT",
        ">Q <E <ZE",
        ">P",
        ">P <1",  # answered, but a Sync has to come
        ">P >S >P >S <1 <ZI",
        ">P <E",
        ">P <E >Q",
        ">P >B >E >S <1 <2 <G",
        ">P >B >E >S <1 <2 <G >d >c",
        ">Q <G >d",
        ">S",
    ],
)
def test_it_is_not_over_while_something_is_owed_or_open(steps: str) -> None:
    assert not talk(*steps.split()).idle


@given(st.lists(st.sampled_from([*(f">{c}" for c in "BCDEFHPQScdf"), *(f"<{c}" for c in "123CDEGITns"), "<ZI", "<ZT"])))
def test_no_order_of_messages_breaks_the_bookkeeping(steps: list[str]) -> None:
    try:
        conversation = talk(*steps)
    except ProtocolViolation:
        assert ">d" in steps or "<G" in steps
        return
    # whatever went wrong before: Sync and the answers to what is owed bring it back
    conversation.sent(Client.COPY_FAIL)
    conversation.sent(Client.SYNC)
    for _ in range(len(steps) + 1):
        conversation.received(Server.READY, b"I")
    assert conversation.idle


@pytest.mark.parametrize("steps", [">Q <G >d >S", ">P >B >E >d >S", ">Q <G >d >H >S"])
def test_a_sync_behind_open_copy_data_is_refused(steps: str) -> None:
    with pytest.raises(ProtocolViolation):
        talk(*steps.split())

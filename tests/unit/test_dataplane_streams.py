"""What is kept of event streams for clients that come back: within bounds, whoever leaves how."""

import asyncio

from megamcp.dataplane import streams
from megamcp.dataplane.streams import EventStream, Records


async def sending(sent):
    async def send(message):
        sent.append(message.get("body", b""))

    return send


async def a_stream(records, sent):
    stream = EventStream(await sending(sent), records, "s")
    await stream.event(b'{"first":1}')
    return stream


async def test_what_is_dropped_is_all_that_was_counted():
    records, sent = Records("00000000"), []
    for _ in range(3):
        await (await a_stream(records, sent)).finish(b"{}")
    assert records._size == sum(len(body) for body in sent)
    for token in list(records._records):
        records._drop(token)
    assert records._size == 0


async def test_a_stream_over_the_bound_goes_on_and_nothing_more_of_it_is_kept(monkeypatch):
    monkeypatch.setattr(streams, "_KEPT_BYTES", 1000)
    records, sent = Records("00000000"), []
    stream = await a_stream(records, sent)
    token = next(iter(records._records))
    for _ in range(20):
        await stream.event(b'{"long":"%b"}' % (b"x" * 100))
    assert records.find("s", f"{token}.1") is None
    assert (records._size, sent[-1][:6]) == (0, b"event:")
    other = await a_stream(records, sent)
    assert records.find("s", f"{next(iter(records._records))}.1") is not None
    for one in (stream, other):
        one.close()


async def test_a_stream_that_is_left_says_nothing_more(monkeypatch):
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.01)
    records, sent = Records("00000000"), []
    stream = await a_stream(records, sent)
    async with asyncio.timeout(30):
        while streams._COMMENT not in sent:
            await asyncio.sleep(0.01)
    stream.close()
    assert stream._alive is not None
    assert stream._alive.cancelled()
    await stream._say_comment()
    assert stream._alive.cancelled()
    assert all(record.done for record in records._records.values())


async def test_an_event_id_that_is_no_number_is_of_no_stream():
    records, sent = Records("00000000"), []
    stream = await a_stream(records, sent)
    token = next(iter(records._records))
    assert records.find("s", f"{token}.\N{SUPERSCRIPT TWO}") is None
    assert records.find("another", f"{token}.1") is None
    assert records.find("s", f"{token}.1") is not None
    stream.close()

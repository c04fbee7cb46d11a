"""A tool server behind lines, without a sandbox around it."""

import asyncio
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from megamcp.sdk import Server
from megamcp.sdk.lines import Lines

server = Server("t")
inside: queue.SimpleQueue[str] = queue.SimpleQueue()
"""Told by tools that they run, and how they ended."""


@server.tool
def spin() -> str:
    """Works in Python."""
    inside.put("in")
    while True:
        pass


@server.tool
async def wait() -> str:
    """Waits in an event loop."""
    inside.put("in")
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        inside.put("cancelled")
        raise
    return "waited"


@server.tool
def tidy() -> str:
    """Ends in good order when it is stopped."""
    inside.put("in")
    try:
        while True:
            pass
    finally:
        inside.put("tidied")


@server.tool
def stubborn() -> str:
    """Takes no notice the first time."""
    inside.put("in")
    try:
        while True:
            pass
    except BaseException:
        return "answered all the same"


@server.tool
def leave() -> str:
    """Wants to end the process."""
    sys.exit(3)


@server.tool
def plain() -> str:
    """Answers."""
    return "fine"


class Conversation:
    """Calls in a thread, as the fork server makes them."""

    def __init__(self) -> None:
        self.lines = Lines(server)
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def call(self, number: int, tool: str) -> threading.Thread:
        message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": {"name": tool, "arguments": {}}}
        send: Callable[[bytes], None] = lambda line: self.answers.put(json.loads(line))  # noqa: E731
        thread = threading.Thread(target=self.lines.handle, args=(json.dumps(message).encode(), send))
        thread.start()
        return thread

    def leave(self, number: Any) -> bool:
        message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}}
        return self.lines.interrupt(json.dumps(message).encode())

    def answer(self) -> dict[str, Any]:
        return self.answers.get(timeout=10)


@pytest.fixture
def conversation() -> Conversation:
    return Conversation()


@pytest.mark.parametrize(("tool", "last"), [("spin", None), ("wait", "cancelled"), ("tidy", "tidied")])
def test_a_tool_whose_call_was_left_is_stopped(conversation: Conversation, tool: str, last: str | None) -> None:
    thread = conversation.call(7, tool)
    assert inside.get(timeout=10) == "in"
    assert conversation.leave(7)
    answer = conversation.answer()
    thread.join()
    assert answer["id"] == 7
    assert answer["error"]["data"]["code"] == "cancelled"
    if last is not None:
        assert inside.get(timeout=10) == last
    conversation.call(8, "plain").join()
    assert "result" in conversation.answer()


def test_a_tool_that_answers_all_the_same_has_answered(conversation: Conversation) -> None:
    conversation.call(1, "stubborn")
    inside.get(timeout=10)
    conversation.leave(1)
    assert "answered all the same" in json.dumps(conversation.answer()["result"])


def test_only_the_call_that_was_left_is_stopped(conversation: Conversation) -> None:
    conversation.call(1, "tidy")
    inside.get(timeout=10)
    assert conversation.leave(2)
    assert conversation.leave("1")  # another id
    with pytest.raises(queue.Empty):
        conversation.answers.get(timeout=0.05)
    conversation.leave(1)
    assert conversation.answer()["id"] == 1
    inside.get(timeout=10)


def test_a_call_that_was_left_before_it_began_does_not_begin(conversation: Conversation) -> None:
    conversation.leave(5)
    conversation.call(5, "spin").join()
    assert conversation.answer()["error"]["data"]["code"] == "cancelled"
    assert inside.empty()


def test_leaving_a_call_that_has_ended_harms_no_other(conversation: Conversation) -> None:
    for number in range(200):
        thread = conversation.call(number, "plain")
        conversation.leave(number)
        thread.join()
        assert conversation.answer()["id"] == number
    time.sleep(0)
    assert conversation.lines.interrupt(b"junk") is False
    assert conversation.lines.interrupt(b'{"jsonrpc":"2.0","id":1,"method":"ping"}') is False


def test_a_tool_that_would_end_the_process_ends_its_call(conversation: Conversation) -> None:
    conversation.call(1, "leave").join()
    assert conversation.answer()["error"]["data"]["code"] == "internal"
    conversation.call(2, "plain").join()
    assert "result" in conversation.answer()

"""What is said to a sandbox whose pipes were taken over, and to one whose call was left."""

import asyncio
import json
import os
from typing import Any

import pytest

from megamcp.dataplane.ports import Limits, Opened, SandboxTarget, Spoken
from megamcp.dataplane.protocol import About, ToolCall
from megamcp.dataplane.sandboxed import SandboxChild
from megamcp.dataplane.wire import Reply


class Door:
    """Pipes that were left in the middle of something; nobody answers."""

    def __init__(self) -> None:
        self.killed: str | None = None
        self.said, ours = os.pipe()
        out, self.answers = os.pipe()
        err, self.prints = os.pipe()
        self.opened = Opened(ours, out, err, clean=False, spoken=Spoken(False, About()))

    async def open(self, sandbox: str) -> Opened:
        return self.opened

    async def spoke(self, sandbox: str, spoken: Spoken) -> None: ...

    async def close(self, sandbox: str, *, clean: bool) -> None: ...

    async def kill(self, sandbox: str, reason: str) -> None:
        self.killed = reason

    async def obituary(self, sandbox: str) -> str | None:
        await asyncio.Event().wait()
        return None

    async def last_words(self, sandbox: str, words: str) -> None: ...


async def test_all_that_a_server_hears_from_a_gateways_successor_is_messages() -> None:
    door = Door()
    child = SandboxChild("memo", SandboxTarget("one", door), Limits())
    await child.upstream()
    message = json.loads(os.read(door.said, 65536))
    assert (message["jsonrpc"], message["method"]) == ("2.0", "notifications/cancelled")
    assert "id" not in message
    for end in (door.answers, door.prints):
        os.close(end)
    assert child._watching is not None
    await child._watching
    os.close(door.said)


class Server:
    """What a server reads and says, line by line, and a child that calls it."""

    def __init__(self, *, grace_s: float) -> None:
        self.door = Door()
        self.child = SandboxChild("memo", SandboxTarget("one", self.door), Limits(grace_s=grace_s))
        self.rest = b""

    async def hear(self, method: str) -> Any:
        """The next message of this method."""
        while True:
            while b"\n" not in self.rest:
                self.rest += await asyncio.to_thread(os.read, self.door.said, 65536)
            line, _, self.rest = self.rest.partition(b"\n")
            if (message := json.loads(line))["method"] == method:
                return message

    def answer(self, number: int) -> None:
        os.write(self.door.answers, json.dumps({"jsonrpc": "2.0", "id": number, "result": {}}).encode() + b"\n")

    async def left(self, *, deadline_s: float) -> "asyncio.Task[Reply]":
        """A call that it is at, and that its caller leaves."""
        deadline = asyncio.get_running_loop().time() + deadline_s
        client = await self.child.upstream()
        call = asyncio.create_task(client.call(ToolCall("t", b"{}"), deadline=deadline))
        await self.hear("tools/call")
        call.cancel()
        await self.hear("notifications/cancelled")
        return call

    async def close(self) -> None:
        for end in (self.door.answers, self.door.prints):
            os.close(end)
        assert self.child._watching is not None
        await self.child._watching
        os.close(self.door.said)


async def test_a_server_that_rightly_never_answers_a_cancelled_call_lives_on() -> None:
    server = Server(grace_s=0.05)
    call = await server.left(deadline_s=60)
    server.answer((await server.hear("ping"))["id"])
    with pytest.raises(asyncio.CancelledError):
        await call
    assert server.door.killed is None
    await server.close()


async def test_a_server_that_is_stuck_in_a_call_that_was_left_has_until_its_deadline() -> None:
    server = Server(grace_s=0.05)
    call = await server.left(deadline_s=0.5)
    done, _ = await asyncio.wait({call}, timeout=0.2)
    assert not done
    assert server.door.killed is None
    with pytest.raises(asyncio.CancelledError):
        await call
    assert server.door.killed == "a call went on after it had been cancelled"
    await server.close()

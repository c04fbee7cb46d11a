"""What is said to a sandbox whose pipes were taken over."""

import json
import os

from megamcp.dataplane.ports import Limits, Opened, SandboxTarget
from megamcp.dataplane.sandboxed import SandboxChild


class Door:
    """Pipes that were left in the middle of something; nobody answers."""

    def __init__(self) -> None:
        self.said, ours = os.pipe()
        out, self.answers = os.pipe()
        err, self.prints = os.pipe()
        self.opened = Opened(ours, out, err, clean=False, spoken=(False, None))

    async def open(self, sandbox: str) -> Opened:
        return self.opened

    async def spoke(self, sandbox: str, spoken: tuple[bool, str | None]) -> None: ...

    async def close(self, sandbox: str, *, clean: bool) -> None: ...

    async def kill(self, sandbox: str, reason: str) -> None: ...

    async def obituary(self, sandbox: str) -> str | None:
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

"""Time that a client takes to answer a question is not the call's: its deadline waits meanwhile."""

import asyncio
import contextlib

from megamcp.dataplane.protocol import Client
from megamcp.dataplane.wire import Reply


class Patient:
    """A client whose questions stop the clock of `scope`. How long an answer may take is the client's own bound."""

    def __init__(self, client: Client, scope: asyncio.Timeout) -> None:
        self.session = client.session
        self.capabilities = client.capabilities
        self.resumes = client.resumes
        self.level = client.level
        self.notify = client.notify
        self._client = client
        self._scope = scope
        self._open = 0
        self._left = 0.0

    async def ask(self, method: str, params: bytes) -> Reply:
        now = asyncio.get_running_loop().time
        if self._open == 0:
            self._left = (self._scope.when() or now()) - now()
            self._scope.reschedule(None)
        self._open += 1
        try:
            return await self._client.ask(method, params)
        finally:
            self._open -= 1
            if self._open == 0:
                with contextlib.suppress(RuntimeError):  # the request is over
                    self._scope.reschedule(now() + self._left)

"""Time that a client takes to answer is not the call's: its deadline waits meanwhile, and its turn is free."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from megamcp.dataplane.messages import NO_CAPABILITY
from megamcp.dataplane.protocol import Client, Through
from megamcp.dataplane.wire import Reply


@contextlib.contextmanager
def patient(
    client: Client | None, scope: asyncio.Timeout, away: Callable[[bool], None] | None = None
) -> Iterator["Patient | None"]:
    """The client for the time of one request; `away` is told when it begins to wait for answers, and when no more."""
    if client is None:
        yield None
        return
    waiting = Patient(client, scope, away)
    try:
        yield waiting
    finally:
        waiting.close()


class Patient(Through):
    """A client whose questions stop the clock of `scope`. How long an answer may take is the client's own bound."""

    def __init__(self, client: Client, scope: asyncio.Timeout, away: Callable[[bool], None] | None) -> None:
        super().__init__(client)
        self.notify = client.notify
        self._client = client
        self._scope = scope
        self._away = away
        self._open = 0
        self._left = 0.0
        self._over = False

    async def ask(self, method: str, params: bytes) -> Reply:
        if self._over:
            return Reply(NO_CAPABILITY, failed=True)
        now = asyncio.get_running_loop().time
        if self._open == 0:
            self._left = (self._scope.when() or now()) - now()
            self._scope.reschedule(None)
            self._tell(True)
        self._open += 1
        try:
            return await self._client.ask(method, params)
        finally:
            self._open -= 1
            if self._open == 0 and not self._over:
                self._tell(False)
                with contextlib.suppress(RuntimeError):  # the time is over
                    self._scope.reschedule(now() + self._left)

    def close(self) -> None:
        """The request is over, whoever may still wait for an answer."""
        if self._open > 0 and not self._over:
            self._tell(False)
        self._over = True

    def _tell(self, away: bool) -> None:
        if self._away is not None:
            self._away(away)

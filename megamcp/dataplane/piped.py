"""A child that is spoken to over its own pipes: `stdio` over the lives of one process of `children`."""

import asyncio
import contextlib
from collections.abc import Awaitable

from megamcp.dataplane.children import Child, Running
from megamcp.dataplane.ports import Limits, StdioTarget
from megamcp.dataplane.protocol import UpstreamLost
from megamcp.dataplane.stdio import StdioUpstream, Told

_ENDING_S = 0.5


class StdioChild(Child):
    """A child that is spoken to over its own pipes; ready means that the handshake is done.

    `used` is told at the end of each request, `list_changed` when the process says so.
    """

    _stderr = asyncio.subprocess.PIPE

    def __init__(
        self,
        name: str,
        target: StdioTarget,
        limits: Limits,
        *,
        used: Told | None = None,
        list_changed: Told | None = None,
    ) -> None:
        super().__init__(name, target, limits, target.secrets)
        self._used = used
        self._list_changed = list_changed
        self._client: StdioUpstream | None = None

    @property
    def client(self) -> StdioUpstream | None:
        """A client of its present life, if it has begun."""
        return self._client

    @property
    def busy(self) -> bool:
        """Whether it starts, or has something to do."""
        return self.starting or (self._client is not None and self._client.busy)

    async def upstream(self) -> StdioUpstream:
        """A client of its present life. Raises what `ready` raises."""
        await self.ready()
        assert self._client is not None
        return self._client

    def _command(self) -> tuple[str, ...]:
        return self._target.command

    def _reading(self, running: Running) -> Awaitable[object]:
        assert running.process.stderr is not None
        self._client = StdioUpstream(
            self.name,
            running,
            limits=self._limits,
            printed=self._printed.line,
            used=self._used,
            list_changed=self._list_changed,
        )
        return asyncio.gather(self._client.read(), self._printed.read(running.process.stderr))

    async def _ready(self, running: Running) -> None:
        assert self._client is not None
        try:
            await self._client.negotiate()
        except UpstreamLost:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    await running.ended.wait()  # that says more
            raise

    def _over(self, running: Running) -> None:
        if self._client is not None:
            self._client.close()

"""A dedicated server in a sandbox: its pipes are opened, closed and taken over by others, while its process lives on.

Ending here means letting go: the sandbox keeps what it knows, and whoever opens it next goes on with the conversation
where it stands. What ends a sandbox for good is its own death, or a call in it that can't be stopped otherwise.
Starting, freezing and removing are the control plane's.
"""

import asyncio
import contextlib
import logging
import os
from functools import partial

from megamcp.dataplane.children import Printed
from megamcp.dataplane.ports import Limits, Opened, SandboxTarget
from megamcp.dataplane.protocol import UpstreamLost
from megamcp.dataplane.stdio import StdioUpstream, Told
from megamcp.errors import DeadlineExceeded, UpstreamError

log = logging.getLogger(__name__)

_LIMIT = 1 << 16
_DYING_S = 0.5
_END_OF_LINE = b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"megamcp: none"}}\n'
"""Ends half a line, of which nothing can be said. Where there was none it is a message that means nothing: servers
need not survive an empty line."""


class _Life:
    """The time in which this process holds a sandbox's pipes."""

    def __init__(self, target: SandboxTarget) -> None:
        self._target = target
        self._killing: asyncio.Task[None] | None = None
        self.exited = asyncio.Event()
        """It is over: the sandbox has ended, or it was let go of."""
        self.reason: str | None = None
        self.stdin: asyncio.StreamWriter
        self.stdout: asyncio.StreamReader
        self.stderr: asyncio.StreamReader

    async def connect(self, opened: Opened) -> None:
        """Makes streams of the descriptors. They are closed with the streams."""
        loop = asyncio.get_running_loop()
        files = [os.fdopen(number, mode, 0) for number, mode in zip(_numbers(opened), ("wb", "rb", "rb"), strict=True)]
        self._transports: list[asyncio.BaseTransport] = []
        try:
            self.stdout, self.stderr = asyncio.StreamReader(limit=_LIMIT), asyncio.StreamReader(limit=_LIMIT)
            for file, reader in zip(files[1:], (self.stdout, self.stderr), strict=True):
                reading, _ = await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), file)
                self._transports.append(reading)
            flow = asyncio.StreamReaderProtocol(asyncio.StreamReader())
            writing, protocol = await loop.connect_write_pipe(lambda: flow, files[0])
            self._transports.append(writing)
            self.stdin = asyncio.StreamWriter(writing, protocol, None, loop)
        except BaseException:
            self.close()
            for file in files:
                file.close()
            raise

    @property
    def alive(self) -> bool:
        return not self.exited.is_set()

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        """Ends the sandbox; `exited` once that is done."""
        if self.alive and self._killing is None:
            self.reason = self.reason or reason
            self._killing = asyncio.create_task(self._kill(reason), name=f"kill {self._target.sandbox}")

    async def _kill(self, reason: str) -> None:
        try:
            await self._target.door.kill(self._target.sandbox, reason)
        except Exception:
            log.exception("sandbox %s could not be ended", self._target.sandbox)
        finally:
            self.exited.set()

    def close(self) -> None:
        for transport in self._transports:
            if transport.is_closing():
                continue
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
            else:
                transport.close()

    async def killed(self) -> None:
        """Returns when no kill is under way."""
        if self._killing is not None:
            await asyncio.wait({self._killing})


class SandboxChild:
    """A sandbox, over the times in which this process holds its pipes. See `children.Child` for the same of a child."""

    def __init__(
        self,
        name: str,
        target: SandboxTarget,
        limits: Limits,
        *,
        used: Told | None = None,
        list_changed: Told | None = None,
    ) -> None:
        self.name = name
        self._target = target
        self._limits = limits
        self._used = used
        self._list_changed = list_changed
        self._printed = Printed(name, target.secrets)
        self._opening: asyncio.Task[StdioUpstream] | None = None
        self._life: _Life | None = None
        self._client: StdioUpstream | None = None
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def running(self) -> _Life | None:
        return self._life if self._life is not None and self._life.alive else None

    @property
    def client(self) -> StdioUpstream | None:
        """A client of its present life, if it has begun."""
        return self._client

    @property
    def busy(self) -> bool:
        """Whether it is being opened, or has something to do."""
        opening = self._opening is not None and not self._opening.done()
        return opening or (self.running is not None and self._client is not None and self._client.busy)

    @property
    def tail(self) -> str:
        return self._printed.tail

    async def end(self) -> None:
        """A pipe broke: if the sandbox is dying, waits until that is booked."""
        if (life := self.running) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_S):
                    await life.exited.wait()

    async def upstream(self) -> StdioUpstream:
        """A client of the sandbox. Raises UpstreamError, DeadlineExceeded, and what the door raises."""
        if self.running is not None and self._client is not None and self._opening is None:
            return self._client
        if self._closed or (self._life is not None and not self._life.alive):
            raise self._ended()
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=f"open {self._target.sandbox}")
            self._opening.add_done_callback(self._opened)
        # Many calls wait for one opening, and none of them owns it.
        await asyncio.wait({opening := self._opening})
        if opening.cancelled():
            raise self._ended()
        return opening.result()

    def _opened(self, task: "asyncio.Task[StdioUpstream]") -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # whoever waited may have left

    def _ended(self) -> UpstreamLost:
        return UpstreamLost(f"The sandbox of tool server {self.name!r} was left or has ended.", sent=False)

    async def _open(self) -> StdioUpstream:
        opened = await self._target.door.open(self._target.sandbox)
        life = _Life(self._target)
        await life.connect(opened)
        client = StdioUpstream(
            self.name,
            life,
            limits=self._limits,
            printed=self._printed.line,
            used=self._used,
            list_changed=self._list_changed,
            sandbox=self._target.sandbox,
        )
        self._life, self._client = life, client
        self._watching = asyncio.create_task(self._watch(life, client), name=f"watch {self._target.sandbox}")
        if not opened.clean:
            life.stdin.write(_END_OF_LINE)
        if opened.spoken is not None:
            client.resume(opened.spoken)
            return client
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                await client.negotiate()
        except TimeoutError:
            life.kill("it did not become ready in time")
            raise DeadlineExceeded(
                f"Tool server {self.name!r} was not ready in {self._limits.start_timeout_s:g} s.\n{self.tail}".strip(),
                code="tool_server_start_timeout",
            ) from None
        except UpstreamLost:
            await life.exited.wait()
            raise UpstreamError(
                f"Tool server {self.name!r} ended while it was starting ({life.reason}).\n{self.tail}".strip(),
                code="tool_server_start_failed",
                hint="See the gateway's log for what the tool server printed.",
            ) from None
        except BaseException:
            life.kill("its start was given up")
            raise
        await self._target.door.spoke(self._target.sandbox, client.spoken)
        return client

    async def _watch(self, life: _Life, client: StdioUpstream) -> None:
        """Reads until the pipes end; that is the sandbox's end, or it was let go of."""
        printing = asyncio.create_task(self._printed.read(life.stderr))
        ending = asyncio.create_task(self._obituary(life))
        try:
            await client.read()
            await asyncio.wait({ending, printing}, timeout=_DYING_S)
            await life.killed()
            if life.reason and self.tail:
                await self._target.door.last_words(self._target.sandbox, self.tail)
        finally:
            await life.killed()
            for task in (printing, ending):
                task.cancel()
            await asyncio.gather(printing, ending, return_exceptions=True)
            life.close()
            life.exited.set()

    async def _obituary(self, life: _Life) -> None:
        life.reason = life.reason or await self._target.door.obituary(self._target.sandbox)
        life.exited.set()

    async def aclose(self, reason: str = "the gateway is shutting down", *, now: bool = False) -> None:
        """Lets go of the sandbox. `now`: without waiting for what it is doing."""
        self._closed = True
        if (opening := self._opening) is not None:
            opening.cancel()
            await asyncio.wait({opening})
        life, client, watching = self._life, self._client, self._watching
        if life is None or client is None or watching is None:
            return
        clean = life.alive and not client.busy and life.stdin.transport.get_write_buffer_size() == 0
        watching.cancel()
        await asyncio.wait({watching})
        client.close()
        log.info("sandbox %s of tool server %s is let go of: %s", self._target.sandbox, self.name, reason)
        await self._target.door.close(self._target.sandbox, clean=clean)


def _numbers(opened: Opened) -> tuple[int, int, int]:
    return opened.stdin, opened.stdout, opened.stderr

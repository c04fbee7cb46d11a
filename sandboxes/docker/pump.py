"""Between an engine's stream and three pipes.

The engine sends stdout and stderr in frames over one connection (8 bytes of head: which, and how long). A program here
has pipes, as every sandbox has. Nobody who doesn't read is waited for by anybody but the container: what it prints
stays in the engine then.
"""

import asyncio
import contextlib
import os
import socket
from typing import Self

from sandboxes.types import Pipes

_CHUNK = 1 << 16


class Pump:
    """One container's. `ended` is set when the engine has closed the stream: the container has ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._transports: list[asyncio.BaseTransport] = []
        self._stream: asyncio.StreamWriter

    @classmethod
    async def open(cls, stream: socket.socket) -> tuple[Self, Pipes]:
        """Takes the stream over. The other ends of the pipes are the caller's."""
        pump = cls()
        theirs: list[int] = []
        mine: list[int] = []
        try:
            for index in range(3):
                reading, writing = os.pipe2(os.O_CLOEXEC)
                mine.append(reading if index == 0 else writing)
                theirs.append(writing if index == 0 else reading)
            reader, pump._stream = await asyncio.open_connection(sock=stream)
            pump._transports.append(pump._stream.transport)
            stdin = asyncio.StreamReader()
            await pump._connect_stdin(mine, stdin)
            outputs = {1: await pump._connect_output(mine), 2: await pump._connect_output(mine)}
        except BaseException:
            for descriptor in (*mine, *theirs):
                os.close(descriptor)
            await pump.close()
            stream.close()
            raise
        pump._tasks = [
            asyncio.create_task(pump._feed(stdin)),
            asyncio.create_task(pump._drain(reader, outputs)),
        ]
        stdin_end, stdout_end, stderr_end = theirs
        return pump, Pipes(stdin_end, stdout_end, stderr_end)

    async def _connect_stdin(self, mine: list[int], stdin: asyncio.StreamReader) -> None:
        file = os.fdopen(mine.pop(0), "rb", 0)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), file)
        self._transports.append(transport)

    async def _connect_output(self, mine: list[int]) -> asyncio.StreamWriter:
        file = os.fdopen(mine.pop(0), "wb", 0)
        loop = asyncio.get_running_loop()
        transport, flow = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), file
        )
        self._transports.append(transport)
        return asyncio.StreamWriter(transport, flow, None, loop)

    async def _feed(self, stdin: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while chunk := await stdin.read(_CHUNK):
                self._stream.write(chunk)
                await self._stream.drain()
            self._stream.write_eof()

    async def _drain(self, stream: asyncio.StreamReader, outputs: dict[int, asyncio.StreamWriter]) -> None:
        try:
            while True:
                head = await stream.readexactly(8)
                left = int.from_bytes(head[4:])
                output = outputs.get(head[0])
                while left:
                    chunk = await stream.read(min(left, _CHUNK))
                    if not chunk:
                        return
                    left -= len(chunk)
                    if output is not None and not output.transport.is_closing():
                        with contextlib.suppress(OSError):  # its reader has gone
                            output.write(chunk)
                            await output.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for output in outputs.values():
                output.close()  # writes what is left first
            self.ended.set()

    async def close(self) -> None:
        """At once; what is on its way is lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for transport in self._transports:
            if not isinstance(transport, asyncio.WriteTransport):
                transport.close()
            elif not transport.is_closing() or transport.get_write_buffer_size():
                transport.abort()

"""A gateway as the demo's child: started on a free port, waited for, stopped, its folder removed."""

import asyncio
import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from megamcp.demo.narrator import Narrator
from megamcp.errors import Unavailable

START_S, STOP_S = 120, 30
READY = re.compile(r"megamcp is ready at (\S+)")
"""What `megamcp serve` logs; its module is not imported for this, since that takes half a second."""


@asynccontextmanager
async def own_gateway(tell: Narrator, data_dir: Path | None) -> AsyncIterator[str]:
    """Its URL. Raises `Unavailable` with the end of its log when it does not start."""
    tell.step("A gateway, with an embedded PostgreSQL 18")
    tell.waiting("Starting …")
    began = time.monotonic()
    folder = data_dir or Path(tempfile.mkdtemp(prefix="megamcp-demo-"))
    try:
        child = await _Child.start(folder, tell)
        try:
            url = await child.ready()
            tell.say("ready at ", (url, "cyan"), f" after {time.monotonic() - began:.1f} s")
            yield url
        finally:
            await child.stop()
    finally:
        if data_dir is None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class _Child:
    """The process, and what it says."""

    def __init__(self, process: asyncio.subprocess.Process, tell: Narrator) -> None:
        self._process = process
        self._tell = tell
        self._last: deque[str] = deque(maxlen=12)
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, folder: Path, tell: Narrator) -> "_Child":
        # The user's settings are for the user's own gateway.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGAMCP_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "megamcp.cli", "serve", "--port", "0", "--data-dir", str(folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is the demo's to handle: first the rollouts, then the gateway
        )
        return cls(process, tell)

    async def ready(self) -> str:
        """The URL, once `/readyz` says yes."""
        import httpx

        try:
            async with asyncio.timeout(START_S), httpx.AsyncClient() as http:
                url = await self._url
                while True:
                    if (await http.get(f"{url}/readyz")).status_code == httpx.codes.OK:
                        return url
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise self._failure(f"The gateway was not ready within {START_S} s.") from None
        except httpx.HTTPError as error:
            raise self._failure(f"The gateway went away: {error}.") from error

    async def stop(self) -> None:
        """Ask it to end; make it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self._last.append(line)
            if self._url.done():
                continue
            if found := READY.search(line):
                self._url.set_result(found[1])
            else:
                self._tell.waiting(f"Starting …  {line.partition(' INFO ')[2] or line}"[:78])
        if not self._url.done():
            self._url.set_exception(self._failure("The gateway did not start."))

    def _failure(self, message: str) -> Unavailable:
        said = "\n  ".join(self._last) or "nothing"
        return Unavailable(message, code="gateway_not_started", hint=f"It said:\n  {said}")

"""The keeper's client: what a gateway process uses. One connection, requests in parallel, made anew when it breaks."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from sandboxes import messages
from sandboxes.types import Exited, FileChange, Frozen, Pipes, Report, SandboxError, Spec
from sandboxes.wire import Closed, Wire

Result = TypeVar("Result")


class Client:
    """Every method raises `SandboxError`; `keeper_lost` where the keeper went away before it answered."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._wire: Wire | None = None
        self._connecting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[messages.Answer, list[int]]]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self.on_exit: Callable[[Exited], Awaitable[object]] | None = None
        """Told of sandboxes whose pipes this client holds."""
        self.on_wanted: Callable[[str], Awaitable[object]] | None = None
        """Another client wants a sandbox's pipes: to be closed when nothing is under way in them, then `detach`."""
        self.on_lost: Callable[[], Awaitable[object]] | None = None
        """The connection broke: the keeper may be another one now, with no sandbox."""

    async def hello(self) -> str:
        """The keeper's name, which its state folder has for good."""
        return await self._ask(messages.Hello(), str)

    async def reports(self) -> list[Report]:
        """What each runtime found when it tried itself out."""
        return await self._ask(messages.Reports(), list[Report])

    async def prepare(self, spec: Spec) -> None:
        """Warms what all sandboxes of a spec share. `start` does it too where it wasn't done."""
        await self._ask(messages.Prepare(spec=spec), type(None))

    async def start(self, spec: Spec, sandbox: str, origin: str | None = None) -> Pipes:
        """A new sandbox, from the spec or as the image `origin` stands. The client holds its pipes."""
        return await self._pipes(messages.Start(spec=spec, sandbox=sandbox, origin=origin))

    async def attach(self, sandbox: str, patience_s: float = 10.0) -> Pipes:
        """The pipes of a sandbox that runs. Raises `busy` where their holder doesn't let go in time, `gone`."""
        return await self._pipes(messages.Attach(sandbox=sandbox, patience_s=patience_s))

    async def detach(self, sandbox: str, *, clean: bool = True) -> None:
        """This client has closed the sandbox's pipes; `clean`: with nothing under way in them."""
        await self._ask(messages.Detach(sandbox=sandbox, clean=clean), type(None))

    async def freeze(self, sandbox: str, image: str) -> Frozen:
        """The sandbox as it stands becomes an image, and goes on."""
        return await self._ask(messages.Freeze(sandbox=sandbox, image=image), Frozen)

    async def remove(self, sandbox: str) -> None:
        """Ends a sandbox. Nothing where it isn't there."""
        await self._ask(messages.Remove(sandbox=sandbox), type(None))

    async def drop(self, image: str) -> None:
        """Removes an image. Nothing where it isn't there."""
        await self._ask(messages.Drop(image=image), type(None))

    async def inventory(self) -> messages.Inventory:
        """All sandboxes and images of the keeper."""
        return await self._ask(messages.Listing(), messages.Inventory)

    async def diff(self, spec: Spec, older: str | None, newer: str | None, most: int = 1000) -> list[FileChange]:
        """What differs in the working folder between two of: a sandbox, an image, None (what it starts with). At most
        `most` paths and one more, which says that there are more."""
        return await self._ask(messages.Diff(spec=spec, older=older, newer=newer, most=most), list[FileChange])

    async def digest(self, spec: Spec, name: str | None) -> str:
        """Of the working folder of a sandbox or an image, or of what it starts with."""
        return await self._ask(messages.Digest(spec=spec, name=name), str)

    # -- one request ----------------------------------------------------------------------------------------------

    async def _pipes(self, request: messages.Start | messages.Attach) -> Pipes:
        answer, descriptors = await self._answer(request)
        if len(descriptors) != 3:
            _close(descriptors)
            raise SandboxError("failed", "The keeper gave no pipes.")
        stdin, stdout, stderr = descriptors
        return Pipes(stdin, stdout, stderr, msgspec.json.decode(answer.result, type=messages.Handed).clean)

    async def _ask(self, request: Any, kind: type[Result]) -> Result:
        answer, descriptors = await self._answer(request)
        _close(descriptors)
        return msgspec.json.decode(answer.result, type=kind)

    async def _answer(self, request: Any) -> tuple[messages.Answer, list[int]]:
        wire = await self._connected()
        request.number = next(self._numbers)
        answered: asyncio.Future[tuple[messages.Answer, list[int]]] = asyncio.get_running_loop().create_future()
        self._pending[request.number] = answered
        try:
            await wire.send(msgspec.json.encode(request))
            answer, descriptors = await answered
        except Closed as error:
            raise _lost(error) from error
        except asyncio.CancelledError:
            if answered.done() and not answered.cancelled() and answered.exception() is None:
                _close(answered.result()[1])
            raise
        finally:
            self._pending.pop(request.number, None)
        if answer.failure is not None:
            _close(descriptors)
            raise answer.failure.error()
        return answer, descriptors

    async def _connected(self) -> Wire:
        async with self._connecting:
            if self._wire is None:
                try:
                    self._wire = await Wire.connect(self._path)
                except OSError as error:
                    raise _lost(error) from error
                self._reader = asyncio.create_task(self._read(self._wire))
            return self._wire

    async def _read(self, wire: Wire) -> None:
        error: Exception = Closed("the keeper closed the connection")
        try:
            while True:
                body, descriptors = await wire.receive()
                answer = msgspec.json.decode(body, type=messages.Answer)
                waiting = self._pending.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result((answer, descriptors))
                    continue
                _close(descriptors)
                if answer.exited is not None and self.on_exit is not None:
                    self._tell(self.on_exit(answer.exited))
                if answer.wanted is not None and self.on_wanted is not None:
                    self._tell(self.on_wanted(answer.wanted))
        except (Closed, msgspec.DecodeError) as found:
            error = Closed(str(found))
        finally:
            wire.close()
            if self._wire is wire:
                self._wire = None
            for waiting in self._pending.values():
                if not waiting.done():
                    waiting.set_exception(error)
            if self.on_lost is not None:
                self._tell(self.on_lost())

    def _tell(self, told: Awaitable[object]) -> None:
        async def run() -> None:
            await told

        task = asyncio.create_task(run())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def aclose(self) -> None:
        """Closes the connection: what this client holds can be attached by others."""
        self.on_lost = None
        if self._wire is not None:
            self._wire.close()
        for task in (self._reader, *self._telling):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _lost(error: Exception) -> SandboxError:
    return SandboxError(
        "keeper_lost",
        f"The sandbox keeper can't be reached: {error}.",
        hint="See that `python -m sandboxes` runs and that MEGAMCP_SANDBOX_SOCKET names its socket.",
    )

"""The keeper: takes requests from gateway processes and lets runtimes carry them out.

Invariants:
- operations on one sandbox or image run one after another, whoever asks;
- a sandbox's pipes are held by one client at most; the keeper has a copy, so that a sandbox outlives its gateway;
- a request that is repeated after a lost answer does no harm: starting what is there hands its pipes over, removing
  what isn't there is done;
- what a killed keeper left behind is ended before the first request is taken.

Who may connect decides everything here: the socket is 0600, or open to one group.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import struct
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sandboxes import files, messages
from sandboxes.runtime import Runtime
from sandboxes.types import Exited, Frozen, Info, Kind, Pipes, SandboxError, Spec, identifier
from sandboxes.wire import Closed, Wire

log = logging.getLogger(__name__)

_decode = msgspec.json.Decoder(messages.AnyRequest).decode


@dataclass(eq=False)
class _Client:
    wire: Wire
    busy: set[asyncio.Task[None]] = field(default_factory=set)

    async def tell(self, answer: messages.Answer, descriptors: tuple[int, ...] = ()) -> None:
        """An answer to a client that has gone is nobody's."""
        with contextlib.suppress(Closed):
            await self.wire.send(msgspec.json.encode(answer), descriptors)


@dataclass(eq=False)
class _Sandbox:
    name: str
    spec: Spec
    origin: str | None
    pipes: Pipes
    holder: _Client | None
    clean: bool = True
    free: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nobody holds it."""


class Keeper:
    """All sandboxes and images of a host's state folder."""

    def __init__(self, name: str, runtimes: Mapping[Kind, Runtime]) -> None:
        self._name = name
        self._runtimes = runtimes
        self._sandboxes: dict[str, _Sandbox] = {}
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}
        self._clients: set[_Client] = set()
        self._came_or_went = asyncio.Event()
        self._telling: set[asyncio.Task[None]] = set()

    async def recover(self) -> None:
        """Before the first request."""
        for runtime in self._runtimes.values():
            await runtime.recover()

    def died(self, exited: Exited) -> None:
        """A runtime's word that a sandbox has ended by itself."""
        task = asyncio.create_task(self._bury(exited))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _bury(self, exited: Exited) -> None:
        async with self._alone(exited.sandbox):
            found = self._sandboxes.get(exited.sandbox)
            if found is None:
                return
            log.info("sandbox %s ended: %s", exited.sandbox, exited.reason)
            await self._remove(exited.sandbox)
        if found.holder is not None:
            await found.holder.tell(messages.Answer(exited=exited))

    # -- connections ----------------------------------------------------------------------------------------------

    async def serve(self, listener: socket.socket) -> None:
        """Takes clients until cancelled; then ends every sandbox."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        serving: set[asyncio.Task[None]] = set()
        try:
            while True:
                sock, _ = await loop.sock_accept(listener)
                task = asyncio.create_task(self._serve_client(_Client(Wire(sock))))
                serving.add(task)
                task.add_done_callback(serving.discard)
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            for name in list(self._sandboxes):
                with contextlib.suppress(SandboxError):
                    await self._remove(name)
            for runtime in self._runtimes.values():
                await runtime.aclose()

    async def deserted(self, linger_s: float) -> None:
        """Returns when no client has been connected for so long."""
        while True:
            self._came_or_went.clear()
            try:
                async with asyncio.timeout(None if self._clients else linger_s):
                    await self._came_or_went.wait()
            except TimeoutError:
                log.info("no client was there for %g s", linger_s)
                return

    async def _serve_client(self, client: _Client) -> None:
        self._clients.add(client)
        self._came_or_went.set()
        try:
            while True:
                body, descriptors = await client.wire.receive()
                for descriptor in descriptors:
                    os.close(descriptor)
                task = asyncio.create_task(self._serve_request(client, _decode(body)))
                client.busy.add(task)
                task.add_done_callback(client.busy.discard)
        except Closed:
            pass
        except msgspec.DecodeError as error:
            log.warning("a client said something that is no request: %s", error)
        finally:
            client.wire.close()
            self._clients.discard(client)
            self._came_or_went.set()
            # What it had asked for goes on: half of a freeze is no use to anybody.
            for sandbox in self._sandboxes.values():
                if sandbox.holder is client:
                    self._let_go(sandbox, clean=False)

    async def _serve_request(self, client: _Client, request: messages.AnyRequest) -> None:
        descriptors: tuple[int, ...] = ()
        try:
            result = await self._done(client, request)
            if isinstance(result, Pipes):
                descriptors, result = result.all, messages.Handed(clean=result.clean)
            answer = messages.Answer(number=request.number, result=msgspec.Raw(msgspec.json.encode(result)))
        except SandboxError as error:
            answer = messages.Answer(number=request.number, failure=messages.Failure.of(error))
        except Exception as error:
            log.exception("a request failed")
            told = SandboxError("failed", f"The sandbox keeper failed: {type(error).__name__}: {error}.")
            answer = messages.Answer(number=request.number, failure=messages.Failure.of(told))
        await client.tell(answer, descriptors)

    async def _done(self, client: _Client, request: messages.AnyRequest) -> Any:
        match request:
            case messages.Hello():
                return self._name
            case messages.Reports():
                async with self._alone("trial of runtimes"):
                    return [await runtime.report() for runtime in self._runtimes.values()]
            case messages.Prepare(spec=spec):
                await self._prepare(spec)
            case messages.Start(spec=spec, sandbox=name, origin=origin):
                return await self._start(client, spec, identifier(name), origin and identifier(origin))
            case messages.Attach(sandbox=name, patience_s=patience_s):
                return await self._attach(client, name, patience_s)
            case messages.Detach(sandbox=name, clean=clean):
                found = self._sandboxes.get(name)
                if found is not None and found.holder is client:
                    self._let_go(found, clean=clean)
            case messages.Freeze(sandbox=name, image=image):
                return await self._freeze(name, identifier(image))
            case messages.Remove(sandbox=name):
                async with self._alone(identifier(name)):
                    await self._remove(name)
            case messages.Drop(image=image):
                async with self._alone(identifier(image)):
                    for runtime in self._runtimes.values():
                        await runtime.drop(image)
            case messages.Listing():
                return self._inventory()
            case messages.Diff(spec=spec, older=older, newer=newer, most=most):
                async with self._tree(spec, older) as before, self._tree(spec, newer) as after:
                    return await asyncio.to_thread(files.diff, before, after, most)
            case messages.Digest(spec=spec, name=point):
                async with self._tree(spec, point) as tree:
                    return await asyncio.to_thread(files.digest, tree)
        return None

    # -- sandboxes ------------------------------------------------------------------------------------------------

    async def _prepare(self, spec: Spec) -> Runtime:
        runtime = self._runtime(spec)
        async with self._alone(f"template {spec.template}"):
            await runtime.prepare(spec)
        return runtime

    async def _start(self, client: _Client, spec: Spec, name: str, origin: str | None) -> Pipes:
        runtime = await self._prepare(spec)
        async with self._alone(name):
            found = self._sandboxes.get(name)
            if found is None:
                async with self._alone(origin) if origin else contextlib.nullcontext():
                    if origin is not None and origin not in runtime.images():
                        raise SandboxError("gone", f"There is no image {origin}.")
                    pipes = await runtime.start(spec, name, origin)
                found = self._sandboxes[name] = _Sandbox(name, spec, origin, pipes, client)
            elif found.holder not in (None, client):
                raise SandboxError("busy", f"Sandbox {name} is there, and another client holds it.")
            return self._hand(found, client)

    def _hand(self, sandbox: _Sandbox, client: _Client) -> Pipes:
        clean = sandbox.clean
        sandbox.holder, sandbox.clean = client, True
        sandbox.free.clear()
        if client not in self._clients:  # it went away while it waited
            self._let_go(sandbox, clean=clean)
        return Pipes(*sandbox.pipes.all, clean=clean)

    def _let_go(self, sandbox: _Sandbox, *, clean: bool) -> None:
        sandbox.holder = None
        sandbox.clean = sandbox.clean and clean
        sandbox.free.set()

    async def _attach(self, client: _Client, name: str, patience_s: float) -> Pipes:
        found = self._found(name)
        give_up = asyncio.get_running_loop().time() + patience_s
        while found.holder not in (None, client):
            assert found.holder is not None
            await found.holder.tell(messages.Answer(wanted=name))
            try:
                async with asyncio.timeout_at(give_up):
                    await found.free.wait()
            except TimeoutError:
                raise SandboxError("busy", f"Whoever holds sandbox {name} did not let go of it.") from None
            if self._sandboxes.get(name) is not found:
                raise _gone(name)
        return self._hand(found, client)

    async def _freeze(self, name: str, image: str) -> Frozen:
        async with self._alone(name), self._alone(image):
            sandbox = self._found(name)
            if sandbox.holder is None:  # answers that nobody waits for any more
                _drain(sandbox.pipes.stdout)
                _drain(sandbox.pipes.stderr)
            for descriptor, what in ((sandbox.pipes.stdin, "has not read"), (sandbox.pipes.stdout, "has written")):
                if waiting := _bytes_in(descriptor):
                    raise SandboxError("busy", f"Sandbox {name} can't be frozen: {waiting} bytes that it {what}.")
            return await self._runtime(sandbox.spec).freeze(name, image)

    async def _remove(self, name: str) -> None:
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is None:
            return
        for descriptor in sandbox.pipes.all:
            os.close(descriptor)
        sandbox.free.set()
        await self._runtime(sandbox.spec).remove(name)

    # -- looking --------------------------------------------------------------------------------------------------

    def _inventory(self) -> messages.Inventory:
        sandboxes = [
            Info(
                sandbox=sandbox.name,
                template=sandbox.spec.template,
                origin=sandbox.origin,
                pid=self._runtime(sandbox.spec).pid(sandbox.name),
                held=sandbox.holder is not None,
            )
            for sandbox in self._sandboxes.values()
        ]
        return messages.Inventory(
            sandboxes=sandboxes,
            images=[image for runtime in self._runtimes.values() for image in runtime.images()],
        )

    @asynccontextmanager
    async def _tree(self, spec: Spec, name: str | None) -> AsyncIterator[Path]:
        runtime = await self._prepare(spec)
        if name is not None and name not in self._sandboxes and name not in runtime.images():
            raise _gone(name)
        async with runtime.tree(spec, name) as tree:
            yield tree

    def _runtime(self, spec: Spec) -> Runtime:
        found = self._runtimes.get(spec.kind)
        if found is None:
            raise SandboxError("not_available", f"This keeper has no runtime {spec.kind}.")
        return found

    def _found(self, name: str) -> _Sandbox:
        if (found := self._sandboxes.get(name)) is None:
            raise _gone(name)
        return found

    @asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        """One operation on a name at a time. Sandboxes before images, so that two can't wait for each other."""
        lock, waiting = self._turns.get(name, (asyncio.Lock(), 0))
        self._turns[name] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._turns.pop(name)
            if waiting > 1:
                self._turns[name] = lock, waiting - 1


def _gone(name: str) -> SandboxError:
    return SandboxError("gone", f"There is no sandbox or image {name}.")


def _drain(descriptor: int) -> None:
    """Throws away what is in a pipe that nobody else reads; once, since its writer may never stop."""
    if waiting := _bytes_in(descriptor):
        os.read(descriptor, waiting)


def _bytes_in(descriptor: int) -> int:
    """Bytes that wait in a pipe, whichever end of it this is."""
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0])

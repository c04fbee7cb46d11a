"""CRIU as a runtime: a container a sandbox, its memory in files when it is frozen.

Invariants:
- what a sandbox writes lies in an upper folder of its own over layers that nobody writes; a container sees the working
  folder and /tmp of it, and nothing else that it could write;
- while memory is written and the upper folder is copied every process of the sandbox stands still, so an image's
  files and memory are of one moment;
- images on disk outlive keeper and host; sandboxes end with the keeper or are ended by the next.

What isn't kept: memory is not shared between sandboxes, each is restored whole. Random generators inside a process go
on as they stood in every sandbox of one image: nothing from outside can reach them; the kernel's stay unpredictable.
"""

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path
from termios import FIONREAD

from sandboxes import disks, files, layers
from sandboxes.confine import kernel
from sandboxes.criu import bundle, databases, groups
from sandboxes.criu.images import BASE, Manifest, Shelf
from sandboxes.criu.runc import Runc, ended
from sandboxes.criu.templates import Templates
from sandboxes.runtime import Died, Folders
from sandboxes.types import Exited, Frozen, Kind, Pipes, Report, SandboxError, Spec

_TRIAL = Spec(kind=Kind.CRIU, command=("/bin/sh", "-c", 'n=0; while read -r _; do n=$((n + 1)); echo "$n"; done'))
_TRIAL_S = 20.0
_SUBREAPER = 36
# Files that were deleted but are open are kept with the memory, up to this size. Connections inside a sandbox need no
# lock: both of their ends stand still.
_SETTINGS = "ghost-limit 268435456\nnetwork-lock skip\nskip-in-flight\n"


@dataclass(eq=False)
class _Sandbox:
    spec: Spec
    stack: tuple[str, ...]
    """Layers below `templates/T`, newest first."""
    network: int | None
    """Descriptor of its network namespace."""
    pid: int
    groups: groups.Groups
    stdout: int
    """Another descriptor of the pipe, to see what waits in it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    reason: str = ""
    """Why it is being ended by us."""
    watching: "asyncio.Task[None] | None" = None

    def end(self, reason: str) -> None:
        """SIGKILL, with a reason of ours."""
        self.reason = reason
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Criu:
    """See `runtime.Runtime`."""

    def __init__(self, folders: Folders, died: Died) -> None:
        self._folders = folders
        self._died = died
        self._shelf = Shelf(folders)
        self._runc = Runc(folders.state / "runc")
        self._group = "sandboxes-" + hashlib.sha256(os.fsencode(folders.state.absolute())).hexdigest()[:10]
        self._settings = folders.state / "criu.conf"
        self._templates = Templates(folders, self._runc, self._group, self._settings)
        self._sandboxes: dict[str, _Sandbox] = {}
        self._patrol: asyncio.Task[None] | None = None
        self._report: Report | None = None

    async def report(self) -> Report:
        if self._report is None:
            reason = await self._try_out()
            features = ("memory", "files", "any program", "images outlive the keeper") if not reason else ()
            self._report = Report(kind=Kind.CRIU, works=not reason, reason=reason, features=features)
        return self._report

    async def _try_out(self) -> str:
        """Why it doesn't work here."""
        if not _root():
            return "it needs root"
        if missing := self._runc.missing():
            return f"{' and '.join(missing)} not found; on Debian sandboxes/tools/install.sh gets runc and CRIU"
        open_: list[int] = []
        try:
            await self.prepare(_TRIAL)
            first = await self.start(_TRIAL, "trial", None)
            open_ += first.all
            await _count(first, b"1\n")
            await self.freeze("trial", "trial-image")
            second = await self.start(_TRIAL, "trial-again", "trial-image")
            open_ += second.all
            for pipes in (second, first):
                await _count(pipes, b"2\n")
        except (SandboxError, OSError, TimeoutError) as error:
            return f"its own trial failed: {error}"
        finally:
            for name in ("trial", "trial-again"):
                await self.remove(name)
            for descriptor in open_:
                os.close(descriptor)
            await self.drop("trial-image")
            await self._templates.forget(_TRIAL.template)
        return ""

    async def prepare(self, spec: Spec) -> None:
        await self._templates.prepare(spec)

    # -- sandboxes ------------------------------------------------------------------------------------------------

    async def start(self, spec: Spec, sandbox: str, origin: str | None) -> Pipes:
        template = self._templates[spec.template]
        manifest = self._shelf[origin] if origin else None
        if manifest is not None and manifest.template != spec.template:
            raise SandboxError("invalid_spec", f"Image {origin} is of another spec.")
        stack = manifest.stack if manifest else (BASE,)
        place = self._folders.sandbox(sandbox)
        open_: list[int] = []
        try:
            merged = self._mount(spec, place, stack)
            network = None if spec.network else await asyncio.to_thread(_quiet_network)
            open_ += [network] if network is not None else []
            shared = self._folders.template(spec.template)
            room = bundle.Room(
                root=shared / "root",
                merged=merged,
                mounts=template.mounts,
                copies={path: shared / copy for path, copy in template.copies.items()},
                packages=shared / "packages" if template.packages else None,
                network=None if network is None else f"/proc/{os.getpid()}/fd/{network}",
                group=f"/{self._group}/{sandbox}",
                settings=self._settings,
            )
            (place / "bundle").mkdir()
            bundle.write(place / "bundle", spec, template.command, room)
            pipes = [descriptor for _ in range(3) for descriptor in os.pipe2(os.O_CLOEXEC)]
            open_ += pipes
            streams = (pipes[0], pipes[3], pipes[5])
            if manifest is None:
                pid = await self._runc.run(sandbox, place / "bundle", streams)
            else:
                pid = await self._runc.restore(sandbox, place / "bundle", streams, self._shelf.memory(manifest.image))
            made = _Sandbox(spec, stack, network, pid, groups.Groups(pid), os.dup(pipes[2]))
        except BaseException:
            for descriptor in open_:
                os.close(descriptor)
            await self._clear(sandbox)
            raise
        for descriptor in streams:
            os.close(descriptor)
        self._sandboxes[sandbox] = made
        if self._patrol is None:
            self._patrol = asyncio.create_task(disks.patrol(self._watched), name="sandboxes' disks")
        made.watching = asyncio.create_task(self._watch(sandbox, made), name=f"watch {sandbox}")
        return Pipes(pipes[1], pipes[2], pipes[4])

    def _mount(self, spec: Spec, place: Path, stack: tuple[str, ...]) -> Path:
        """The sandbox's working folder and /tmp, over layers."""
        place.mkdir(mode=0o700)
        for name in ("upper", "scratch", "merged"):
            (place / name).mkdir()
        below = layers.Stack(tuple(self._folders.template(spec.template) / layer for layer in stack))
        options = below.options(place / "upper", place / "scratch", user=False)
        try:
            kernel.mount("overlay", place / "merged", "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        except OSError as error:
            raise SandboxError("not_available", f"Layers can't be mounted: {error}.") from error
        return place / "merged"

    async def _watch(self, name: str, sandbox: _Sandbox) -> None:
        status = await ended(sandbox.pid)
        sandbox.ended.set()
        if not sandbox.leaving:
            self._died(Exited(sandbox=name, status=status, reason=_reason(status, sandbox)))

    def _watched(self) -> Iterator[disks.Watched]:
        for name, sandbox in self._sandboxes.items():
            if not sandbox.reason:
                yield self._folders.sandbox(name) / "upper", sandbox.spec.limits.disk, sandbox.end

    async def freeze(self, sandbox: str, image: str) -> Frozen:
        found = self._sandboxes[sandbox]
        template, place = self._folders.template(found.spec.template), self._folders.sandbox(sandbox)
        memory, layer = self._shelf.begin(image), template / "layers" / image
        try:
            try:
                await asyncio.to_thread(found.groups.freeze)
                if waiting := struct.unpack("i", ioctl(found.stdout, FIONREAD, b"\0" * 4))[0]:
                    raise SandboxError("busy", f"Sandbox {sandbox} has written {waiting} bytes meanwhile.")
                if path := await asyncio.to_thread(databases.held, found.groups.processes()):
                    raise SandboxError(
                        "not_forkable",
                        f"The SQLite database {path} is open, and who is restored could not write to it.",
                        hint="Close it between calls, or use a write-ahead log: pragma journal_mode=wal.",
                    )
                await self._runc.checkpoint(
                    sandbox, memory, place / "bundle" / "freezing", bundle.uid_of(found.spec.template)
                )
                stack = found.stack
                if len(stack) >= layers.DEEPEST:
                    await layers.copy(place / "merged", layer)
                    stack = (f"layers/{image}",)
                elif _written(place / "upper"):
                    await layers.copy(place / "upper", layer)
                    stack = (f"layers/{image}", *stack)
            finally:
                found.groups.thaw()
            async with layers.shown(template, stack, user=False) as tree:
                digest = await asyncio.to_thread(files.digest, tree / "work")
            size = layers.size(memory) + (layers.size(layer) if layer.exists() else 0)
            manifest = Manifest(image=image, template=found.spec.template, stack=stack, bytes=size, digest=digest)
            await asyncio.to_thread(self._shelf.publish, manifest)
        except BaseException as error:
            await layers.remove(self._folders.image(image))
            await layers.remove(layer)
            if isinstance(error, OSError):
                raise SandboxError("failed", f"Sandbox {sandbox} could not be frozen: {error}.") from error
            raise
        return Frozen(image=image, bytes=size, memory=True, digest=digest)

    async def remove(self, sandbox: str) -> None:
        found = self._sandboxes.pop(sandbox, None)
        if found is None:
            return
        found.leaving = True
        found.groups.thaw()
        if not found.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)
        await found.ended.wait()
        os.close(found.stdout)
        if found.network is not None:
            os.close(found.network)
        await self._clear(sandbox)
        await self._shelf.sweep(found.spec.template, self._used())

    async def _clear(self, sandbox: str) -> None:
        """All of it but its first process."""
        await self._runc.delete(sandbox)
        place = self._folders.sandbox(sandbox)
        if place.exists():
            layers.unmount(place / "merged")
        await layers.remove(place)

    async def drop(self, image: str) -> None:
        await self._shelf.drop(image, self._used())

    def _used(self) -> set[tuple[str, str]]:
        return {(one.spec.template, layer) for one in self._sandboxes.values() for layer in one.stack}

    def pid(self, sandbox: str) -> int:
        return self._sandboxes[sandbox].pid

    def images(self) -> list[str]:
        return self._shelf.names()

    # -- looking --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def tree(self, spec: Spec, name: str | None) -> AsyncIterator[Path]:
        if name is not None and name in self._sandboxes:
            yield self._folders.sandbox(name) / "merged" / "work"
            return
        stack = (BASE,) if name is None else self._shelf[name].stack
        async with layers.shown(self._folders.template(spec.template), stack, user=False) as tree:
            yield tree / "work"

    # -- beginning and end ----------------------------------------------------------------------------------------

    async def recover(self) -> None:
        if not _root():
            return  # the report says so
        try:
            for name in ("templates", "sandboxes", "images"):
                (self._folders.state / name).mkdir(exist_ok=True, parents=True, mode=0o700)
            kernel.prctl(_SUBREAPER, 1)
            self._settings.write_text(_SETTINGS)
            await self._runc.open()
            await self._end_left()
            await self._shelf.recover()
        except OSError as error:
            self._report = Report(kind=Kind.CRIU, works=False, reason=f"it could not begin: {error}")

    async def _end_left(self) -> None:
        """Sandboxes of a keeper that was killed."""
        await asyncio.to_thread(groups.clear, self._group)
        for name in self._runc.containers():
            await self._runc.delete(name)
        for folder in list((self._folders.state / "sandboxes").iterdir()):
            with contextlib.suppress(OSError):
                layers.unmount(folder / "merged")
            await layers.remove(folder)
        for folder in (self._folders.state / "templates").iterdir():
            for mounted in (folder / "root", *folder.glob("view-*")):
                with contextlib.suppress(OSError):
                    layers.unmount(mounted)

    async def aclose(self) -> None:
        if self._patrol is not None:
            self._patrol.cancel()
        for name in list(self._sandboxes):
            await self.remove(name)
        if _root():
            await asyncio.to_thread(groups.clear, self._group)
            self._runc.close()


def _root() -> bool:
    """Of the host, and not of a user namespace only."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[:2] == ["0", "0"]


async def _count(pipes: Pipes, expected: bytes) -> None:
    os.write(pipes.stdin, b"x\n")
    told = await asyncio.wait_for(asyncio.to_thread(os.read, pipes.stdout, 100), _TRIAL_S)
    if told != expected:
        raise SandboxError("failed", f"a counter said {told!r} instead of {expected!r}")


def _written(upper: Path) -> bool:
    return any(upper.iterdir())


def _reason(status: int | None, sandbox: _Sandbox) -> str:
    if sandbox.reason:
        return sandbox.reason
    if sandbox.groups.killed_for_memory():
        return f"it was killed for using more than {sandbox.spec.limits.memory} bytes of memory"
    if status is None:
        return "its first process has ended"
    return f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"


def _quiet_network() -> int:
    """A network namespace with nothing but a loopback that is up: a descriptor of it."""
    made: list[int] = []
    wrong: list[OSError] = []

    def work() -> None:
        try:
            kernel.unshare(kernel.CLONE_NEWNET)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                up = struct.pack("16sh14x", b"lo", 1)  # ifreq with IFF_UP
                ioctl(sock, 0x8914, up)
            made.append(os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            wrong.append(error)

    # A thread of its own, and not of a pool: what it has left it can't come back to.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if wrong:
        raise wrong[0]
    return made[0]

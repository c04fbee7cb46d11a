"""The fork server as a runtime: one zygote a template, everything else forked from it or from what was forked.

Invariants:
- a template's zygote, sandboxes and images live in one room (user, pid and network namespace) and one folder
  (`templates/T`): what another template has can't even be named there;
- a sandbox writes into an upper folder of its own over layers that nobody writes; an image is a process that waits and
  the layers that it goes with;
- everything here dies with the keeper, by the kernel's hand; so nothing is taken over at a start, all is removed.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes import files, layers
from sandboxes.confine import kernel
from sandboxes.forkserver.control import Control
from sandboxes.runtime import Died, Folders
from sandboxes.types import Exited, Frozen, Kind, Pipes, Report, SandboxError, Spec

log = logging.getLogger(__name__)

FIRST_UID = 0x30000000
_START_S = 60.0
_FORK_S = 10.0
_TAIL = 4000
_LAUNCH = str(Path(layers.__file__).parent / "confine" / "launch.py")
_SHOWN = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/opt", "/sbin", "/usr")
_PACKAGES = str(Path(layers.__file__).parent.parent)


@dataclass(eq=False)
class _Zygote:
    """A warm server."""

    spec: Spec
    folder: Path
    uid: int
    process: asyncio.subprocess.Process
    control: Control
    printed: Path

    @property
    def alive(self) -> bool:
        return self.process.returncode is None


@dataclass(eq=False)
class _Image:
    zygote: _Zygote
    control: Control
    stack: tuple[str, ...]
    """Layers below `templates/T`, newest first."""


@dataclass(eq=False)
class _Sandbox:
    zygote: _Zygote
    control: Control
    stack: tuple[str, ...]
    upper: Path
    namespace: str
    """Of mounts, as /proc shows it: its own, and of all that its tools start."""
    watching: "asyncio.Task[None] | None" = field(default=None)


class ForkServer:
    """See `runtime.Runtime`."""

    def __init__(self, folders: Folders, died: Died) -> None:
        self._folders = folders
        self._died = died
        self._zygotes: dict[str, _Zygote] = {}
        self._sandboxes: dict[str, _Sandbox] = {}
        self._images: dict[str, _Image] = {}
        self._uids = FIRST_UID
        self._report: Report | None = None

    async def report(self) -> Report:
        if self._report is None:
            self._report = await self._try_out()
        return self._report

    async def _try_out(self) -> Report:
        def bad(reason: str) -> Report:
            return Report(kind=Kind.FORK, works=False, reason=reason)

        if sys.platform != "linux" or not kernel.NUMBERS:
            return bad(f"it needs Linux on x86-64 or arm64, not {sys.platform} on {os.uname().machine}")
        if (version := kernel.landlock_version()) < 6:
            return bad(f"it needs Landlock of version 6 (Linux 6.12), this kernel has {version or 'none'}")
        spec = Spec(
            kind=Kind.FORK,
            entry="sandboxes.forkserver.trial:Trial",
            python=sys.executable,
        )
        try:
            await self.prepare(spec)
            pipes = await self.start(spec, "trial", None)
            try:
                await self.freeze("trial", "trial-image")
                again = await self.start(spec, "trial-again", "trial-image")
                for descriptor in again.all:
                    os.close(descriptor)
            finally:
                for descriptor in pipes.all:
                    os.close(descriptor)
        except (SandboxError, OSError) as error:
            return bad(f"its own trial failed: {error}")
        finally:
            for name in ("trial", "trial-again"):
                await self.remove(name)
            await self.drop("trial-image")
            await self._forget(spec.template)
        return Report(kind=Kind.FORK, works=True, features=("memory", "files"))

    # -- templates ------------------------------------------------------------------------------------------------

    async def prepare(self, spec: Spec) -> None:
        known = self._zygotes.get(spec.template)
        if known is not None and known.alive:
            return
        if known is not None:
            await self._forget(spec.template)
        folder = self._folders.template(spec.template)
        await layers.remove(folder)
        try:
            self._zygotes[spec.template] = await self._warm(spec, folder)
        except BaseException:
            await layers.remove(folder)
            raise

    async def _warm(self, spec: Spec, folder: Path) -> _Zygote:
        self._uids += 1
        uid = self._uids if os.geteuid() == 0 else os.geteuid()
        base = folder / "base"
        base.mkdir(parents=True)
        if spec.files is not None:
            await layers.copy(Path(spec.files), base / "work")
        else:
            (base / "work").mkdir()
        (base / "tmp").mkdir()
        code = [await _readable(Path(path), folder / "code" / str(n)) for n, path in enumerate(spec.pythonpath)]
        for name in ("run", "images"):
            (folder / name).mkdir()
        await asyncio.to_thread(_own, folder, uid)
        control, theirs = Control.pair()
        printed = folder / "printed"
        assert spec.entry is not None
        readable = _interpreter(spec)
        if hidden := [path for path in readable if Path(path).is_relative_to(spec.workdir)]:
            raise SandboxError(
                "invalid_spec",
                f"The working folder {spec.workdir} would hide {hidden[0]}, which the server needs.",
                hint="Choose another workdir.",
            )
        plan = {
            "show": [*_SHOWN, *readable, *(path for path in code if not path.startswith("/.layers/"))],
            "layers": str(folder),
            "folders": ["/.room", "/tmp", spec.workdir],
            "uid": uid,
            "hostname": "sandbox",
            "network": spec.network,
            "command": [
                spec.python or sys.executable,
                "-m",
                "sandboxes.forkserver.driver",
                spec.entry,
                spec.argument,
                *readable,
                *code,
            ],
            "environ": {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": spec.workdir,
                "LANG": "C.UTF-8",
                "PYTHONDONTWRITEBYTECODE": "1",
                **spec.environ,
                "PYTHONPATH": os.pathsep.join([*code, _PACKAGES]),
            },
        }
        with printed.open("wb") as output:
            process = await _spawn(plan, theirs.fileno(), output.fileno())
        theirs.close()
        try:
            await control.answer(_START_S)
        except SandboxError as error:
            control.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            tail = printed.read_bytes()[-_TAIL:].decode(errors="replace").strip()
            raise SandboxError(error.code, f"{spec.entry}: {error.message}", hint=error.hint, tail=tail) from error
        return _Zygote(spec, folder, uid, process, control, printed)

    async def _forget(self, template: str) -> None:
        """A zygote with all that lives in its room."""
        zygote = self._zygotes.pop(template, None)
        if zygote is None:
            return
        for name in [name for name, image in self._images.items() if image.zygote is zygote]:
            await self.drop(name)
        with contextlib.suppress(ProcessLookupError):
            zygote.process.kill()
        await zygote.process.wait()
        zygote.control.close()
        await layers.remove(zygote.folder)

    # -- sandboxes ------------------------------------------------------------------------------------------------

    async def start(self, spec: Spec, sandbox: str, origin: str | None) -> Pipes:
        zygote = self._zygotes[spec.template]
        image = self._images[origin] if origin else None
        if image is not None and image.zygote is not zygote:
            raise SandboxError("invalid_spec", f"Image {origin} is of another spec.")
        stack = image.stack if image else ("base",)
        place = zygote.folder / "run" / sandbox
        control, theirs = Control.pair()
        pipes: list[int] = []
        try:
            for name in ("", "upper", "work"):
                (place / name).mkdir()
                os.chown(place / name, zygote.uid, zygote.uid)
            for _ in range(3):
                pipes += os.pipe2(os.O_CLOEXEC)
            inside = (pipes[0], pipes[3], pipes[5])
            inner = f"/.layers/run/{sandbox}"
            lower = ":".join(f"/.layers/{layer}" for layer in stack)
            order = {
                "op": "start",
                "overlay": f"lowerdir={lower},upperdir={inner}/upper,workdir={inner}/work,userxattr",
                "workdir": spec.workdir,
                "network": spec.network,
            }
            source = (image or zygote).control
            await source.order(order, [theirs.fileno(), *inside], _FORK_S)
            await control.answer(_FORK_S)
        except BaseException:
            control.kill()
            control.close()
            for descriptor in pipes:
                os.close(descriptor)
            await layers.remove(place)
            raise
        finally:
            theirs.close()
        for descriptor in inside:
            os.close(descriptor)
        made = _Sandbox(zygote, control, stack, place / "upper", os.readlink(f"/proc/{control.pid}/ns/mnt"))
        self._sandboxes[sandbox] = made
        made.watching = asyncio.create_task(self._watch(sandbox, made), name=f"watch {sandbox}")
        return Pipes(pipes[1], pipes[2], pipes[4])

    async def _watch(self, name: str, sandbox: _Sandbox) -> None:
        await sandbox.control.ended()
        self._died(Exited(sandbox=name, status=None, reason="its process has ended"))

    async def freeze(self, sandbox: str, image: str) -> Frozen:
        found = self._sandboxes[sandbox]
        zygote, control = found.zygote, None
        control, theirs = Control.pair()
        layer = zygote.folder / "images" / image
        try:
            await found.control.order({"op": "freeze"}, [theirs.fileno()], _FORK_S)
            await control.answer(_FORK_S)
            stack = found.stack
            if any(found.upper.iterdir()):
                await layers.copy(found.upper, layer)
                stack = (f"images/{image}", *stack)
            self._images[image] = _Image(zygote, control, stack)
            async with self._shown(zygote, stack) as tree:
                digest = await asyncio.to_thread(files.digest, tree)
        except BaseException:
            self._images.pop(image, None)
            control.kill()
            control.close()
            await layers.remove(layer)
            raise
        finally:
            theirs.close()
        size = layers.size(layer) if layer.exists() else 0
        return Frozen(image=image, bytes=size, memory=True, digest=digest)

    async def remove(self, sandbox: str) -> None:
        found = self._sandboxes.pop(sandbox, None)
        if found is None:
            return
        if found.watching is not None:
            found.watching.cancel()
        images = {image.control.pid for image in self._images.values()}
        found.control.kill()
        await asyncio.to_thread(_end_others, found.namespace, images)
        await found.control.ended()
        found.control.close()
        await layers.remove(found.upper.parent)

    async def drop(self, image: str) -> None:
        found = self._images.pop(image, None)
        if found is None:
            return
        found.control.kill()
        await found.control.ended()
        found.control.close()
        layer = f"images/{image}"
        stacks = [*(one.stack for one in self._images.values()), *(one.stack for one in self._sandboxes.values())]
        if not any(layer in stack for stack in stacks):
            await layers.remove(found.zygote.folder / layer)

    def pid(self, sandbox: str) -> int:
        return self._sandboxes[sandbox].control.pid

    def images(self) -> list[str]:
        return list(self._images)

    # -- looking --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def tree(self, spec: Spec, name: str | None) -> AsyncIterator[Path]:
        zygote = self._zygotes[spec.template]
        if name is None:
            stack: tuple[str, ...] = ("base",)
        elif (sandbox := self._sandboxes.get(name)) is not None:
            stack = (f"run/{name}/upper", *sandbox.stack)
        else:
            stack = self._images[name].stack
        async with self._shown(zygote, stack) as tree:
            yield tree

    @asynccontextmanager
    async def _shown(self, zygote: _Zygote, stack: tuple[str, ...]) -> AsyncIterator[Path]:
        """The working folder of a stack of layers, for reading."""
        if len(stack) == 1:
            yield zygote.folder / stack[0] / "work"
            return
        place = zygote.folder / f"view-{os.urandom(6).hex()}"
        place.mkdir()
        try:
            lower = ":".join(str(zygote.folder / layer) for layer in stack)
            layers.mount("overlay", place, "overlay", layers.MS_RDONLY, f"lowerdir={lower},userxattr")
            yield place / "work"
        finally:
            with contextlib.suppress(OSError):
                layers.unmount(place)
            place.rmdir()

    async def recover(self) -> None:
        templates = self._folders.state / "templates"
        for folder in templates.iterdir() if templates.is_dir() else ():
            await layers.remove(folder)

    async def aclose(self) -> None:
        for name in list(self._sandboxes):
            await self.remove(name)
        for template in list(self._zygotes):
            await self._forget(template)


async def _spawn(plan: dict[str, object], control: int, output: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        _LAUNCH,
        json.dumps({**plan, "control": control}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(control,),
        start_new_session=True,
    )


def _interpreter(spec: Spec) -> list[str]:
    """Paths that the interpreter and its packages are in."""
    python = Path(spec.python or sys.executable)
    found = {str(python.parent.parent), str(Path(os.path.realpath(python)).parent.parent), _PACKAGES}
    return sorted(found | set(spec.pythonpath))


async def _readable(source: Path, copy: Path) -> str:
    """Where the server sees a folder of code: where it is, or a copy if only its owner may read it."""
    if os.geteuid() != 0 or all(path.stat().st_mode & 0o004 for path in (source, *source.rglob("*.py"))):
        return str(source)
    copy.parent.mkdir(exist_ok=True)
    await layers.copy(source, copy)
    return f"/.layers/code/{copy.name}"


def _own(folder: Path, uid: int) -> None:
    if os.geteuid() != 0:
        return
    for path, folders, names in os.walk(folder):
        for name in (*folders, *names):
            os.chown(os.path.join(path, name), uid, uid, follow_symlinks=False)
    os.chown(folder, uid, uid)


def _end_others(namespace: str, spared: set[int]) -> None:
    """Every process in a mount namespace but the images that were forked off it: what tools have started."""
    for _ in range(100):  # those that fork meanwhile are found in the next round
        found = 0
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in spared:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{name}/ns/mnt") == namespace:
                        os.kill(int(name), signal.SIGKILL)
                        found += 1
        if not found:
            return
        time.sleep(0.002)

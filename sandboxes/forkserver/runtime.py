"""The fork server as a runtime: one zygote a template, everything else forked from it or from what was forked.

Invariants:
- a template's zygote, sandboxes and images live in one room (user, pid and network namespace) and one folder
  (`templates/T`): what another template has can't even be named there;
- a sandbox writes into an upper folder of its own over layers that nobody writes; an image is a process that waits and
  the layers that it goes with; a layer is on disk as long as a sandbox or an image stands on it;
- no code of a server runs in a sandbox before its limits hold;
- a zygote that nobody has used for a while ends, once nothing lives in its room;
- everything here dies with the keeper, by the kernel's hand; so nothing is taken over at a start, all is removed.
"""

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes import disks, files, layers
from sandboxes.confine import cgroups, kernel, seccomp
from sandboxes.forkserver.control import Control
from sandboxes.forkserver.zygote import BASE, Zygote, warm
from sandboxes.runtime import Died, Folders
from sandboxes.types import Exited, Frozen, Kind, Pipes, Report, SandboxError, Spec

log = logging.getLogger(__name__)

FIRST_UID = 0x30000000
_FORK_S = 30.0
_FREEZE_S = 5.0
_IMAGES = "images"
_GROUP_OF_IMAGES = "IMAGES"  # no name that a sandbox can have
_DESCRIPTORS = 4096
WARM_S = 900.0
"""How long a zygote waits for the next sandbox when it has none, and no image."""


@dataclass(eq=False)
class _Image:
    zygote: Zygote
    control: Control
    stack: tuple[str, ...]
    """Layers below `templates/T`, newest first."""
    watching: "asyncio.Task[None] | None" = field(default=None)


@dataclass(eq=False)
class _Sandbox:
    zygote: Zygote
    control: Control
    stack: tuple[str, ...]
    upper: Path
    group: cgroups.Group | None
    namespace: str
    """Of mounts, as /proc shows it: its own, and of all that its tools start."""
    reason: str = ""
    """Why it is being ended by us."""
    watching: "asyncio.Task[None] | None" = field(default=None)

    def end(self, reason: str) -> None:
        """SIGKILL, with a reason of ours."""
        self.reason = reason
        self.control.kill()


class ForkServer:
    """See `runtime.Runtime`."""

    def __init__(self, folders: Folders, died: Died, warm_s: float = WARM_S) -> None:
        self._folders = folders
        self._died = died
        self._warm_s = warm_s
        self._retiring: asyncio.Task[None] | None = None
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Templates whose zygotes are being ended for idleness."""
        self._zygotes: dict[str, Zygote] = {}
        self._sandboxes: dict[str, _Sandbox] = {}
        self._images: dict[str, _Image] = {}
        self._users = kernel.many_users()
        self._uids = FIRST_UID
        self._groups: cgroups.Groups | None = None
        self._no_groups = "it was not asked for"
        self._kept: cgroups.Group | None = None
        """Of all images: they have no limits, and a sandbox's end isn't theirs."""
        self._patrol: asyncio.Task[None] | None = None
        self._report: Report | None = None

    async def report(self) -> Report:
        if self._report is None:
            self._report = await self._try_out()
        return self._report

    async def _try_out(self) -> Report:
        def bad(reason: str) -> Report:
            return Report(kind=Kind.FORK, works=False, reason=reason)

        if sys.platform != "linux" or not kernel.NUMBERS or not seccomp.KNOWN:
            return bad(f"it needs Linux on x86-64 or arm64, not {sys.platform} on {os.uname().machine}")
        if (version := kernel.landlock_version()) < 6:
            return bad(f"it needs Landlock of version 6 (Linux 6.12), this kernel has {version or 'none'}")
        spec = Spec(kind=Kind.FORK, entry="sandboxes.forkserver.trial:Trial", python=sys.executable)
        pipes: list[Pipes] = []
        try:
            await self.prepare(spec)
            pipes.append(await self.start(spec, "trial", None))
            await self.freeze("trial", "trial-image")
            pipes.append(await self.start(spec, "trial-again", "trial-image"))
        except (SandboxError, OSError) as error:
            hint = "" if self._users else "; without root it needs user namespaces that any user may make"
            return bad(f"its own trial failed: {error}{hint} {getattr(error, 'tail', '')}".strip())
        finally:
            for name in ("trial", "trial-again"):
                await self.remove(name)
            await self.drop("trial-image")
            await self._forget(spec.template)
            for descriptor in (number for each in pipes for number in each.all):
                os.close(descriptor)
        if self._groups is not None:
            return Report(kind=Kind.FORK, works=True, features=("memory", "files", "limits"))
        return Report(
            kind=Kind.FORK,
            works=True,
            reason=f"memory is limited by process only, processors and processes are not: {self._no_groups}",
            features=("memory", "files"),
        )

    # -- templates ------------------------------------------------------------------------------------------------

    async def prepare(self, spec: Spec) -> None:
        if (leaving := self._leaving.get(spec.template)) is not None:
            await asyncio.wait({leaving})
        known = self._zygotes.get(spec.template)
        if known is not None and known.alive:
            known.used = time.monotonic()
            return
        if known is not None:
            await self._forget(spec.template)
        folder = self._folders.template(spec.template)
        await layers.remove(folder)
        self._uids += 1
        try:
            self._zygotes[spec.template] = await warm(spec, folder, self._uids if self._users else None)
        except BaseException:
            await layers.remove(folder)
            raise

    async def end_idle(self) -> None:
        """Ends the zygotes that have waited for too long."""
        for template, zygote in list(self._zygotes.items()):
            living: list[_Image | _Sandbox] = [*self._images.values(), *self._sandboxes.values()]
            if zygote.starting or any(one.zygote is zygote for one in living):
                zygote.used = time.monotonic()
            elif time.monotonic() - zygote.used >= self._warm_s:
                log.info("the warm server of template %s was not used for %g s", template, self._warm_s)
                task = self._leaving[template] = asyncio.create_task(self._forget(template))
                task.add_done_callback(functools.partial(self._left, template))
        if self._leaving:
            await asyncio.wait(self._leaving.values())

    def _left(self, template: str, _: "asyncio.Task[None]") -> None:
        del self._leaving[template]

    async def _retire(self) -> None:
        while True:
            await asyncio.sleep(self._warm_s / 8)
            await self.end_idle()

    async def _forget(self, template: str) -> None:
        """A zygote with all that lives in its room."""
        zygote = self._zygotes.pop(template, None)
        if zygote is None:
            return
        for name in [name for name, image in self._images.items() if image.zygote is zygote]:
            await self.drop(name)
        await zygote.end()

    # -- sandboxes ------------------------------------------------------------------------------------------------

    async def start(self, spec: Spec, sandbox: str, origin: str | None) -> Pipes:
        zygote = self._zygotes[spec.template]
        image = self._images[origin] if origin else None
        if image is not None and image.zygote is not zygote:
            raise SandboxError("invalid_spec", f"Image {origin} is of another spec.")
        stack = image.stack if image else (BASE,)
        place = zygote.folder / "run" / sandbox
        group = self._groups.group(sandbox) if self._groups is not None else None
        control, theirs = Control.pair()
        pipes: list[int] = []
        zygote.starting += 1
        try:
            _make_place(place, zygote.uid)
            if group is not None:
                group.make().limit(memory=spec.limits.memory, pids=spec.limits.pids, cpus=spec.limits.cpus)
            for _ in range(3):
                pipes += os.pipe2(os.O_CLOEXEC)
            inside = (pipes[0], pipes[3], pipes[5])
            order = {
                "op": "start",
                "overlay": _overlay(stack, sandbox),
                "workdir": spec.workdir,
                "network": spec.network,
                "limits": _resources(spec, grouped=group is not None),
            }
            source = (image or zygote).control
            await source.order(order, [theirs.fileno(), *inside], _FORK_S)
            await control.ready(_FORK_S)
            if group is not None:
                group.add(control.pid)
            namespace = os.readlink(f"/proc/{control.pid}/ns/mnt")
        except BaseException as error:
            control.kill()
            control.close()
            for descriptor in pipes:
                os.close(descriptor)
            if group is not None:
                await asyncio.to_thread(group.remove)
            await layers.remove(place)
            if isinstance(error, OSError):
                raise SandboxError("failed", f"Sandbox {sandbox} could not be started: {error}.") from error
            raise
        finally:
            zygote.starting -= 1
            theirs.close()
        for descriptor in inside:
            os.close(descriptor)
        made = _Sandbox(zygote, control, stack, place / "upper", group, namespace)
        self._sandboxes[sandbox] = made
        made.watching = asyncio.create_task(self._watch(sandbox, made), name=f"watch {sandbox}")
        if self._patrol is None:
            self._patrol = asyncio.create_task(disks.patrol(self._watched), name="sandboxes' disks")
        return Pipes(pipes[1], pipes[2], pipes[4])

    async def _watch(self, name: str, sandbox: _Sandbox) -> None:
        status = await sandbox.control.ended()
        reason, group, killed = sandbox.reason, sandbox.group, status in (None, -signal.SIGKILL)
        if not reason and killed and group is not None and group.killed_for_memory():
            reason = f"it was killed for memory: its limit is {sandbox.zygote.spec.limits.memory >> 20} MiB"
        self._died(Exited(sandbox=name, status=status, reason=reason or _ending(status)))

    def _watched(self) -> Iterator[disks.Watched]:
        for sandbox in self._sandboxes.values():
            if not sandbox.reason:
                yield sandbox.upper, sandbox.zygote.spec.limits.disk, sandbox.end

    async def freeze(self, sandbox: str, image: str) -> Frozen:
        found = self._sandboxes[sandbox]
        zygote = found.zygote
        control, theirs = Control.pair()
        layer = zygote.folder / _IMAGES / image
        try:
            try:
                await found.control.order({"op": "freeze"}, [theirs.fileno()], _FREEZE_S)
                await control.ready(_FREEZE_S)
                if self._kept is not None:
                    self._kept.add(control.pid)
                _demand_no_others(found)
                stack = await self._freeze_files(found, layer)
            finally:
                found.control.resume()
            digest = await self._digest(zygote, stack)
        except BaseException as error:
            control.kill()
            control.close()
            await layers.remove(layer)
            if isinstance(error, OSError):
                raise SandboxError("failed", f"Sandbox {sandbox} could not be frozen: {error}.") from error
            raise
        finally:
            theirs.close()
        if layer.exists():
            zygote.layers.add(f"{_IMAGES}/{image}")
        made = self._images[image] = _Image(zygote, control, stack)
        made.watching = asyncio.create_task(self._watch_image(image, made), name=f"watch {image}")
        size = await asyncio.to_thread(layers.size, layer) if layer.exists() else 0
        return Frozen(image=image, bytes=size, memory=True, digest=digest)

    async def _freeze_files(self, sandbox: _Sandbox, layer: Path) -> tuple[str, ...]:
        """The stack on which the image stands. `layer` is made, unless nothing was written."""
        if not any(sandbox.upper.iterdir()):
            return sandbox.stack
        await layers.copy(sandbox.upper, layer)
        stack = (f"{_IMAGES}/{layer.name}", *sandbox.stack)
        if len(stack) <= layers.DEEPEST:
            return stack
        flat = layer.with_name(f"{layer.name}.flat")
        try:
            async with layers.shown(sandbox.zygote.folder, stack, user=True) as tree:
                await layers.copy(tree, flat)
            await layers.remove(layer)
            flat.rename(layer)
        except BaseException:
            await layers.remove(flat)
            raise
        return (f"{_IMAGES}/{layer.name}",)

    async def remove(self, sandbox: str) -> None:
        found = self._sandboxes.pop(sandbox, None)
        if found is None:
            return
        if found.watching is not None:
            found.watching.cancel()
        found.control.kill()
        if found.group is not None:
            await asyncio.to_thread(found.group.remove)
        else:
            await asyncio.to_thread(_end_all, found.namespace)
        await found.control.ended()
        found.control.close()
        await layers.remove(found.upper.parent)
        await self._sweep(found.zygote)

    async def _watch_image(self, name: str, image: _Image) -> None:
        """An image that somebody else ended is none any more."""
        status = await image.control.ended()
        if self._images.get(name) is image:
            log.warning("image %s is lost: %s", name, _ending(status))
            del self._images[name]
            image.control.close()
            await self._sweep(image.zygote)

    async def drop(self, image: str) -> None:
        found = self._images.pop(image, None)
        if found is None:
            return
        if found.watching is not None:
            found.watching.cancel()
        found.control.kill()
        await found.control.ended()
        found.control.close()
        await self._sweep(found.zygote)

    async def _sweep(self, zygote: Zygote) -> None:
        """Removes the layers that nobody stands on any more."""
        standing: list[_Image | _Sandbox] = [*self._images.values(), *self._sandboxes.values()]
        used = {layer for one in standing if one.zygote is zygote for layer in one.stack}
        unused = zygote.layers - used
        zygote.layers -= unused
        for stack in [stack for stack in zygote.digests if not unused.isdisjoint(stack)]:
            del zygote.digests[stack]
        for layer in unused:
            await layers.remove(zygote.folder / layer)

    def pid(self, sandbox: str) -> int:
        return self._sandboxes[sandbox].control.pid

    def images(self) -> list[str]:
        return list(self._images)

    # -- looking --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def tree(self, spec: Spec, name: str | None) -> AsyncIterator[Path]:
        zygote = self._zygotes[spec.template]
        if name is None:
            stack: tuple[str, ...] = (BASE,)
        elif (sandbox := self._sandboxes.get(name)) is not None:
            stack = (f"run/{name}/upper", *sandbox.stack)
        else:
            stack = self._images[name].stack
        async with layers.shown(zygote.folder, stack, user=True) as tree:
            yield tree / "work"

    async def _digest(self, zygote: Zygote, stack: tuple[str, ...]) -> str:
        """Of the working folder of frozen layers."""
        known = zygote.digests.get(stack)
        if known is None:
            async with layers.shown(zygote.folder, stack, user=True) as tree:
                known = zygote.digests[stack] = await asyncio.to_thread(files.digest, tree / "work")
        return known

    # -- the keeper's life ----------------------------------------------------------------------------------------

    async def recover(self) -> None:
        name = "megamcp-" + hashlib.sha256(os.fsencode(self._folders.state.resolve())).hexdigest()[:12]
        try:
            self._groups = await asyncio.to_thread(cgroups.claim, name)
            self._kept = self._groups.group(_GROUP_OF_IMAGES).make()
        except OSError as error:
            self._no_groups = f"control groups can't be made here ({error})"
        self._retiring = asyncio.create_task(self._retire(), name="idle zygotes")
        templates = self._folders.state / "templates"
        for folder in templates.iterdir() if templates.is_dir() else ():
            await layers.remove(folder)

    async def aclose(self) -> None:
        for name in list(self._sandboxes):
            await self.remove(name)
        for template in list(self._zygotes):
            await self._forget(template)
        for task in (self._patrol, self._retiring):
            if task is not None:
                task.cancel()
        if self._groups is not None:
            await asyncio.to_thread(self._groups.remove)


def _make_place(place: Path, uid: int | None) -> None:
    """A sandbox's own folders: `upper` is what it writes, `work` the kernel's."""
    for name in ("", "upper", "work"):
        (place / name).mkdir(mode=0o700)
        if uid is not None:
            os.chown(place / name, uid, uid)


def _overlay(stack: tuple[str, ...], sandbox: str) -> str:
    """Options of the mount, as the room sees the layers. They must fit into a page."""
    place = f"/.layers/run/{sandbox}"
    lower = ":".join(f"/.layers/{layer}" for layer in stack)
    return f"lowerdir={lower},upperdir={place}/upper,workdir={place}/work,userxattr"


def _resources(spec: Spec, *, grouped: bool) -> dict[str, int]:
    """Limits of each process."""
    limits = {"CORE": 0, "FSIZE": spec.limits.disk, "NOFILE": _DESCRIPTORS}
    return limits if grouped else {**limits, "DATA": spec.limits.memory}


def _ending(status: int | None) -> str:
    if status is None:
        return "its process has ended"
    if status >= 0:
        return f"its process ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process was ended by signal {-status}"


def _demand_no_others(sandbox: _Sandbox) -> None:
    """What tools have left running is not in a fork. Raises `SandboxError`."""
    others = sandbox.group.processes() if sandbox.group is not None else _inhabitants(sandbox.namespace)
    for pid in others - {sandbox.control.pid}:
        with contextlib.suppress(OSError):
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            if rest.split()[0] not in ("Z", "X"):
                raise SandboxError(
                    "not_forkable",
                    f"The server can't be forked: a process that a tool has started is still running ({name!r}).",
                    hint="End what was started before the call returns.",
                )


def _inhabitants(namespace: str) -> set[int]:
    """Every process in a mount namespace."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/mnt") == namespace:
                    found.add(int(name))
    return found


def _end_all(namespace: str) -> None:
    """Every process in a mount namespace: a sandbox, and what its tools have started."""
    for _ in range(200):  # those that fork meanwhile are found in the next round
        found = _inhabitants(namespace)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.002)

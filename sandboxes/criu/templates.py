"""What all sandboxes of a spec share: the command as it is found here, mount points, initial files, packages.

A template is made once and lies on disk as long as an image needs it. It is there when `template.json` is.
"""

import asyncio
import os
from pathlib import Path

import msgspec

from sandboxes import layers
from sandboxes.confine import kernel
from sandboxes.criu import bundle, packages
from sandboxes.criu.images import BASE
from sandboxes.criu.runc import Runc, ended
from sandboxes.runtime import Folders
from sandboxes.tail import Tail
from sandboxes.types import Kind, Limits, SandboxError, Spec

_GETTING = Limits(memory=4 << 30, pids=1024, cpus=4, disk=8 << 30)
_GETTING_S = 300.0
_READ_AND_ENTER = 0o005


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What was found and made for a spec. `mounts` are paths of the host, `copies` those that are seen as a folder of
    the template has them; `packages`: there is such a folder."""

    command: list[str]
    mounts: tuple[str, ...]
    packages: bool
    copies: dict[str, str] = {}


class Templates:
    """Of a keeper."""

    def __init__(self, folders: Folders, runc: Runc, group: str, settings: Path) -> None:
        self._folders = folders
        self._runc = runc
        self._group = group
        self._settings = settings
        self._made: dict[str, Template] = {}

    def __getitem__(self, template: str) -> Template:
        return self._made[template]

    async def forget(self, template: str) -> None:
        """Nothing may lie on it."""
        self._made.pop(template, None)
        await layers.remove(self._folders.template(template))

    async def prepare(self, spec: Spec) -> None:
        if spec.template in self._made:
            return
        folder = self._folders.template(spec.template)
        try:
            made = msgspec.json.decode((folder / "template.json").read_bytes(), type=Template)
        except (OSError, msgspec.DecodeError):
            await layers.remove(folder)
            try:
                made = await self._make(spec, folder)
            except BaseException:
                await layers.remove(folder)
                raise
        if spec.image is not None and not os.path.ismount(folder / "root"):
            lower = f"{folder / 'points'}:{spec.image}"
            kernel.mount("overlay", folder / "root", "overlay", kernel.MS_RDONLY, f"lowerdir={lower}")
        self._made[spec.template] = made

    async def _make(self, spec: Spec, folder: Path) -> Template:
        uid = bundle.uid_of(spec.template)
        folder.mkdir(parents=True, mode=0o700)
        (folder / "layers").mkdir()
        base = folder / BASE
        base.mkdir()
        if spec.files is not None:
            await layers.copy(Path(spec.files), base / "work")
        else:
            (base / "work").mkdir()
        (base / "tmp").mkdir()
        await asyncio.to_thread(_own, base / "work", uid)
        (base / "tmp").chmod(0o1777)
        wanted = packages.wanted(spec.command)
        command, needed, cwd = list(spec.command), list[str](), _cwd_of_host(spec)
        if wanted is not None:
            needed = packages.needed(wanted)
            await self._get(wanted, spec, folder)
            command = packages.command(wanted, folder / "packages")
        elif spec.image is None:
            command, needed = bundle.found(spec.command, spec.environ, cwd)
        needed += [cwd] if cwd else []
        if spec.image is not None and not Path(spec.image).is_dir():
            raise SandboxError(
                "invalid_spec",
                f"There is no folder {spec.image}.",
                hint="The CRIU runtime takes a folder with a root file system; images by name are Docker's.",
            )
        shown = bundle.seen([*(() if spec.image else bundle.SHOWN), *needed])
        if hidden := [path for path in shown.mounts if Path(path).is_relative_to(spec.workdir)]:
            raise SandboxError(
                "invalid_spec",
                f"The working folder {spec.workdir} would hide {hidden[0]}, which the server needs.",
                hint="Choose another workdir.",
            )
        for path in shown.mounts:
            if path.startswith("/tmp/"):  # to be mounted on
                (base / path[1:]).mkdir(parents=True, exist_ok=True)
        copies = await self._copied(spec, folder, uid)
        _demand_readable([path for path in needed if os.path.realpath(path) not in copies])
        points = "root" if spec.image is None else "points"
        bundle.make_root(folder / points, shown, ("/tmp", spec.workdir, *((bundle.PACKAGES,) if wanted else ())))
        (folder / "root").mkdir(exist_ok=True)
        made = Template(command=command, mounts=shown.mounts, packages=wanted is not None, copies=copies)
        (folder / "template.json").write_bytes(msgspec.json.encode(made))
        return made

    async def _copied(self, spec: Spec, folder: Path, uid: int) -> dict[str, str]:
        """Folders of an environment's code that only its owner may read: the server gets copies."""
        copies: dict[str, str] = {}
        for path in map(os.path.realpath, spec.pythonpath):
            if not await asyncio.to_thread(layers.open_to_all, path):
                copy = folder / f"code-{len(copies)}"
                await layers.copy(Path(path), copy)
                await asyncio.to_thread(_own, copy, uid)
                copies[path] = copy.name
        return copies

    async def _get(self, wanted: packages.Wanted, spec: Spec, folder: Path) -> None:
        """Fills `packages`, in containers that have the network and nothing else that sandboxes have."""
        place, name = folder / "getting", f"getting-{spec.template}"
        for path in (place, place / "bundle", place / "work", place / "tmp"):
            path.mkdir()
        shown = bundle.seen([*bundle.SHOWN, *packages.needed(wanted)])
        bundle.make_root(place / "root", shown, ("/tmp", bundle.PACKAGES))
        room = bundle.Room(
            root=place / "root",
            merged=place,
            mounts=shown.mounts,
            copies={},
            packages=None,
            network=None,
            group=f"/{self._group}/{name}",
            settings=self._settings,
        )
        for command in packages.steps(wanted):
            getting = Spec(
                kind=Kind.CRIU,
                command=command,
                environ=packages.environ(),
                workdir=bundle.PACKAGES,
                network=True,
                limits=_GETTING,
            )
            # Each step's spec has a user of its own; what one step made the next must change.
            uid = bundle.uid_of(getting.template)
            await asyncio.to_thread(_own, place / "work", uid)
            await asyncio.to_thread(_own, place / "tmp", uid)
            bundle.write(place / "bundle", getting, list(command), room)
            status, told = await self._ran(name, place)
            if status != 0:
                raise SandboxError(
                    "start_failed",
                    f"{', '.join(wanted.packages)} could not be got from {wanted.manager}.",
                    hint="The tail says why. It was tried with the network of this host.",
                    tail=told,
                )
        (place / "work").rename(folder / "packages")
        await layers.remove(place)

    async def _ran(self, name: str, place: Path) -> tuple[int | None, str]:
        """A container's exit status, None if it took too long, and what it printed last."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        printed = Tail()
        try:
            pid = await self._runc.run(name, place / "bundle", (nothing, printed.output, printed.output))
            async with asyncio.timeout(_GETTING_S):
                return await ended(pid), printed.text()
        except TimeoutError:
            return None, printed.text()
        finally:
            os.close(nothing)
            printed.close()
            await self._runc.delete(name)


def _cwd_of_host(spec: Spec) -> str:
    """The folder of the host that a command is started in, if it is one. Raises `SandboxError`."""
    if spec.cwd is None or spec.image is not None or Path(spec.cwd).is_relative_to(spec.workdir):
        return ""
    if not os.path.isdir(spec.cwd):
        raise SandboxError(
            "invalid_spec",
            f"There is no folder {spec.cwd} on this host, in which {spec.command[0]!r} is to be started.",
            hint="A cwd that isn't absolute is of the environment's folder. Where the server writes is `workdir`.",
        )
    return spec.cwd


def _own(folder: Path, uid: int) -> None:
    for path, _, names in os.walk(folder):
        for name in ("", *names):
            os.chown(os.path.join(path, name), uid, uid, follow_symlinks=False)


def _demand_readable(paths: list[str]) -> None:
    """That who is nobody may enter these folders of the host. Raises `SandboxError`."""
    for path in paths:
        if os.path.isdir(path) and os.stat(path).st_mode & _READ_AND_ENTER != _READ_AND_ENTER:
            raise SandboxError(
                "invalid_spec",
                f"The server needs the folder {path}, which only its owner may read; in a sandbox it runs as nobody.",
                hint=f"chmod o+rx {path}, or put the program into another folder.",
            )

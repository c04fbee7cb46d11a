"""Docker as a runtime: a sandbox is a container, an image is an image of the engine's, made by commit.

Invariants:
- everything that is made has the keeper's label and can so be found and removed by the next one; what other keepers or
  people have on the engine is never touched;
- a container has no capability, gains no privilege, runs as a user that owns nothing but the working folder, under the
  engine's seccomp profile, and has no network unless the spec asks for it;
- what can't be taken away since the engine is away is taken away later; which images there are is known without it;
- **memory is not kept.** A sandbox that is started from an image is a new process that finds the files; so is one that
  others would come back to from disk, which is why it isn't parked.

The working folder and what the image lets everybody write (/tmp) lie in the container's own layer, and all of it is
frozen. The disk limit is looked at when a sandbox is frozen: few engines can hold a container to one.
"""

import asyncio
import contextlib
import hashlib
import io
import logging
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from sandboxes import files, layers
from sandboxes.docker import folder
from sandboxes.docker.engine import Engine, attached, is_absent
from sandboxes.docker.pump import Pump
from sandboxes.runtime import Died, Folders
from sandboxes.types import Exited, Frozen, Kind, Pipes, Report, SandboxError, Spec

log = logging.getLogger(__name__)

USER = 65532
DEEPEST = 100
"""Layers of an image; the engine's own limit is not far above. A deeper one is made into one layer."""
_AGAIN_S = 1.0
_KEEPER, _WHAT, _NAME = "megamcp.keeper", "megamcp.what", "megamcp.name"


@dataclass(frozen=True, slots=True)
class _Template:
    """An image with the working folder as it starts, and the variables of the image that it was made from."""

    tag: str
    environ: dict[str, str]


@dataclass(eq=False)
class _Container:
    id: str
    spec: Spec
    image: str
    """Id of the image that it was made from: to be removed with it where nothing names it any more."""
    pid: int
    pump: Pump
    watching: "asyncio.Task[None] | None" = field(default=None)


class Containers:
    """See `runtime.Runtime`."""

    def __init__(self, folders: Folders, died: Died, engine: Engine | None = None) -> None:
        self._folders = folders
        self._died = died
        self._engine = engine or Engine()
        self._templates: dict[str, _Template] = {}
        self._containers: dict[str, _Container] = {}
        self._images: set[str] = set()
        """Each has an empty file of its name in `_place`/images."""
        self._report: Report | None = None
        self._unswept = asyncio.Lock()
        self._swept = True
        self._left: list[_Container] = []
        """To be removed when the engine is back."""
        self._clearing: asyncio.Task[None] | None = None

    @property
    def _place(self) -> Path:
        """Is there since this keeper first had something on the engine."""
        return self._folders.state / "docker"

    @property
    def _keeper(self) -> str:
        return hashlib.sha256((self._folders.state / "name").read_bytes()).hexdigest()[:12]

    def _tag(self, name: str) -> str:
        return f"megamcp-sandbox/{self._keeper}:{name}"

    def _labels(self, what: str, name: str) -> dict[str, str]:
        return {_KEEPER: self._keeper, _WHAT: what, _NAME: name}

    # -- trial ----------------------------------------------------------------------------------------------------

    async def report(self) -> Report:
        if self._report is not None and self._report.works:  # an engine may be started later
            return self._report
        try:
            reason = await self._engine.ask(self._try_out)
        except SandboxError as error:
            reason = error.message + (f" ({error.hint})" if error.hint else "")
        self._report = Report(
            kind=Kind.DOCKER,
            works=not reason,
            reason=reason or "memory is not kept",
            features=() if reason else ("files",),
        )
        return self._report

    def _try_out(self, api: Any) -> str:
        """Everything but running a program: for that it would need an image."""
        told = api.info()
        if told.get("OSType") != "linux":
            return f"it needs an engine for Linux containers, not {told.get('OSType')}"
        if not any("seccomp" in option for option in told.get("SecurityOptions") or ()):
            return "the engine has no seccomp"
        if api.base_url.startswith("https") or "ssh" in api.base_url:
            return "the engine has to be reached over a unix socket or plain TCP"
        self._place.mkdir(exist_ok=True, mode=0o700)
        nothing = io.BytesIO()
        tarfile.open(fileobj=nothing, mode="w").close()
        tag = self._tag("trial")
        labels = [f"LABEL {name}={value}" for name, value in self._labels("trial", "trial").items()]
        repository, _, name = tag.rpartition(":")
        api.import_image_from_data(nothing.getvalue(), repository=repository, tag=name, changes=labels)
        try:
            made = api.create_container(tag, ["/trial"], labels=self._labels("trial", "trial"), working_dir="/trial")
            try:
                for _ in api.get_archive(made["Id"], "/trial")[0]:
                    pass
                api.commit(made["Id"], repository=repository, tag=name)
            finally:
                api.remove_container(made["Id"], force=True, v=True)
        finally:
            self._sweep(api, "trial")
        return ""

    # -- templates ------------------------------------------------------------------------------------------------

    async def prepare(self, spec: Spec) -> None:
        if spec.template in self._templates:
            return
        if spec.image is None:
            raise SandboxError(
                "invalid_spec",
                "A sandbox in Docker needs an image to run in.",
                hint='Name one in the server\'s state: image = "python:3.13-slim".',
            )
        if spec.workdir == "/":
            raise SandboxError("invalid_spec", "The working folder of a sandbox in Docker can't be /.")
        self._place.mkdir(exist_ok=True, mode=0o700)
        await self._sweep_once()
        self._templates[spec.template] = await self._engine.ask(lambda api: self._make_template(api, spec))

    def _make_template(self, api: Any, spec: Spec) -> _Template:
        assert spec.image is not None
        told = _here_or_pulled(api, spec.image)
        for volume in told["Config"].get("Volumes") or ():
            if PurePosixPath(spec.workdir).is_relative_to(volume):
                raise SandboxError(
                    "invalid_spec",
                    f"Image {spec.image} declares {volume} a volume, and no image keeps what is in one.",
                    hint=f"Give the server another workdir than {spec.workdir}.",
                )
        name = f"t-{spec.template}"
        labels = self._labels("template", name)
        made = api.create_container(told["Id"], ["-"], working_dir=spec.workdir, labels=labels)
        try:
            path = PurePosixPath(spec.workdir)
            with folder.packed(path.name, Path(spec.files) if spec.files else None, USER) as tar:
                api.put_archive(made["Id"], str(path.parent), tar)
            self._commit(api, made["Id"], labels)
        finally:
            api.remove_container(made["Id"], force=True, v=True)
        environ = dict(pair.partition("=")[::2] for pair in told["Config"].get("Env") or ())
        return _Template(self._tag(name), environ)

    def _commit(self, api: Any, container: str, labels: dict[str, str]) -> None:
        repository, _, tag = self._tag(labels[_NAME]).rpartition(":")
        changes = [f"LABEL {name}={value}" for name, value in labels.items()]
        api.commit(container, repository=repository, tag=tag, changes=changes)

    # -- sandboxes ------------------------------------------------------------------------------------------------

    async def start(self, spec: Spec, sandbox: str, origin: str | None) -> Pipes:
        template = self._templates[spec.template]
        source = self._tag(origin) if origin else template.tag
        try:
            container = await self._engine.ask(
                lambda api: str(self._create(api, spec, sandbox, source, template.environ)["Id"]), "start_failed"
            )
            stream = await self._engine.ask(lambda api: attached(api, container))
            pump, pipes = await Pump.open(stream)
            try:
                told = await self._engine.ask(lambda api: _started(api, container), "start_failed")
            except BaseException:
                await pump.close()
                for descriptor in pipes.all:
                    os.close(descriptor)
                raise
        except BaseException:
            await self._engine.ask(lambda api: self._remove_container(api, self._container_name(sandbox)))
            raise
        made = _Container(container, spec, told["Image"], told["State"]["Pid"], pump)
        self._containers[sandbox] = made
        made.watching = asyncio.create_task(self._watch(sandbox, made), name=f"watch {sandbox}")
        return pipes

    def _container_name(self, sandbox: str) -> str:
        return f"megamcp-{self._keeper}-{sandbox}"

    def _create(self, api: Any, spec: Spec, sandbox: str, source: str, environ: dict[str, str]) -> Any:
        limits = spec.limits
        name = self._container_name(sandbox)
        self._remove_container(api, name)  # of a start that was cut off
        return api.create_container(
            source,
            name=name,
            entrypoint=list(spec.command),
            command=None,
            user=f"{USER}:{USER}",
            working_dir=spec.cwd or spec.workdir,
            environment={"HOME": spec.workdir, "LANG": "C.UTF-8", **environ, **spec.environ},
            hostname="sandbox",
            stdin_open=True,
            labels=self._labels("sandbox", sandbox),
            healthcheck={"test": ["NONE"]},
            host_config=api.create_host_config(
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                network_mode="bridge" if spec.network else "none",
                mem_limit=limits.memory,
                memswap_limit=limits.memory,
                pids_limit=limits.pids,
                nano_cpus=int(limits.cpus * 1_000_000_000),
                ipc_mode="private",
                log_config={"type": "none"},
            ),
        )

    async def _watch(self, name: str, container: _Container) -> None:
        await container.pump.ended.wait()
        state: dict[str, Any] = {}
        reason = "its container has gone"
        try:
            state = await self._engine.ask(lambda api: _ended(api, container.id))
        except SandboxError as error:
            if error.code == "engine_lost":
                reason = error.message
        status = state.get("ExitCode")
        if status is not None and 128 < status < 160:
            status = 128 - status
        if state.get("OOMKilled"):
            reason = f"it was killed for using more memory than {container.spec.limits.memory >> 20} MiB"
        elif state.get("Running"):
            reason = "the Docker engine has closed the connection to it"
        elif status is not None:
            reason = f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}"
        self._died(Exited(sandbox=name, status=status, reason=reason))

    async def freeze(self, sandbox: str, image: str) -> Frozen:
        found = self._containers[sandbox]
        try:
            self._note(image)
            size = await self._engine.ask(lambda api: self._freeze(api, found, image))
            async with self.tree(found.spec, image) as tree:
                digest = await asyncio.to_thread(files.digest, tree)
        except BaseException:
            await self.drop(image)
            raise
        return Frozen(image=image, bytes=size, memory=False, digest=digest)

    def _freeze(self, api: Any, found: _Container, image: str) -> int:
        size = sum(one.get("SizeRw") or 0 for one in api.containers(all=True, size=True, filters={"id": found.id}))
        if size > found.spec.limits.disk:
            raise SandboxError(
                "disk_full",
                f"The sandbox has written {size >> 20} MiB, its limit is {found.spec.limits.disk >> 20}.",
                hint="Give the server a larger disk_mb, or roll back.",
            )
        labels = self._labels("image", image)
        self._commit(api, found.id, labels)
        if len(api.inspect_image(self._tag(image))["RootFS"]["Layers"]) > DEEPEST:
            self._flatten(api, labels)
        return size

    def _flatten(self, api: Any, labels: dict[str, str]) -> None:
        tag = self._tag(labels[_NAME])
        deep = api.inspect_image(tag)["Id"]
        made = api.create_container(tag, ["-"], labels=self._labels("view", labels[_NAME]))
        try:
            repository, _, name = tag.rpartition(":")
            changes = [f"LABEL {key}={value}" for key, value in labels.items()]
            api.import_image_from_stream(api.export(made["Id"]), repository=repository, tag=name, changes=changes)
        finally:
            api.remove_container(made["Id"], force=True, v=True)
        is_absent(lambda: api.remove_image(deep))

    async def remove(self, sandbox: str) -> None:
        found = self._containers.pop(sandbox, None)
        if found is None:
            return
        if found.watching is not None and found.watching is not asyncio.current_task():
            found.watching.cancel()
        await found.pump.close()
        try:
            await self._engine.ask(lambda api: self._remove_container(api, found.id, found.image))
        except SandboxError as error:
            log.warning("container %s is removed later: %s", found.id[:12], error.message)
            self._left.append(found)
            if self._clearing is None or self._clearing.done():
                self._clearing = asyncio.create_task(self._clear(), name="remove containers that were left")

    async def _clear(self) -> None:
        while self._left:
            await asyncio.sleep(_AGAIN_S)
            with contextlib.suppress(SandboxError):
                container = self._left[0]
                await self._engine.ask(lambda api: self._remove_container(api, container.id, container.image))  # noqa: B023 - waited for
                del self._left[0]

    def _remove_container(self, api: Any, container: str, image: str | None = None) -> None:
        is_absent(lambda: api.remove_container(container, force=True, v=True))
        if image is not None:
            self._remove_nameless(api, image)

    def _remove_nameless(self, api: Any, image: str) -> None:
        """An image that was dropped while containers ran from it."""
        from docker.errors import APIError

        with contextlib.suppress(APIError):  # gone, or another container's still
            if not api.inspect_image(image)["RepoTags"]:
                api.remove_image(image)

    async def drop(self, image: str) -> None:
        if image not in self._images:
            return
        await self._engine.ask(lambda api: is_absent(lambda: api.remove_image(self._tag(image), force=True)))
        self._unnote(image)

    def _note(self, image: str) -> None:
        notes = self._place / "images"
        notes.mkdir(exist_ok=True, mode=0o700)
        (notes / image).touch()
        self._images.add(image)

    def _unnote(self, image: str) -> None:
        (self._place / "images" / image).unlink(missing_ok=True)
        self._images.discard(image)

    def pid(self, sandbox: str) -> int:
        return self._containers[sandbox].pid

    def images(self) -> list[str]:
        return list(self._images)

    # -- looking --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def tree(self, spec: Spec, name: str | None) -> AsyncIterator[Path]:
        running = self._containers.get(name) if name is not None else None
        source = self._tag(name) if name is not None else self._templates[spec.template].tag
        place = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="view-", dir=self._place))
        try:
            await self._engine.ask(
                lambda api: self._copy_out(api, spec, running.id if running else None, source, place)
            )
            yield place
        finally:
            await layers.remove(place)

    def _copy_out(self, api: Any, spec: Spec, container: str | None, image: str, place: Path) -> None:
        made = None
        if container is None:
            made = container = api.create_container(image, ["-"], labels=self._labels("view", "view"))["Id"]
        try:
            chunks, _ = api.get_archive(container, spec.workdir)
            folder.unpack(chunks, place, spec.limits.disk)
            for _ in chunks:  # what is behind the tar's end; a connection that is read to its end is used again
                pass
        finally:
            if made is not None:
                api.remove_container(made, force=True, v=True)

    # -- beginning and end ----------------------------------------------------------------------------------------

    async def recover(self) -> None:
        if not self._place.exists():
            return
        for view in self._place.glob("view-*"):
            await layers.remove(view)
        notes = self._place / "images"
        self._images = {note.name for note in notes.iterdir()} if notes.exists() else set()
        self._swept = False
        with contextlib.suppress(SandboxError):  # no engine now: then before anything is made
            await self._sweep_once()

    async def _sweep_once(self) -> None:
        """Takes away what the keeper before this one had running."""
        async with self._unswept:
            if not self._swept:
                there = await self._engine.ask(self._recover)
                for image in self._images - there:
                    self._unnote(image)
                for image in there - self._images:  # which it had just made
                    self._note(image)
                self._swept = True

    def _recover(self, api: Any) -> set[str]:
        """The images that are there."""
        self._sweep(api, "sandbox", "template", "trial", "view")
        there = set()
        for told in api.images(filters={"label": [f"{_KEEPER}={self._keeper}", f"{_WHAT}=image"]}):
            if any(tag == self._tag(told["Labels"][_NAME]) for tag in told.get("RepoTags") or ()):
                there.add(told["Labels"][_NAME])
            else:
                self._remove_nameless(api, told["Id"])
        return there

    def _sweep(self, api: Any, *kinds: str) -> None:
        """Containers and images of these kinds that are this keeper's."""
        for what in kinds:
            filters = {"label": [f"{_KEEPER}={self._keeper}", f"{_WHAT}={what}"]}
            for told in api.containers(all=True, filters=filters):
                self._remove_container(api, told["Id"])
            for told in api.images(filters=filters):
                tags = [tag for tag in told.get("RepoTags") or () if tag != "<none>:<none>"]
                for name in tags or [told["Id"]]:
                    is_absent(lambda: api.remove_image(name, force=True))  # noqa: B023 - done at once

    async def aclose(self) -> None:
        for name in list(self._containers):
            await self.remove(name)
        if self._clearing is not None:
            self._clearing.cancel()
            await asyncio.wait({self._clearing})
        if self._place.exists():
            with contextlib.suppress(SandboxError):
                await self._engine.ask(lambda api: self._sweep(api, "sandbox", "template", "trial", "view"))
        self._engine.close()


def _here_or_pulled(api: Any, image: str) -> Any:
    """What the engine says of an image. Raises `SandboxError` (`start_failed`)."""
    from docker.errors import APIError, ImageNotFound

    last, colon, tag = image.rpartition(":")
    named = (
        (last, tag) if colon and "/" not in tag and "@" not in image else (image, None if "@" in image else "latest")
    )
    try:
        with contextlib.suppress(ImageNotFound):
            return api.inspect_image(image)
        for line in api.pull(named[0], tag=named[1], stream=True, decode=True):
            if "error" in line:
                raise _no_image(image, line["error"])
        return api.inspect_image(image)
    except APIError as error:
        raise _no_image(image, error.explanation or error) from error


def _no_image(image: str, why: object) -> SandboxError:
    return SandboxError(
        "start_failed",
        f"Image {image} is not on the Docker engine and could not be pulled: {why}",
        hint="See that its name is right; build or load it where the engine runs.",
    )


def _started(api: Any, container: str) -> Any:
    api.start(container)
    return api.inspect_container(container)


def _ended(api: Any, container: str) -> dict[str, Any]:
    """Its state once it has ended: the stream closes a moment before."""
    with contextlib.suppress(Exception):
        api.wait(container, timeout=10)
    state: dict[str, Any] = api.inspect_container(container)["State"]
    return state

"""What a runtime does. The keeper calls it; it owns no client, no socket and no other runtime's things."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandboxes.types import Exited, Frozen, Pipes, Report, Spec

Died = Callable[[Exited], None]
"""Told once of each sandbox that ends without `remove`."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a runtime keeps what it makes. A name's folder is made and removed by the runtime alone."""

    state: Path

    def template(self, name: str) -> Path:
        return self.state / "templates" / name

    def sandbox(self, name: str) -> Path:
        return self.state / "sandboxes" / name

    def image(self, name: str) -> Path:
        return self.state / "images" / name


class Runtime(Protocol):
    """One way to run, freeze and start again. Calls for one sandbox or image never overlap: the keeper sees to that.

    Every method raises `SandboxError`. What is half made when one raises, or is cancelled, is taken away first.
    """

    async def report(self) -> Report:
        """Tries itself out, once; later calls give the same answer."""
        ...

    async def prepare(self, spec: Spec) -> None:
        """Makes what all sandboxes of the spec share. Nothing where it is there."""
        ...

    async def start(self, spec: Spec, sandbox: str, origin: str | None) -> Pipes:
        """A new sandbox: from the spec, or as the image `origin` stands. The pipes are the caller's."""
        ...

    async def freeze(self, sandbox: str, image: str) -> Frozen:
        """The sandbox as it stands becomes an image, and goes on. Raises `busy`, `not_forkable`."""
        ...

    async def remove(self, sandbox: str) -> None:
        """Ends a sandbox: processes, mounts, folders, cgroups. Nothing where it isn't there."""
        ...

    async def drop(self, image: str) -> None:
        """Removes an image. Sandboxes that were started from it go on. Nothing where it isn't there."""
        ...

    def pid(self, sandbox: str) -> int:
        """Of its first process, as the host sees it."""
        ...

    def images(self) -> list[str]:
        """Those that can be started from."""
        ...

    def tree(self, spec: Spec, name: str | None) -> AbstractAsyncContextManager[Path]:
        """A folder to read that shows the working folder of a sandbox, of an image, or (None) what it starts with."""
        ...

    async def recover(self) -> None:
        """At the keeper's start: ends and removes what a killed keeper left running, keeps images that are whole.
        Afterwards no sandbox is there."""
        ...

    async def aclose(self) -> None:
        """Ends every sandbox; images on disk stay."""
        ...

"""Images and layers on disk.

    templates/T/     base/{work,tmp}: what a sandbox starts with; layers/L/{work,tmp}; root/, packages/, template.json
    images/I/        criu/: memory; manifest.json, which is written last of all: an image without it isn't there
    sandboxes/S/     upper/, scratch/, merged/: overlayfs; bundle/: runc's and CRIU's files

Only root may enter any of it. A layer is an image's first, and stays as long as something lies on it.
"""

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from sandboxes import layers
from sandboxes.runtime import Folders

BASE = "base"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Of an image. `stack`: layers below `templates/T`, newest first."""

    image: str
    template: str
    stack: tuple[str, ...]
    bytes: int
    digest: str


class Shelf:
    """The images of a keeper."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._found: dict[str, Manifest] = {}

    def __getitem__(self, image: str) -> Manifest:
        return self._found[image]

    def names(self) -> list[str]:
        return list(self._found)

    def memory(self, image: str) -> Path:
        return self._folders.image(image) / "criu"

    def begin(self, image: str) -> Path:
        """An empty folder for the memory."""
        place = self.memory(image)
        place.mkdir(parents=True, mode=0o700)
        os.chmod(place.parent, 0o700)
        return place

    def publish(self, manifest: Manifest) -> None:
        """From now on it is there, whatever happens."""
        folder = self._folders.image(manifest.image)
        for path in (folder / "criu").iterdir():
            path.chmod(0o600)
        part = folder / "manifest.part"
        part.write_bytes(msgspec.json.encode(manifest))
        part.chmod(0o600)
        # Memory and layer, then the word that they are whole: a host may crash too.
        layer = self._folders.template(manifest.template) / "layers" / manifest.image
        _keep(folder)
        _keep(layer)
        part.rename(folder / "manifest.json")
        _sync(folder)
        self._found[manifest.image] = manifest

    async def drop(self, image: str, used: set[tuple[str, str]]) -> None:
        """`used`: (template, layer) that sandboxes lie on. Whole or absent at every moment."""
        manifest = self._found.pop(image, None)
        folder = self._folders.image(image)
        with contextlib.suppress(FileNotFoundError):
            (folder / "manifest.json").unlink()
        await layers.remove(folder)
        if manifest is not None:
            await self.sweep(manifest.template, used)

    async def sweep(self, template: str, used: set[tuple[str, str]]) -> None:
        """Removes layers that nothing lies on."""
        used = used | {(one.template, layer) for one in self._found.values() for layer in one.stack}
        folder = self._folders.template(template) / "layers"
        for layer in list(folder.iterdir()) if folder.is_dir() else ():
            if (template, f"layers/{layer.name}") not in used:
                await layers.remove(layer)

    async def recover(self) -> None:
        """Keeps what is whole, removes everything else."""
        images, templates = self._folders.image("x").parent, self._folders.template("x").parent
        for folder in list(images.iterdir()):
            try:
                manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
            except (OSError, msgspec.DecodeError):
                manifest = None
            if manifest is not None and all(
                (self._folders.template(manifest.template) / layer).is_dir() for layer in manifest.stack
            ):
                self._found[folder.name] = manifest
            else:
                await layers.remove(folder)
        kept = {manifest.template for manifest in self._found.values()}
        for folder in list(templates.iterdir()):
            if folder.name in kept:
                await self.sweep(folder.name, set())
            else:
                await layers.remove(folder)


def _keep(tree: Path) -> None:
    """Writes a folder to disk, with everything in it. Nothing where it isn't there."""
    for folder, _, names in os.walk(tree):
        for name in names:
            if stat.S_ISREG(os.lstat(os.path.join(folder, name)).st_mode):
                _sync(os.path.join(folder, name))
        _sync(folder)


def _sync(path: Path | str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

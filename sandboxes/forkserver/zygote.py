"""Making a zygote: a template's folder, its room, and the warm server in it.

The folder has `base` (what working folder and /tmp start with), `images` (frozen layers), `run` (a folder per sandbox)
and `code` (copies of code that only its owner may read).
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes import layers
from sandboxes.forkserver.control import Control
from sandboxes.tail import Tail
from sandboxes.types import SandboxError, Spec

BASE = "base"
_START_S = 60.0
_LAUNCH = str(Path(layers.__file__).parent / "confine" / "launch.py")
_SHOWN = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/opt", "/sbin", "/usr")
_PACKAGES = str(Path(layers.__file__).parent.parent)
# One thread, one arena, nothing held back: what a fork needs, and what keeps its pages shared.
_ENVIRON = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(eq=False)
class Zygote:
    """A warm server. `uid` is its user outside, None where there are none to give away."""

    spec: Spec
    folder: Path
    uid: int | None
    process: asyncio.subprocess.Process
    control: Control
    printed: Tail
    layers: set[str] = field(default_factory=set)
    """Frozen ones that are on disk, below the folder."""
    digests: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Of stacks of frozen layers."""
    starting: int = 0
    """Sandboxes that are being made."""
    used: float = field(default_factory=time.monotonic)
    """When somebody last had something in its room, or was about to."""

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def end(self) -> None:
        """With all that lives in its room, and its folder."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        self.control.close()
        self.printed.close()
        await layers.remove(self.folder)


async def warm(spec: Spec, folder: Path, uid: int | None) -> Zygote:
    """Raises `SandboxError`; then the folder may be there, and nothing runs."""
    base = folder / BASE
    base.mkdir(parents=True)
    if spec.files is not None:
        await layers.copy(Path(spec.files), base / "work")
    else:
        (base / "work").mkdir()
    for path in ("/tmp", spec.workdir, *_interpreter(spec)):
        if Path(path).is_relative_to("/tmp"):  # to be mounted on: each sandbox has a /tmp of its own
            (base / path[1:]).mkdir(parents=True, exist_ok=True)
    for name in ("run", "images"):
        (folder / name).mkdir(mode=0o700)
    code = [await _readable(Path(path), folder / "code" / str(n), uid) for n, path in enumerate(spec.pythonpath)]
    if uid is not None:
        await asyncio.to_thread(_give, folder, uid)
    control, theirs = Control.pair()
    plan, printed = _plan(spec, folder, uid, code), Tail()
    process = await _spawn(plan, theirs.fileno(), printed.output)
    theirs.close()
    printed.started()
    try:
        await control.ready(_START_S)
    except BaseException as error:
        control.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        tail = printed.text()
        printed.close()
        if not isinstance(error, SandboxError):
            raise
        raise SandboxError(error.code, f"{spec.entry}: {error.message}", hint=error.hint, tail=tail) from error
    return Zygote(spec, folder, uid, process, control, printed)


def _plan(spec: Spec, folder: Path, uid: int | None, code: list[str]) -> dict[str, object]:
    """See `confine/launch.py`."""
    assert spec.entry is not None
    readable = _interpreter(spec)
    if hidden := [path for path in readable if Path(path).is_relative_to(spec.workdir)]:
        raise SandboxError(
            "invalid_spec",
            f"The working folder {spec.workdir} would hide {hidden[0]}, which the server needs.",
            hint="Choose another workdir.",
        )
    python, program = spec.python or sys.executable, ["-m", "sandboxes.forkserver.driver"]
    return {
        "show": [*_SHOWN, *readable, *(path for path in code if not path.startswith("/.layers/"))],
        "layers": str(folder),
        "folders": ["/.room", "/tmp", spec.workdir],
        "uid": uid,
        "hostname": "sandbox",
        "network": spec.network,
        "command": [python, *program, spec.entry, spec.argument, *readable, *code],
        "environ": {
            **_ENVIRON,
            "HOME": spec.workdir,
            **spec.environ,
            "PYTHONPATH": os.pathsep.join([*code, _PACKAGES]),
        },
    }


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


async def _readable(source: Path, copy: Path, uid: int | None) -> str:
    """Where the server sees a folder of code: where it is, or a copy if only its owner may read it."""
    if uid is None or await asyncio.to_thread(layers.open_to_all, source):
        return str(source)
    copy.parent.mkdir(exist_ok=True)
    await layers.copy(source, copy)
    return f"/.layers/code/{copy.name}"


def _give(folder: Path, uid: int) -> None:
    for path, folders, names in os.walk(folder):
        for name in (*folders, *names):
            os.chown(os.path.join(path, name), uid, uid, follow_symlinks=False)
    os.chown(folder, uid, uid)

"""`runc` as a program: start, dump, restore and end containers.

Containers are named by the caller and kept in a folder of their own, so nobody else's are seen. Standard streams are
the caller's descriptors. What goes wrong is read from the logs of runc and CRIU, never from a container's own output.
"""

import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path

from sandboxes import layers
from sandboxes.confine import kernel
from sandboxes.types import SandboxError

_TAIL = 1500
_TIMEOUT_S = 120.0
_BECOMING_S = 10.0
_CRIU = ("--file-locks", "--tcp-established")
"""What CRIU refuses to write unless it is told to."""
_CAP_SYS_RESOURCE = 24


# CRIU finds out what the kernel can each time (0.1 s) unless it may keep that in a /run which is in memory.
_WITH_RUN = ("unshare", "--mount", "--propagation", "slave", "sh", "-c", 'mount --bind "$0" /run && exec "$@"')


class Runc:
    """Containers whose state lies in `folder`, which is its alone."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "containers"
        self._run = folder / "run"

    async def open(self) -> None:
        """Before everything else. Nothing where programs are missing."""
        self._run.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.missing():
            return
        if not self._run.is_mount():
            kernel.mount("tmpfs", self._run, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=700,size=1m")
        process = await asyncio.create_subprocess_exec(
            *_WITH_RUN, str(self._run), "criu", "check", stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await process.wait()

    def close(self) -> None:
        """After everything else."""
        layers.unmount(self._run)

    def _around(self, uid: int | None) -> tuple[str, ...]:
        """What CRIU runs in. Without CAP_SYS_RESOURCE only a process of the same real user may ask for its limits."""
        same_user = uid is not None and not _CAN_ASK
        real = ("setpriv", f"--ruid={uid}", f"--rgid={uid}", "--keep-groups") if same_user else ()
        return (*_WITH_RUN, str(self._run), *real)

    def missing(self) -> list[str]:
        """Programs that aren't there."""
        return [name for name in ("runc", "criu", "unshare", "setpriv") if shutil.which(name) is None]

    def containers(self) -> list[str]:
        """All that runc has a record of."""
        return [path.name for path in self._root.iterdir()] if self._root.is_dir() else []

    async def run(self, name: str, bundle: Path, streams: tuple[int, int, int]) -> int:
        """A new container's first process; this returns as soon as it runs. Raises `start_failed`."""
        return await self._started(name, bundle, streams, "run")

    async def restore(self, name: str, bundle: Path, streams: tuple[int, int, int], image: Path) -> int:
        """Like `run`, as an image stands. Raises `start_failed`."""
        where = ("--image-path", str(image), "--work-path", str(bundle))
        return await self._started(name, bundle, streams, "restore", *where, *_CRIU)

    async def checkpoint(self, name: str, image: Path, work: Path, uid: int) -> None:
        """Writes a container's processes to `image`; they stay. Raises `not_forkable`."""
        work.mkdir(parents=True, exist_ok=True)
        words = ("checkpoint", "--leave-running", "--image-path", str(image), "--work-path", str(work), *_CRIU)
        if reason := await self._ran(work / "runc.log", *words, name, around=self._around(uid)):
            reason = _from_log(work / "dump.log") or reason
            if "No space left" in reason or "Disk quota" in reason:
                raise SandboxError("disk_full", f"No room for its memory: {reason}", hint="Make room, or drop images.")
            raise SandboxError(
                "not_forkable",
                f"Its processes can't be written to disk: {reason}",
                hint="CRIU can't freeze everything a process may hold. Docker keeps the files and starts it anew.",
            )

    async def delete(self, name: str) -> None:
        """Ends a container and forgets it. Nothing where it isn't there."""
        if (self._root / name).exists():
            await self._ran(None, "delete", "--force", name)

    async def _started(self, name: str, bundle: Path, streams: tuple[int, int, int], *words: str) -> int:
        pid_file, log = bundle / "pid", bundle / "runc.log"
        all_words = (*words, "--detach", "--bundle", str(bundle), "--pid-file", str(pid_file), name)
        try:
            around = self._around(None) if words[0] == "restore" else ()
            reason = await self._ran(log, *all_words, streams=streams, around=around)
        except BaseException:
            await self.delete(name)
            raise
        if reason:
            await self.delete(name)
            raise SandboxError("start_failed", _from_log(bundle / "restore.log") or reason)
        pid = int(pid_file.read_text())
        await _became(pid)
        return pid

    async def _ran(
        self, log: Path | None, *words: str, streams: tuple[int, int, int] | None = None, around: tuple[str, ...] = ()
    ) -> str:
        """Why it failed; nothing if it did not."""
        stdin, stdout, stderr = streams or (asyncio.subprocess.DEVNULL,) * 3
        logging = ("--log", str(log), "--log-format", "json") if log else ()
        process = await asyncio.create_subprocess_exec(
            *around, "runc", "--root", str(self._root), *logging, *words, stdin=stdin, stdout=stdout, stderr=stderr,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )  # fmt: skip
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status = await process.wait()
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                return f"runc {words[0]} took longer than {_TIMEOUT_S:.0f} s"
            raise
        if status == 0:
            return ""
        return (log and _last_error(log)) or f"runc {words[0]} ended with status {status}"


def _capable(number: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
    return True


_CAN_ASK = _capable(_CAP_SYS_RESOURCE)


async def _became(pid: int) -> None:
    """Returns when a container's first process is the program itself: runc ends a moment before, and what it runs until
    then can't be dumped. Nothing tells of it but the process's name."""
    give_up = asyncio.get_running_loop().time() + _BECOMING_S
    with contextlib.suppress(OSError):  # it has ended already
        while Path(f"/proc/{pid}/comm").read_text().startswith("runc:["):
            if asyncio.get_running_loop().time() > give_up:
                return
            await asyncio.sleep(0.001)


def _last_error(log: Path) -> str:
    with contextlib.suppress(OSError):
        for line in reversed(log.read_text(errors="replace").splitlines()):
            with contextlib.suppress(ValueError, TypeError):
                told = json.loads(line)
                if told["level"] == "error":
                    return str(told["msg"])[-_TAIL:]
    return ""


def _from_log(log: Path) -> str:
    """What CRIU says was wrong."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    wrong = [line.split(": ", 1)[-1] for line in lines if "Error (" in line]
    return "; ".join(wrong[:4])[:_TAIL]


async def ended(pid: int) -> int | None:
    """When a container's first process has ended: its exit status, negative for a signal.

    It is a child of this process, since runc has ended; None where it is another's.
    """
    loop = asyncio.get_running_loop()
    process = os.pidfd_open(pid)
    over = asyncio.Event()
    loop.add_reader(process, over.set)
    try:
        await over.wait()
        return _reaped(process)
    finally:
        loop.remove_reader(process)
        os.close(process)


def _reaped(process: int) -> int | None:
    with contextlib.suppress(ChildProcessError):
        told = os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG)
        if told is not None:
            return told.si_status if told.si_code == os.CLD_EXITED else -told.si_status
    return None

"""What works on this machine, found out by trying it: PostgreSQL, shared blocks, the runtimes of sandboxes, traces.

Changes nothing: what is made for a trial is in folders of its own beside the real ones, and goes with it. Where a
gateway runs already, its keeper may be another user's and know better: name it in MEGAMCP_SANDBOX_SOCKET.
"""

import asyncio
import errno
import fcntl
import importlib.metadata
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from megamcp.errors import MegaMCPError
from megamcp.postgres import check_server, layout
from megamcp.sandboxed.own import OwnKeeper
from megamcp.settings import Settings
from sandboxes.client import Client
from sandboxes.types import Kind, Report, SandboxError

_FICLONE = 0x40049409
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried. `needed`: without it there is no gateway."""

    name: str
    works: bool
    told: str
    """What there is; or why it doesn't work."""
    hint: str | None = None
    needed: bool = False


async def examine(settings: Settings) -> list[Finding]:
    """Everything, in the order of its importance."""
    found = [await _postgres(settings), *[await _cluster(url.get_secret_value()) for url in settings.state_urls]]
    found.append(_reflink("shared blocks of databases", settings.state_dir or settings.data_dir / "state"))
    found.append(_reflink("shared blocks of sandboxes", settings.sandbox_dir or settings.data_dir / "sandboxes"))
    return [*found, *await _runtimes(settings), _traces()]


async def _postgres(settings: Settings) -> Finding:
    name = "PostgreSQL"
    try:
        if settings.database_url is not None:
            version = await check_server(settings.database_url.get_secret_value())
            return Finding(name, True, f"version {version}, at MEGAMCP_DATABASE_URL", needed=True)
        program = layout.binaries() / "postgres"
        process = await asyncio.create_subprocess_exec(
            str(program), "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        told, _ = await process.communicate()
        words = told.decode(errors="replace").strip()
        if process.returncode:
            return Finding(name, False, f"the embedded one doesn't start: {words}", needed=True)
        return Finding(name, True, f"embedded, {words.rpartition(' ')[2]}, in {settings.data_dir}", needed=True)
    except MegaMCPError as error:
        return Finding(name, False, error.message, error.hint, needed=True)
    except OSError as error:
        return Finding(name, False, f"the embedded one can't be run: {error}", needed=True)


async def _cluster(dsn: str) -> Finding:
    name = "state cluster"
    try:
        return Finding(name, True, f"version {await check_server(dsn)}, as MEGAMCP_STATE_URLS says", needed=True)
    except MegaMCPError as error:
        return Finding(name, False, error.message, error.hint, needed=True)


def _reflink(name: str, folder: Path) -> Finding:
    """Whether copies on a folder's file system cost nothing until they are changed."""
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place) as source, tempfile.TemporaryFile(dir=place) as copy:
            source.write(b"x" * (64 << 10))
            source.flush()
            fcntl.ioctl(copy.fileno(), _FICLONE, source.fileno())
    except OSError as error:
        unable = error.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS)
        reason = "its file system can't share blocks" if unable else str(error)
        return Finding(
            name,
            False,
            f"{place}: {reason}; copies take their full size",
            "Put it on XFS with reflink or on btrfs (MEGAMCP_STATE_DIR, MEGAMCP_SANDBOX_DIR).",
        )
    return Finding(name, True, f"{place} shares blocks between copies")


def _traces() -> Finding:
    """Whether spans can go anywhere: the gateway brings OpenTelemetry's interface and no more."""
    try:
        sdk = importlib.metadata.version("opentelemetry-sdk")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "traces",
            False,
            "OpenTelemetry's SDK is not installed; no spans are made",
            "See docs/operate.md, if you want them.",
        )
    return Finding("traces", True, f"OpenTelemetry's SDK {sdk}, when the gateway is started under it")


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


async def _runtimes(settings: Settings) -> list[Finding]:
    try:
        async with _keeper(settings) as socket:
            client = Client(socket)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    reports = {report.kind: report for report in await client.reports()}
            finally:
                await client.aclose()
    except (MegaMCPError, SandboxError) as error:
        return [Finding("sandboxes", False, error.message, error.hint or None)]
    except TimeoutError:
        return [Finding("sandboxes", False, f"the keeper did not answer in {_ANSWER_S:g} s")]
    return [_runtime(kind, reports.get(kind)) for kind in Kind]


def _runtime(kind: Kind, report: Report | None) -> Finding:
    name = f"sandboxes: {kind}"
    if report is None:
        return Finding(name, False, "not in this version")
    if not report.works:
        return Finding(name, False, report.reason)
    return Finding(
        name, True, ", ".join(report.features or ("works",)) + (f"; {report.reason}" if report.reason else "")
    )


@asynccontextmanager
async def _keeper(settings: Settings) -> AsyncIterator[str]:
    """The socket of the keeper that the settings name, or of one for this trial, on the same file system."""
    if settings.sandbox_socket is not None:
        yield str(settings.sandbox_socket)
        return
    place: Path | None = _existing(settings.sandbox_dir or settings.data_dir / "sandboxes")
    if not os.access(str(place), os.W_OK | os.X_OK):
        place = None
    with tempfile.TemporaryDirectory(prefix="megamcp-doctor-", dir=place) as folder:
        async with OwnKeeper(settings.model_copy(update={"sandbox_dir": Path(folder) / "s"})) as keeper:
            yield keeper.socket

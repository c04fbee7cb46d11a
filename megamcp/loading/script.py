"""A file of an environment: what it is, its hash, and its bytes as a stream of SQL.

Plain text is read as it is and `.gz` is unpacked on the way; pg_dump's other formats (custom, directory, tar) are
turned into text by pg_restore, as they are read. A file that changes between its hash and the end of its reading is an
error: a version is what its hash says.
"""

import asyncio
import hashlib
import os
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megamcp.errors import Unprocessable
from megamcp.postgres.layout import binaries

CHUNK = 1 << 20
_LONGEST_COMPLAINT = 2_000

Count = Callable[[int], None]


class Format(StrEnum):
    """How the SQL lies in the file."""

    TEXT = "text"
    GZIP = "gzip"
    ARCHIVE = "archive"
    """One of pg_dump's own formats, which pg_restore reads."""


@dataclass(frozen=True, slots=True)
class Script:
    """SQL from a file, or from a text in memory (then `path` is None)."""

    name: str
    """As the environment names it; told in errors."""
    digest: str
    """SHA-256 of the bytes, in hex."""
    size: int
    """Bytes on disk."""
    path: Path | None = None
    text: str = ""
    dump: bool = False
    """Made by pg_dump: owners, grants and settings are left out, COPY is expected."""
    schema: str = ""
    """The PostgreSQL schema that a dump's names may carry, where only one is taken."""
    stamp: tuple[tuple[int, int], ...] = ()

    @property
    def content(self) -> str:
        """What this adds to the name of a version."""
        return f"{self.digest} {self.schema} {self.dump}"

    @asynccontextmanager
    async def stream(self, count: Count = lambda _: None) -> AsyncIterator[AsyncIterator[bytes]]:
        """The SQL in chunks; `count` is told the bytes of the file that each chunk took (0 where that isn't known).

        Raises `Unprocessable` (`invalid_environment`) for a file that isn't what it seems, or has changed.
        """
        if self.path is None:
            async with aclosing(_once(self.text.encode(), count)) as chunks:
                yield chunks
            return
        match format_of(self.path):
            case Format.TEXT:
                async with aclosing(_file(self.path, count)) as chunks:
                    yield chunks
            case Format.GZIP:
                async with aclosing(_unzipped(self.path, self.name, count)) as chunks:
                    yield chunks
            case Format.ARCHIVE:
                async with _restored(self.path, self.name) as chunks:
                    yield chunks
        if stamp(self.path) != self.stamp:
            raise bad(self.name, "it changed while it was being loaded", "Load the environment again.")


def as_script(script: Script | str, name: str) -> Script:
    """A text as a script of that name; a script stays what it is."""
    if isinstance(script, Script):
        return script
    raw = script.encode()
    return Script(name, hashlib.sha256(raw).hexdigest(), len(raw), text=script)


def read(path: Path, name: str, *, dump: bool = False, schema: str = "") -> Script:
    """What a file (or a folder made by `pg_dump -Fd`) is. Reads all of it once. Raises OSError."""
    if path.is_dir() and not dump:
        raise OSError(f"{path} is not a regular file")
    before = stamp(path)
    if path.is_dir():
        whole = hashlib.sha256()
        for file in _files(path):
            whole.update(f"{file.name}\0{_digest(file)}\0".encode())
        digest = whole.hexdigest()
    else:
        digest = _digest(path)
    size = sum(size for size, _ in before)
    return Script(name, digest, size, path, dump=dump, schema=schema, stamp=before)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def format_of(path: Path) -> Format:
    """By the first bytes. Raises OSError."""
    if path.is_dir():
        return Format.ARCHIVE
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(b"\x1f\x8b"):
        return Format.GZIP
    return Format.ARCHIVE if head.startswith(b"PGDMP") or head[257:262] == b"ustar" else Format.TEXT


def stamp(path: Path) -> tuple[tuple[int, int], ...]:
    """Size and time of change of every file: tells that something was written meanwhile. Raises OSError."""
    return tuple((status.st_size, status.st_mtime_ns) for status in (file.stat() for file in _files(path)))


def bad(name: str, problem: str, hint: str | None = None) -> Unprocessable:
    """The error for a file that can't be read as SQL."""
    return Unprocessable(
        f"{name}: {problem}",
        code="invalid_environment",
        hint=hint or "See docs/environments.md for what a dump may be.",
    )


def _files(path: Path) -> list[Path]:
    """The file, or those of a folder in a fixed order. Raises OSError for what is neither: a pipe would never end."""
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.is_file())
        if not (path / "toc.dat").exists():
            raise OSError(f"{path} is a folder without toc.dat: pg_dump -Fd didn't make it")
        return found
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    return [path]


async def _once(raw: bytes, count: Count) -> AsyncGenerator[bytes]:
    count(len(raw))
    yield raw


async def _file(path: Path, count: Count) -> AsyncGenerator[bytes]:
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK):
            count(len(chunk))
            yield chunk


async def _unzipped(path: Path, name: str, count: Count) -> AsyncGenerator[bytes]:
    unpacked = _unzip(path, count)
    try:
        while (chunk := await asyncio.to_thread(next, unpacked, None)) is not None:
            if chunk.startswith(b"PGDMP"):
                raise bad(name, "this is a custom-format dump within gzip", "Unpack it: pg_dump -Fc packs by itself.")
            yield chunk
    except (zlib.error, EOFError) as error:
        raise bad(name, f"the gzip file is broken: {error}") from error
    finally:
        unpacked.close()


def _unzip(path: Path, count: Count) -> Generator[bytes, None, None]:
    """In pieces of at most CHUNK, whatever a packed one grows to."""
    inflate = zlib.decompressobj(wbits=31)
    with path.open("rb") as file:
        while raw := file.read(CHUNK // 4):
            count(len(raw))
            while raw:
                if inflate.eof:  # gzip files may follow each other in one
                    inflate = zlib.decompressobj(wbits=31)
                if chunk := inflate.decompress(raw, CHUNK):
                    yield chunk
                raw = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
    if not inflate.eof:
        raise EOFError("it ends too early")


@asynccontextmanager
async def _restored(path: Path, name: str) -> AsyncIterator[AsyncIterator[bytes]]:
    """Text of an archive, from pg_restore."""
    program = await asyncio.create_subprocess_exec(
        binaries() / "pg_restore",
        *("--no-owner", "--no-privileges", "--no-publications", "--no-subscriptions", "--no-security-labels"),
        *("--no-tablespaces", "--no-table-access-method", "--file=-"),
        path,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
    )
    try:
        async with aclosing(_output(program, name)) as chunks:
            yield chunks
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()


async def _output(program: asyncio.subprocess.Process, name: str) -> AsyncGenerator[bytes]:
    assert program.stdout is not None
    assert program.stderr is not None
    complaints = asyncio.create_task(program.stderr.read())
    try:
        while chunk := await program.stdout.read(CHUNK):
            yield chunk
        if await program.wait() != 0:  # said before the reader stumbles over a text that ends too early
            told = " ".join((await complaints).decode(errors="replace").split()).replace("pg_restore: error: ", "")
            raise bad(name, f"pg_restore can't read this dump: {told[:_LONGEST_COMPLAINT]}")
    finally:
        complaints.cancel()

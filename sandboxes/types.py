"""The words of this package, as they also go over the wire: what a sandbox is made from, what is known of it, what can
go wrong.

Errors are one class with a `code`, since they cross a socket:

    not_available   a runtime can't work here; the message says why
    invalid_spec    a spec that can't be right on any machine
    start_failed    the program could not be started, or ended at once; `tail` has what it printed
    not_forkable    the program is in no state in which a fork could freeze it: threads, sockets, a running loop
    busy            it can't be frozen now: something is under way in its pipes
    gone            there is no such sandbox or image (any more)
    disk_full       no room for a layer or an image
    failed          a step that should have worked did not; the message has its last words
    keeper_lost     the keeper can't be reached
    engine_lost     the keeper can't reach the Docker engine
"""

import hashlib
import re
from enum import StrEnum

import msgspec

IDENTIFIER = re.compile(r"[a-z0-9_-]{1,60}")


class Kind(StrEnum):
    """How a sandbox's memory is frozen."""

    FORK = "fork"
    """A fork of a Python process that waits between calls. Its images die with the keeper."""
    CRIU = "criu"
    """A dump of any process to disk."""
    DOCKER = "docker"
    """A container's files; memory only where the engine can."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may use. Bytes, processes, cores."""

    memory: int = 1 << 30
    pids: int = 256
    cpus: float = 1.0
    disk: int = 1 << 30


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox is made from. Equal specs share what was prepared for them.

    `command` is a stdio server's; `entry` (`package.module:attribute`) a Python one's for the fork server. `files` is a
    folder of the host with what the working folder starts with; `content` its hash, so that a spec names a content and
    not a place. `image` is a Docker image, or a folder that holds a root file system; without it, the host's own
    programs are seen, read-only. `command` is started in `cwd`: a folder of the sandbox's root, or, if it sees the
    host's programs, of the host (read-only); else in the working folder. `entry` is called with `argument`; `python`
    (an interpreter) and `pythonpath` are the fork server's.
    """

    kind: Kind
    command: tuple[str, ...] = ()
    entry: str | None = None
    argument: str = ""
    python: str | None = None
    pythonpath: tuple[str, ...] = ()
    image: str | None = None
    files: str | None = None
    content: str | None = None
    environ: dict[str, str] = {}
    workdir: str = "/workspace"
    cwd: str | None = None
    network: bool = False
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.entry):
            raise SandboxError("invalid_spec", "A spec has a command or an entry, one of them.")
        if (self.kind is Kind.FORK) != bool(self.entry):
            raise SandboxError("invalid_spec", "The fork server runs an entry; everything else runs a command.")
        if not self.workdir.startswith("/") or ".." in self.workdir.split("/"):
            raise SandboxError("invalid_spec", f"The working folder {self.workdir!r} is no absolute path.")
        if self.cwd is not None and not self.cwd.startswith("/"):
            raise SandboxError("invalid_spec", f"The folder {self.cwd!r}, to start in, is no absolute path.")
        if (self.files is None) != (self.content is None):
            raise SandboxError(
                "invalid_spec", "files and content come together: a folder and the hash of what is in it."
            )

    @property
    def template(self) -> str:
        """Names what is prepared once for all sandboxes of this spec: 20 hex digits."""
        # Where the files lie may change; what is in them counts.
        told = msgspec.to_builtins(self) | {"files": None}
        if self.cwd is None:  # names that images on disk have don't change
            del told["cwd"]
        return hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()[:20]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a runtime works on this host, by its own trial."""

    kind: Kind
    works: bool
    reason: str = ""
    """Why not, or what is missing for all of it."""
    features: tuple[str, ...] = ()


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """What an image holds. `memory` is False where only files could be kept; `bytes` is its size on disk; `digest` is
    of the files (see `files.digest`)."""

    image: str
    bytes: int
    memory: bool
    digest: str


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that runs. `held`: a client has its pipes."""

    sandbox: str
    template: str
    origin: str | None
    pid: int
    held: bool


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox ended without being asked to. `status` is the exit status, negative for a signal; `reason` says in
    words why: by itself, killed for memory, over its disk limit."""

    sandbox: str
    status: int | None
    reason: str


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """One path of a diff. `change` is `added`, `removed` or `changed`; `kind` (`file`, `folder`, `link`, `other`),
    `size` and `mode` are of the newer side, or of the older one where the path was removed. `text` is a unified diff
    where both sides are text of moderate size."""

    path: str
    change: str
    kind: str
    size: int | None = None
    mode: int | None = None
    text: str | None = None


class Pipes:
    """Three descriptors of a sandbox: its stdin (to write), stdout and stderr (to read). Whoever has them closes them.

    `clean` is False when their last holder was cut off: half a line may be in them.
    """

    __slots__ = ("clean", "stderr", "stdin", "stdout")

    def __init__(self, stdin: int, stdout: int, stderr: int, clean: bool = True) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.clean = clean

    @property
    def all(self) -> tuple[int, int, int]:
        return self.stdin, self.stdout, self.stderr


class SandboxError(Exception):
    """See the module's docstring for the codes. `tail`: the last lines that the program printed."""

    def __init__(self, code: str, message: str, *, hint: str = "", tail: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.tail = tail


def identifier(text: str) -> str:
    """`text`, if it can name a sandbox or an image: it becomes a part of paths. Raises `SandboxError`."""
    if not IDENTIFIER.fullmatch(text):
        raise SandboxError("invalid_spec", f"{text[:80]!r} is no identifier: 1-60 of a-z, 0-9, _ and -.")
    return text

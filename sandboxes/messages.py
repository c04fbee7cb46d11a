"""What client and keeper say to each other.

Requests carry a number and answers carry it back; what the keeper says by itself has number 0.
"""

import msgspec

from sandboxes.types import Exited, Info, SandboxError, Spec


class _Request(msgspec.Struct, tag_field="op", kw_only=True):
    number: int = 0


class Hello(_Request, tag="hello"):
    """→ str, the keeper's name: it stays the same over restarts on one state folder."""


class Reports(_Request, tag="reports"):
    """→ list[Report]"""


class Prepare(_Request, tag="prepare", kw_only=True):
    """→ nothing"""

    spec: Spec


class Start(_Request, tag="start", kw_only=True):
    """→ Handed"""

    spec: Spec
    sandbox: str
    origin: str | None = None


class Attach(_Request, tag="attach", kw_only=True):
    """→ Handed. Whoever holds the pipes is asked to let go first, and gets so many seconds for it."""

    sandbox: str
    patience_s: float


class Detach(_Request, tag="detach", kw_only=True):
    """→ nothing. The holder has closed its pipes; `clean`: with nothing under way in them."""

    sandbox: str
    clean: bool = True


class Freeze(_Request, tag="freeze", kw_only=True):
    """→ Frozen"""

    sandbox: str
    image: str


class Remove(_Request, tag="remove", kw_only=True):
    """→ nothing"""

    sandbox: str


class Drop(_Request, tag="drop", kw_only=True):
    """→ nothing"""

    image: str


class Listing(_Request, tag="list"):
    """→ Inventory"""


class Diff(_Request, tag="diff", kw_only=True):
    """→ list[FileChange]. A side is a sandbox, an image, or None: what the working folder starts with."""

    spec: Spec
    older: str | None
    newer: str | None
    most: int


class Digest(_Request, tag="digest", kw_only=True):
    """→ str"""

    spec: Spec
    name: str | None


AnyRequest = Hello | Reports | Prepare | Start | Attach | Detach | Freeze | Remove | Drop | Listing | Diff | Digest


class Handed(msgspec.Struct, kw_only=True):
    """Stdin, stdout and stderr are beside it."""

    clean: bool


class Inventory(msgspec.Struct, kw_only=True):
    """All that is there."""

    sandboxes: list[Info]
    images: list[str]


class Failure(msgspec.Struct, kw_only=True):
    """A `SandboxError` on its way."""

    code: str
    message: str
    hint: str = ""
    tail: str = ""

    @classmethod
    def of(cls, error: SandboxError) -> "Failure":
        return cls(code=error.code, message=error.message, hint=error.hint, tail=error.tail)

    def error(self) -> SandboxError:
        return SandboxError(self.code, self.message, hint=self.hint, tail=self.tail)


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """To the request of that number; or unasked: a sandbox has `exited`, or another client wants the pipes of the one
    that is `wanted`."""

    number: int = 0
    result: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
    exited: Exited | None = None
    wanted: str | None = None

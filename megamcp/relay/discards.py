"""DISCARD ALL among what a client sends. It gives back every lock of its session, the one that keeps moves out too.

So it travels alone: what was sent before is answered first, and what comes after waits until it is answered and the
session has entered again. A backend that is ended in between has done nothing that matters, since a session without
anything of its own is what the next backend begins with: the relay gives the rest of the answer itself.

PostgreSQL runs it only as the single command of a query, never from a function or a block. A text that is too long to
be read may be one; that it is one is said only of those that were read.
"""

import re
from typing import Final

from megamcp.relay import messages
from megamcp.relay.messages import Client, Server

_COMMENT: Final = re.compile(rb"--[^\r\n]*|/\*")
_NESTED: Final = re.compile(rb"/\*|\*/")
ANSWER: Final = messages.message(Server.COMMAND_COMPLETE, messages.zero_ended("DISCARD ALL"))


def is_discard(text: bytes) -> bool:
    """Whether the text of a query is DISCARD ALL, whatever comments and semicolons are around it."""
    lower = text.lower()
    if b"discard" not in lower:
        return False
    return _without_comments(lower).strip(b"; \t\n\v\f\r\0").split() == [b"discard", b"all"]


def _without_comments(text: bytes) -> bytes:
    parts, position = list[bytes](), 0
    while begin := _COMMENT.search(text, position):
        parts.append(text[position : begin.start()])
        position, depth = begin.end(), int(begin[0] == b"/*")
        while depth and (mark := _NESTED.search(text, position)):
            position, depth = mark.end(), depth + (1 if mark[0] == b"/*" else -1)
        if depth:
            return b""  # its end is missing: not a query
    return b" ".join([*parts, text[position:]])


def is_fatal(error: bytes) -> bool:
    """Whether an ErrorResponse says that the backend ends. Its beginning is enough."""
    return b"\0VFATAL\0" in error[:55] or b"\0VPANIC\0" in error[:55]


class Discards:
    """Which of a client's messages may be a DISCARD ALL, and whether one is under way."""

    def __init__(self) -> None:
        self._statements: set[bytes] = set()
        self._portals: set[bytes] = set()
        self._unread = False  # a statement or a portal could not be read
        self.under_way: int | None = None  # the message that was sent, where it certainly is one

    @property
    def wary(self) -> bool:
        """Bind and Execute have to be read."""
        return self._unread or bool(self._statements or self._portals)

    def alone(self, kind: int, whole: bytes) -> bool:
        """Whether the message has to travel alone. `whole` is empty where it is too long."""
        if kind == Client.QUERY:
            return not whole or is_discard(whole[5:])
        return kind == Client.EXECUTE and (self._unread or self._portal(whole) in self._portals)

    def sent(self, kind: int, whole: bytes) -> None:
        """A message goes to the backend, which will read it."""
        if kind == Client.PARSE:
            self._parse(whole)
        elif kind == Client.BIND and self.wary:
            portal, statement = messages.strings(whole[5:], 2) if whole else (b"", b"")
            self._unread = self._unread or not whole
            (self._portals.add if statement in self._statements else self._portals.discard)(portal)
        elif (kind == Client.QUERY and is_discard(whole[5:])) or (
            kind == Client.EXECUTE and self._portal(whole) in self._portals
        ):
            self.under_way = kind

    def answered(self, completed: bool) -> None:
        """What travelled alone was answered. With a DISCARD ALL all statements and portals are gone."""
        self.under_way = None
        if completed:
            self._statements, self._portals, self._unread = set(), set(), False

    def _parse(self, whole: bytes) -> None:
        if not whole:
            self._unread = True
            return
        name, text = messages.strings(whole[5:], 2)
        (self._statements.add if is_discard(text) else self._statements.discard)(name)

    @staticmethod
    def _portal(whole: bytes) -> bytes:
        return whole[5:-5]

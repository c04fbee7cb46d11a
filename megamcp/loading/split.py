"""Cuts a stream of SQL into statements and the rows of COPY … FROM stdin, as psql does; holds one statement at a time.

Knows quotes, dollar quotes, comments, BEGIN ATOMIC and the parentheses of CREATE RULE; nothing else of the grammar.
Rows pass as the bytes they are. psql's own commands (`\\restrict`, `\\connect`) are told apart, not followed.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from megamcp.loading.script import bad

MAX_STATEMENT = 256 << 20
_SKIP = re.compile(rb"[ \t\r\n\f\v]+")
_MARK = re.compile(rb"""[;'"$]|--|/\*""")
# What can't end a statement, as long as it is whole. A word before a quote may make it an escaped one: looked at apart.
_BORING = re.compile(
    rb"""(?:[^;'"$/A-Za-z0-9_\x80-\xff-]++|[A-Za-z0-9_\x80-\xff]++(?=[^'])|'[^']*+'|"[^"]*+"|-(?=[^-])|/(?=[^*]))*+"""
)
_DOLLAR = re.compile(rb"\$(?:[A-Za-z_\x80-\xff][A-Za-z0-9_\x80-\xff]*)?\$")
_ESCAPED = re.compile(rb"'(?:[^'\\]|\\.|'')*+'", re.S)
_COMMENT_EDGE = re.compile(rb"/\*|\*/")
_WORD_END = re.compile(rb"[A-Za-z0-9_$\x80-\xff]$")
_ESCAPE_PREFIX = re.compile(rb"(?:^|[^A-Za-z0-9_$\x80-\xff])[eE]$")
_CREATE = re.compile(rb"create\b", re.I)
_COPY = re.compile(rb"copy\b.*\bfrom\s+stdin\b", re.I | re.S)
_ATOMIC = re.compile(rb"\bbegin\s+atomic\b", re.I)
_BLOCK = re.compile(rb"\b(?:(begin|case)|(end))\b", re.I)
_END_OF_ROWS = b"\n\\."
_AFTER_ROWS = re.compile(rb"\r?\n|$")
_LONGEST_END = len(b"\n\\.\r\n")


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement without its semicolon."""

    text: bytes
    line: int
    """Where it begins, from 1."""


@dataclass(frozen=True, slots=True)
class Command:
    """One line that is psql's, not SQL."""

    text: bytes
    line: int


@dataclass(frozen=True, slots=True)
class Comment:
    """One line between statements: pg_dump writes there which server it read."""

    text: bytes
    line: int


@dataclass(frozen=True, slots=True)
class Rows:
    """COPY … FROM stdin with its rows, which are read before the next piece is asked for, or skipped."""

    text: bytes
    line: int
    chunks: AsyncIterator[bytes] = field(compare=False)

    @property
    def first_row(self) -> int:
        """Line of the first row."""
        return self.line + self.text.count(b"\n") + 1


Piece = Statement | Command | Comment | Rows


async def pieces(chunks: AsyncIterator[bytes], name: str) -> AsyncGenerator[Piece]:
    """The pieces of a script, in order. `name` is told in errors. Raises `Unprocessable` (`invalid_environment`)."""
    text = _Text(chunks, name)
    while await text.skip_space():
        line = text.line
        if text.starts(b"--"):
            yield Comment(text.take(await text.line_end(0)), line)
        elif text.starts(b"/*"):
            text.take(await text.comment_end(0))
        elif text.starts(b"\\"):
            yield Command(text.take(await text.line_end(0)).strip(), line)
        elif text.starts(b";"):
            text.take(1)
        else:
            statement = text.take(await text.statement_end())
            text.take(1)
            if not _COPY.match(statement):
                yield Statement(statement.rstrip(), line)
                continue
            text.take(await text.line_end(0) + 1)
            rows = text.rows()
            yield Rows(statement.rstrip(), line, rows)
            async for _ in rows:  # what the reader left
                pass


class _Text:
    """The part of the stream that is looked at: always begins where the next piece does."""

    def __init__(self, chunks: AsyncIterator[bytes], name: str) -> None:
        self._chunks = chunks
        self._name = name
        self._buffer = b""
        self._start = 0
        self._ended = False
        self.line = 1

    async def more(self) -> bool:
        """Reads on; doubles what is held, so that a long token is not searched again for each chunk."""
        parts = [self._buffer[self._start :]]
        wanted = len(parts[0])
        got = 0
        if wanted > MAX_STATEMENT:
            raise bad(self._name, f"line {self.line}: a statement of more than {MAX_STATEMENT >> 20} MiB", "Use COPY.")
        while not self._ended and (got == 0 or got < wanted):
            chunk = await anext(self._chunks, None)
            if chunk is None:
                self._ended = True
            else:
                parts.append(chunk)
                got += len(chunk)
        self._buffer, self._start = b"".join(parts), 0
        return got > 0

    def starts(self, prefix: bytes) -> bool:
        return self._buffer.startswith(prefix, self._start)

    def take(self, size: int) -> bytes:
        taken = self._buffer[self._start : self._start + size]
        self._start += len(taken)
        self.line += taken.count(b"\n")
        return taken

    async def skip_space(self) -> bool:
        """Moves to the next piece; False at the end. At least two bytes are held then, where there are any."""
        while True:
            if found := _SKIP.match(self._buffer, self._start):
                self.take(found.end() - self._start)
            if len(self._buffer) - self._start >= 2 or not await self.more():
                return self._start < len(self._buffer)

    async def line_end(self, at: int) -> int:
        """Offset of the line break at or after `at`, or of the end."""
        return await self._find(b"\n", at, 0)

    async def _find(self, what: bytes, at: int, past: int) -> int:
        """Offset of `what` plus `past`; the end of the stream where it doesn't come."""
        while (found := self._buffer.find(what, self._start + at)) < 0:
            at = max(at, len(self._buffer) - self._start - len(what) + 1)
            if not await self.more():
                return len(self._buffer) - self._start
        return found - self._start + past

    async def comment_end(self, at: int) -> int:
        """Offset after a comment that begins at `at`; they nest."""
        depth, position = 0, at
        while True:
            found = _COMMENT_EDGE.search(self._buffer, self._start + position)
            if found is None:
                if not await self.more():
                    raise bad(self._name, f"line {self.line}: a comment that doesn't end")
                continue
            position = found.end() - self._start
            depth += 1 if found[0] == b"/*" else -1
            if depth == 0:
                return position

    async def statement_end(self) -> int:
        """Offset of the semicolon that ends the statement, or of the end of the stream."""
        position = 0
        bare: list[bytes] = []
        while len(self._buffer) - self._start <= len(b"create") and await self.more():
            pass
        create = _CREATE.match(self._buffer, self._start) is not None
        while True:
            if not create and (boring := _BORING.match(self._buffer, self._start + position)):
                position = boring.end() - self._start
            found = _MARK.search(self._buffer, self._start + position)
            if found is None:
                # One byte less: it may be the first of a comment's two.
                position = max(position, len(self._buffer) - self._start - 1) if not create else position
                if not await self.more():
                    return len(self._buffer) - self._start
                continue
            at = found.start() - self._start
            if create:
                bare.append(self._buffer[self._start + position : found.start()])
            match found[0]:
                case b";":
                    if not create or not _is_open(b" ".join(bare)):
                        return at
                    position = at + 1
                case b"'":
                    position = await self._quote_end(at)
                case b'"':
                    position = await self._find(b'"', at + 1, 1)
                case b"$":
                    position = await self._dollar_end(at)
                case b"--":
                    position = await self.line_end(at)
                case _:
                    position = await self.comment_end(at)

    async def _quote_end(self, at: int) -> int:
        """Offset after a string. A doubled quote is the end of one and the begin of the next, unless it is escaped."""
        if not _ESCAPE_PREFIX.search(self._buffer[max(self._start, self._start + at - 2) : self._start + at]):
            return await self._find(b"'", at + 1, 1)
        while True:
            found = _ESCAPED.match(self._buffer, self._start + at)
            if found and (found.end() < len(self._buffer) or self._ended):
                return found.end() - self._start
            if not await self.more():
                return found.end() - self._start if found else len(self._buffer) - self._start

    async def _dollar_end(self, at: int) -> int:
        before = self._buffer[self._start + at - 1 : self._start + at] if at else b""
        while b"$" not in self._buffer[self._start + at + 1 : self._start + at + 130] and await self.more():
            if len(self._buffer) - self._start > at + 130:
                break
        found = _DOLLAR.match(self._buffer, self._start + at)
        if found is None or _WORD_END.search(before):  # a parameter, or a name that holds a dollar
            return at + 1
        return await self._find(found[0], at + len(found[0]), len(found[0]))

    async def rows(self) -> AsyncIterator[bytes]:
        """Chunks of rows up to the line `\\.`, which is taken too."""
        line = self.line
        begun = False
        while True:
            if not begun and (
                self.starts(b"\\.\n") or self.starts(b"\\.\r\n") or (self._ended and self.starts(b"\\."))
            ):
                self.take(await self.line_end(0) + 1)
                return
            if (found := self._end_of_rows()) is not None:
                rows = self.take(found + 1)
                self.take(await self.line_end(0) + 1)
                if rows:
                    yield rows
                return
            if self._ended:
                raise bad(
                    self._name, f"line {line}: the rows of COPY end without a line \\.", "The file may be cut off."
                )
            ready = len(self._buffer) - self._start - _LONGEST_END
            if ready > 0:
                begun = True
                yield self.take(ready)
            await self.more()

    def _end_of_rows(self) -> int | None:
        """Offset of the line break before `\\.`, where all of that line is held."""
        at = self._start
        while (at := self._buffer.find(_END_OF_ROWS, at)) >= 0:
            after = at + len(_END_OF_ROWS)
            found = _AFTER_ROWS.match(self._buffer, after)
            if found and (found[0] or self._ended):
                return at - self._start
            at = after
        return None


def _is_open(bare: bytes) -> bool:
    """Whether a CREATE goes on after a semicolon: within a rule's parentheses, or within BEGIN ATOMIC … END."""
    if bare.count(b"(") > bare.count(b")"):
        return True
    if not _ATOMIC.search(bare):
        return False
    return sum(1 if opened else -1 for opened, _ in _BLOCK.findall(bare)) > 0

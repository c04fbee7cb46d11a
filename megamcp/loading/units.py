"""A script as what a state does one after another: statements, batches of plain INSERTs, rows of COPY.

What a dump says that means nothing here is left out and counted. Where something fails is told as file and line.
"""

import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import asyncpg

from megamcp.loading import dumps, inserts
from megamcp.loading.script import Script, bad
from megamcp.loading.split import Command, Comment, Rows, Statement, pieces

BATCH = 256 << 10
"""Bytes of INSERTs that are sent at once."""
_LINE_OF_ROWS = re.compile(r"^COPY .*?, line (\d+)", re.M)

Progress = Callable[[str, int, int], None]
"""What is done, how much of it, of how much. All of nothing (0 of 0): a remark."""


@dataclass(frozen=True, slots=True)
class Sql:
    """A statement, and the line that it begins on."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Inserts:
    """INSERTs of constants, in which nothing can be refused."""

    parts: tuple[Sql, ...]

    @property
    def text(self) -> str:
        return ";\n".join(part.text for part in self.parts)


Unit = Sql | Inserts | Rows


@dataclass(slots=True)
class Reading:
    """One pass over a script."""

    script: Script
    progress: Progress
    verb: str = ""
    """Goes before the file's name in the progress; a pass that has one makes no remarks."""
    left_out: Counter[str] = field(default_factory=Counter)
    done: int = 0
    _table: str = ""

    async def units(self) -> AsyncGenerator[Unit]:
        """Raises `Unprocessable` (`invalid_environment`) for a file that isn't SQL."""
        try:
            async with self.script.stream(self._count) as chunks, aclosing(self._cut(chunks)) as units:
                async for unit in units:
                    yield unit
        except OSError as error:
            raise bad(self.script.name, str(error), "The gateway must be able to read the file.") from error
        if self.left_out and not self.verb:
            told = ", ".join(f"{count} × {what}" for what, count in sorted(self.left_out.items()))
            self.progress(f"left out of {self.script.name}, since it means nothing here: {told}", 0, 0)

    async def _cut(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[Unit]:
        name = self.script.name
        unit: Unit | None
        batch: list[Sql] = []
        size = 0
        begun = False  # something was made, or the dump has led to its database: it stays there
        async with aclosing(pieces(chunks, name)) as found:
            async for piece in found:
                match piece:
                    case Comment():
                        if self.script.dump:
                            dumps.check_comment(piece, name)
                        continue
                    case Command():
                        if begun or not (self.script.dump and dumps.is_connect(piece)):
                            dumps.check_command(piece, name)
                        begun = begun or dumps.is_connect(piece)
                        continue
                    case Statement() if insert := inserts.plain(piece.text, self.script.schema):
                        batch.append(Sql(self._decode(insert, piece.line), piece.line))
                        size += len(insert)
                        if size < BATCH:
                            continue
                        unit = None
                    case Statement():
                        unit = self._statement(piece)
                    case Rows():
                        unit = piece
                if batch:
                    begun = True
                    yield Inserts(tuple(batch))
                    batch, size = [], 0
                if unit is not None:
                    begun = True
                    yield unit
            if batch:
                yield Inserts(tuple(batch))

    def _statement(self, piece: Statement) -> Sql | None:
        text = self._decode(piece.text, piece.line)
        if self.script.dump:
            what = dumps.left_out(piece.text, self.script.name, piece.line)
            if what is None and dumps.is_of_schema(text, self.script.schema or "public"):
                what = "schema"
            if what is not None:
                self.left_out[what] += 1
                return None
            if self.script.schema:
                text = dumps.unqualified(text, self.script.schema)
        return Sql(text, piece.line)

    def _decode(self, raw: bytes, line: int) -> str:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            line += raw[: error.start].count(b"\n")
            raise bad(
                self.script.name,
                f"line {line}: the byte 0x{raw[error.start]:02x} is not UTF-8",
                "Save the file, or make the dump, as UTF-8.",
            ) from error
        if "\0" in text:
            raise bad(self.script.name, f"line {line}: a NUL byte: this is not a text", "Name a dump made by pg_dump.")
        return text

    def _count(self, size: int) -> None:
        self.done += size
        self._tell()

    def at(self, table: str) -> None:
        """Says whose rows are read now."""
        self._table = f": {table}"
        self._tell()

    def _tell(self) -> None:
        self.progress(f"{self.verb}{self.script.name}{self._table}", self.done, max(self.script.size, self.done))


def place(error: asyncpg.PostgresError, name: str, unit: Sql | Rows) -> str:
    """`shop.sql, line 7`: where PostgreSQL found a mistake."""
    line = unit.line
    if isinstance(unit, Rows):
        if found := _LINE_OF_ROWS.search(getattr(error, "context", None) or ""):
            line = unit.first_row + int(found[1]) - 1
    else:
        position = getattr(error, "position", None) or (
            getattr(error, "internal_position", None) if getattr(error, "internal_query", None) == unit.text else None
        )
        if position and str(position).isdigit():
            line += unit.text.count("\n", 0, int(position) - 1)
    return f"{name}, line {line}"

"""Runs one program on both sides and compares all a client can see; says in words where they part."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import asyncpg

from megamcp.errors import UnsupportedStatement
from megamcp.state.statements import check_statement
from tests.integration.overlay.differential_programs import Openness, Statement
from tests.integration.overlay.differential_sides import (
    CopyOnWrite,
    Dump,
    Layers,
    Outcome,
    Plain,
    Rejected,
    contents,
    execute,
)


@dataclass(frozen=True, slots=True)
class Call:
    """Statements of one transaction, each in a savepoint."""

    rollout: int
    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    rollout: int


@dataclass(frozen=True, slots=True)
class Fork:
    checkpoint: int


@dataclass(frozen=True, slots=True)
class Rollback:
    rollout: int


Step = Call | Checkpoint | Fork | Rollback


class Mismatch(AssertionError):
    """The sides differ; the message holds the program so far and both results."""


@dataclass(slots=True)
class _Rollout:
    plain: str
    layers: Layers
    checkpoints: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Saved:
    dump: Dump
    chain: tuple[int, ...]


class Pair:
    """A schema with its base rows on both sides."""

    def __init__(self, plain: Plain, overlay: CopyOnWrite, base: Dump) -> None:
        self.plain = plain
        self.overlay = overlay
        self.base = base
        self.skipped = 0

    @classmethod
    async def load(
        cls,
        conn: asyncpg.Connection,
        prefix: str,
        ddl: str,
        tables: Sequence[str],
        seeds: Sequence[str],
    ) -> "Pair":
        """Rows of the base are those seeds that plain PostgreSQL takes."""
        plain = Plain(conn, prefix, ddl, tables)
        name = await plain.make()
        taken = []
        async with conn.transaction():
            await plain.enter(name)
            for seed in seeds:
                outcome = await plain.execute(name, seed)
                if not outcome.sqlstate:
                    taken.append(seed)
            base = await plain.dump(name)
        plain.give_back(name)
        return cls(plain, await CopyOnWrite.load(conn, ddl, [";\n".join(taken)] if taken else []), base)

    async def run(self, steps: Sequence[Step]) -> None:
        """Raise `Mismatch` where the sides part."""
        await _Run(self).run(steps)

    async def unload(self) -> None:
        await self.overlay.unload()
        await self.plain.drop()


class _Run:
    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._rollouts: list[_Rollout] = []
        self._saved: list[_Saved] = []
        self._told: list[str] = []

    async def run(self, steps: Sequence[Step]) -> None:
        try:
            self._saved.append(_Saved(self._pair.base, ()))
            await self._open(0)
            for step in steps:
                await self._step(step)
            for number in range(len(self._rollouts)):
                await self._compare_tables(number)
            await self._compare_digests()
        finally:
            for rollout in self._rollouts:
                self._pair.plain.give_back(rollout.plain)

    async def _step(self, step: Step) -> None:
        match step:
            case Call():
                await self._call(step.rollout % len(self._rollouts), step.statements)
            case Checkpoint():
                await self._checkpoint(step.rollout % len(self._rollouts))
            case Fork():
                if len(self._rollouts) < 5:
                    await self._open(step.checkpoint % len(self._saved))
            case Rollback():
                await self._rollback(step.rollout % len(self._rollouts))

    async def _open(self, checkpoint: int) -> None:
        self._told.append(f"rollout {len(self._rollouts)} := fork of checkpoint {checkpoint}")
        saved = self._saved[checkpoint]
        pair = self._pair
        name = await pair.plain.make()
        async with pair.plain.conn.transaction():
            await pair.plain.restore(name, saved.dump)
        layers = Layers(list(saved.chain), await pair.overlay.layer())
        self._rollouts.append(_Rollout(name, layers, [checkpoint]))

    async def _checkpoint(self, number: int) -> None:
        rollout = self._rollouts[number]
        self._told.append(f"rollout {number}: checkpoint {len(self._saved)}")
        dump = await self._pair.plain.dump(rollout.plain)
        await self._pair.overlay.freeze(rollout.layers)
        rollout.checkpoints.append(len(self._saved))
        self._saved.append(_Saved(dump, tuple(rollout.layers.chain)))

    async def _rollback(self, number: int) -> None:
        rollout = self._rollouts[number]
        checkpoint = rollout.checkpoints[-1]
        self._told.append(f"rollout {number}: rollback to checkpoint {checkpoint}")
        saved = self._saved[checkpoint]
        async with self._pair.plain.conn.transaction():
            await self._pair.plain.restore(rollout.plain, saved.dump)
        rollout.layers = Layers(list(saved.chain), await self._pair.overlay.layer())
        await self._compare_tables(number)

    async def _call(self, number: int, statements: Sequence[Statement]) -> None:
        accepted = []
        for statement in statements:
            try:
                check_statement(statement.sql)
                accepted.append(statement)
            except UnsupportedStatement:
                self._pair.skipped += 1
        if not accepted:
            return
        self._told.append(f"rollout {number}: transaction")
        rollout = self._rollouts[number]
        plain, overlay = self._pair.plain, self._pair.overlay
        async with plain.conn.transaction():
            for statement in accepted:
                self._told.append(f"rollout {number}:   {statement.sql};")
                await self._statement(rollout, plain, overlay, statement)
            await plain.conn.execute("reset role")
        await self._compare_tables(number)

    async def _statement(self, rollout: _Rollout, plain: Plain, overlay: CopyOnWrite, statement: Statement) -> None:
        """Both sides in one transaction of one connection, so a failed comparison leaves nothing behind."""
        conn = plain.conn
        await conn.execute("reset role")
        before = await plain.sequences(rollout.plain)
        with contextlib.suppress(Rejected):
            async with conn.transaction():
                await plain.enter(rollout.plain)
                expected = await plain.execute(rollout.plain, statement.sql)
                await overlay.enter(rollout.layers)
                found = await execute(conn, statement.sql)
                await conn.execute("reset role")
                if _may_part(expected, found, statement):
                    raise Rejected
                if not _same(expected, found, statement):
                    self._fail(f"plain:   {expected}\noverlay: {found}")
            return
        await plain.set_sequences(rollout.plain, before)

    async def _compare_tables(self, number: int) -> None:
        rollout = self._rollouts[number]
        plain, overlay = self._pair.plain, self._pair.overlay
        async with plain.conn.transaction():
            await plain.enter(rollout.plain)
            expected = await contents(plain.conn, plain.tables)
            await overlay.enter(rollout.layers, writable=False)
            found = await contents(plain.conn, plain.tables)
            await plain.conn.execute("reset role")
        if expected != found:
            parts = [
                f"{table}\n  plain:   {expected[table]}\n  overlay: {found[table]}"
                for table in plain.tables
                if expected[table] != found[table]
            ]
            self._fail(f"rows of rollout {number}: " + "\n".join(parts))

    async def _compare_digests(self) -> None:
        """Equal rows have equal digests, others different ones, whichever way they were reached."""
        seen: dict[str, tuple[int, int]] = {}
        by_digest: dict[int, str] = {}
        conn = self._pair.plain.conn
        for number, rollout in enumerate(self._rollouts):
            async with conn.transaction():
                await self._pair.plain.enter(rollout.plain)
                rows = repr(await contents(conn, self._pair.plain.tables))
                digest = await self._pair.overlay.digest(rollout.layers)
            if seen.setdefault(rows, (number, digest))[1] != digest:
                self._fail(f"rollouts {seen[rows][0]} and {number} hold equal rows but differ in digest")
            if by_digest.setdefault(digest, rows) != rows:
                self._fail(f"rollout {number} has the digest of other rows")

    def _fail(self, difference: str) -> None:
        lines = "\n".join(self._told)
        raise Mismatch(f"\n{self._pair.plain.ddl}\n{lines}\n--- {difference}")


def _may_part(expected: Outcome, found: Outcome, statement: Statement) -> bool:
    """True when one side fails where PostgreSQL leaves that open; the statement is then undone on both."""
    if (expected.sqlstate == "") == (found.sqlstate == ""):
        return False
    if _fixed_column(expected, statement) or _no_full_join(found):
        return True
    code = expected.sqlstate or found.sqlstate
    match statement.openness:
        case Openness.KEY_SHIFT:
            return code == "23505"
        case Openness.EVENT_ORDER:
            return code in {"23505", "23503", "23001"}
    return False


def _same(expected: Outcome, found: Outcome, statement: Statement) -> bool:
    if expected.sqlstate or found.sqlstate:
        same = (expected.sqlstate, expected.broken) == (found.sqlstate, found.broken)
        if same or (found.sqlstate and _fixed_column(expected, statement)) or _no_full_join(found):
            return True
        return statement.openness is not Openness.EXACT and _row_errors(expected, found)
    ordered = " order by " in statement.sql and statement.sql.startswith("select")
    rows = (expected.rows, found.rows) if ordered else (sorted(expected.rows), sorted(found.rows))
    return expected.tag == found.tag and rows[0] == rows[1]


def _fixed_column(expected: Outcome, statement: Statement) -> bool:
    """A value for a generated or ALWAYS column: PostgreSQL refuses the plan, the overlay the first such row."""
    return expected.sqlstate == "428C9" and not statement.sql.startswith("update")


def _no_full_join(found: Outcome) -> bool:
    """MERGE without an equality to join by: PostgreSQL plans it only where NOT NULL decides the condition."""
    return found.sqlstate == "0A000" and "FULL JOIN" in found.message


def _row_errors(expected: Outcome, found: Outcome) -> bool:
    """Of several rows each side may meet another first, but both meet one that breaks a rule."""
    of_a_row = ("22", "23", "21000", "428C9")
    return expected.sqlstate.startswith(of_a_row) and found.sqlstate.startswith(of_a_row)

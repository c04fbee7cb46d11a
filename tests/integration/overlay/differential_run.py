"""Runs one program on both sides and compares all a client can see; says in words where they part."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import asyncpg

from megamcp.errors import MegaMCPError, UnsupportedStatement
from megamcp.sdk.database import Database as ToolDatabase
from megamcp.state import TableDiff
from tests.integration.overlay.differential_census import in_statement
from tests.integration.overlay.differential_database import Database
from tests.integration.overlay.differential_openness import Openness, Outcome, Statement, allowed
from tests.integration.overlay.differential_report import Report
from tests.integration.overlay.differential_sides import Contents, CopyOnWrite, Dump, Layers, Plain, Sequences, unquoted


@dataclass(frozen=True, slots=True)
class Savepoint:
    """Inside a call; what follows may be undone by `Undo`."""


@dataclass(frozen=True, slots=True)
class Undo:
    """Rolls back to the newest savepoint of the call, if there is one."""


@dataclass(frozen=True, slots=True)
class Call:
    """Statements of one transaction, each in a savepoint."""

    rollout: int
    statements: tuple[Statement | Savepoint | Undo, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    rollout: int


@dataclass(frozen=True, slots=True)
class Fork:
    checkpoint: int


@dataclass(frozen=True, slots=True)
class Rollback:
    rollout: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Deletes every row of a table that nothing refers to and writes the same rows again: an equal digest."""

    rollout: int
    table: int


@dataclass(frozen=True, slots=True)
class Squash:
    """Makes one layer of the last ones of the rollout's chain, at least two, and puts it in their place."""

    rollout: int
    first: int


Step = Call | Checkpoint | Fork | Rollback | Rewrite | Squash
MOST_ROLLOUTS = 5


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
    rows: Contents
    """Its rows as JSON."""


class Pair:
    """A schema with its base rows on both sides."""

    def __init__(self, plain: Plain, overlay: CopyOnWrite, base: Dump, owned: Sequence[Any], report: Report) -> None:
        self.plain = plain
        self.overlay = overlay
        self.base = base
        self.report = report
        self._owned = owned

    @classmethod
    async def load(
        cls,
        database: Database,
        prefix: str,
        ddl: str,
        tables: Sequence[str],
        seeds: Sequence[str],
        report: Report | None = None,
    ) -> "Pair":
        """Rows of the base are those seeds that plain PostgreSQL takes."""
        conn = await asyncpg.connect(database.dsn)
        for kind, skip in (("json", 0), ("jsonb", 1)):  # as the SDK's connection reads them
            await conn.set_type_codec(
                kind,
                schema="pg_catalog",
                encoder=str.encode,
                decoder=lambda raw, skip=skip: json.loads(raw[skip:]),
                format="binary",
            )
        plain = Plain(conn, prefix, ddl, tables)
        name = await plain.make()
        taken = []
        for seed in seeds:
            before = await plain.sequences(name)
            async with plain.entered(name) as transaction:
                outcome = await plain.execute(seed)
                if not outcome.sqlstate:
                    outcome = await plain.commit(transaction)
            if outcome.sqlstate:
                await plain.set_sequences(name, before)
            else:
                taken.append(seed)
        base = await plain.dump(name)
        plain.give_back(name)
        tools = ToolDatabase(database.dsn, 1)
        try:
            seeds = [";\n".join(taken)] if taken else []
            overlay = await CopyOnWrite.load(database.connection, tools, ddl, seeds)
        except MegaMCPError:
            await plain.drop()
            await conn.close()
            raise
        return cls(plain, overlay, base, (conn, tools), report or Report())

    async def run(self, steps: Sequence[Step]) -> None:
        """Raise `Mismatch` where the sides part."""
        await _Run(self).run(steps)

    async def unload(self) -> None:
        conn, tools = self._owned
        await tools.aclose()
        await self.overlay.unload()
        await self.plain.drop()
        await conn.close()


class _Run:
    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._plain = pair.plain
        self._overlay = pair.overlay
        self._report = pair.report
        self._rollouts: list[_Rollout] = []
        self._saved: list[_Saved] = []
        self._told: list[str] = []
        self._digests: dict[str, tuple[str, int]] = {}
        self._by_digest: dict[int, str] = {}

    async def run(self, steps: Sequence[Step]) -> None:
        self._report.programs += 1
        try:
            await self._open(_Saved(self._pair.base, (), {}), 0)
            self._saved.append(_Saved(self._pair.base, (), await self._plain.as_json(self._rollouts[0].plain)))
            for step in steps:
                self._report.steps[type(step).__name__.lower()] += 1
                await self._step(step)
            for number in range(len(self._rollouts)):
                await self._compare_tables(number)
                await self._compare_digest(number)
            for a, b in ((0, -1), (-1, len(self._saved) // 2), (-2, -1)):
                if len(self._saved) > 1:
                    await self._compare_diff(self._saved[a], self._saved[b])
        finally:
            for rollout in self._rollouts:
                self._plain.give_back(rollout.plain)

    async def _step(self, step: Step) -> None:
        match step:
            case Call():
                await self._call(step.rollout % len(self._rollouts), step.statements)
            case Checkpoint():
                await self._checkpoint(step.rollout % len(self._rollouts))
            case Fork():
                if len(self._rollouts) < MOST_ROLLOUTS:
                    checkpoint = step.checkpoint % len(self._saved)
                    await self._open(self._saved[checkpoint], checkpoint)
            case Rollback():
                await self._rollback(step.rollout % len(self._rollouts))
            case Rewrite():
                await self._rewrite(step.rollout % len(self._rollouts), step.table)
            case Squash():
                await self._squash(step.rollout % len(self._rollouts), step.first)

    async def _open(self, saved: _Saved, checkpoint: int) -> None:
        self._told.append(f"rollout {len(self._rollouts)} := fork of checkpoint {checkpoint}")
        name = await self._plain.make()
        layers = Layers(list(saved.chain), await self._overlay.layer())
        self._rollouts.append(_Rollout(name, layers, [checkpoint]))
        await self._plain.restore(name, saved.dump)
        await self._compare_tables(len(self._rollouts) - 1)

    async def _checkpoint(self, number: int) -> None:
        rollout = self._rollouts[number]
        self._told.append(f"rollout {number}: checkpoint {len(self._saved)}")
        dump = await self._plain.dump(rollout.plain)
        await self._overlay.freeze(rollout.layers)
        rollout.checkpoints.append(len(self._saved))
        rows = await self._plain.as_json(rollout.plain)
        self._saved.append(_Saved(dump, tuple(rollout.layers.chain), rows))
        await self._compare_digest(number)

    async def _rollback(self, number: int) -> None:
        rollout = self._rollouts[number]
        checkpoint = rollout.checkpoints[-1]
        self._told.append(f"rollout {number}: rollback to checkpoint {checkpoint}")
        saved = self._saved[checkpoint]
        await self._plain.restore(rollout.plain, saved.dump)
        rollout.layers = Layers(list(saved.chain), await self._overlay.layer())
        await self._compare_tables(number)

    async def _rewrite(self, number: int, table: int) -> None:
        rollout = self._rollouts[number]
        name = self._plain.tables[table % len(self._plain.tables)]
        before = await self._overlay.digest(rollout.layers.all)
        rows = await self._plain.conn.fetchval(_AS_VALUES, f"{rollout.plain}.{name}")
        values = await self._plain.conn.fetchval(rows) if rows else None
        if not values:
            return
        names = ", ".join(f'"{c}"' for c in await self._plain._names(rollout.plain, name))
        statements = (f"delete from {name}", f"insert into {name} ({names}) values {values}")
        await self._call(number, [Statement(sql, construct="rewrite") for sql in statements])
        if await self._overlay.digest(rollout.layers.all) != before:
            self._fail("the same rows, written again, have another digest")

    async def _squash(self, number: int, first: int) -> None:
        rollout = self._rollouts[number]
        if len(rollout.layers.chain) < 2:
            return
        self._told.append(f"rollout {number}: squashed")
        await self._overlay.squash(rollout.layers, first % (len(rollout.layers.chain) - 1))
        await self._compare_tables(number)
        await self._compare_digest(number)

    async def _call(self, number: int, statements: Sequence[Statement | Savepoint | Undo]) -> None:
        self._told.append(f"rollout {number}: transaction")
        rollout = self._rollouts[number]
        start = await self._plain.sequences(rollout.plain)
        savepoints: list[tuple[Any, Any, Sequences]] = []
        failed = False
        loose = False
        async with self._plain.entered(rollout.plain) as ours, self._overlay.entered(rollout.layers) as (lease, theirs):
            for statement in statements:
                match statement:
                    case Savepoint():
                        self._told.append(f"rollout {number}:   savepoint;")
                        pair = self._plain.conn.transaction(), lease.driver.transaction()
                        for one in pair:
                            await one.start()
                        savepoints.append((*pair, await self._plain.sequences(rollout.plain)))
                    case Undo():
                        if savepoints:
                            self._told.append(f"rollout {number}:   rollback to savepoint;")
                            plain, overlay, sequences = savepoints.pop()
                            await plain.rollback()
                            await overlay.rollback()
                            await self._plain.set_sequences(rollout.plain, sequences)
                            failed = True
                    case Statement():
                        given = f"  -- {statement.arguments}" if statement.arguments else ""
                        self._told.append(f"rollout {number}:   {statement.sql};{given}")
                        failed |= not await self._statement(rollout, lease, statement, failed)
                        loose |= statement.openness is not Openness.EXACT
            while savepoints:
                plain, overlay, _ = savepoints.pop()
                await plain.commit()
                await overlay.commit()
            self._told.append(f"rollout {number}:   commit;")
            expected, found = await self._plain.commit(ours), await self._overlay.commit(theirs)
        if expected.sqlstate or found.sqlstate:
            commit = Statement("commit", Openness.FIRST_FAILURE if loose or len(statements) > 1 else Openness.EXACT)
            self._judge(expected, found, commit, "COMMIT", failed)
            await self._plain.set_sequences(rollout.plain, start)
            if not (expected.sqlstate and found.sqlstate):
                self._fail(f"plain:   {expected}\noverlay: {found}")
        await self._compare_tables(number)

    async def _statement(self, rollout: _Rollout, lease: Any, statement: Statement, failed: bool) -> bool:
        """Whether it was kept. Both sides keep it or neither does."""
        before = await self._plain.sequences(rollout.plain)
        ours, theirs = self._plain.conn.transaction(), lease.driver.transaction()
        await ours.start()
        await theirs.start()
        try:
            found = await self._overlay.execute(lease, statement.sql, statement.arguments)
        except UnsupportedStatement as error:
            self._told.append("    (refused)")
            self._report.reasons[str(error)[:160]] += 1
            self._report.refused[statement.construct] += 1
            await theirs.rollback()
            await ours.rollback()
            return True
        self._report.statements[statement.construct] += 1
        expected = await self._plain.execute(statement.on_plain or statement.sql, statement.arguments)
        kept = self._judge(expected, found, statement, statement.construct, failed)
        for transaction in (ours, theirs):
            await (transaction.commit() if kept else transaction.rollback())
        if not kept:
            await self._plain.set_sequences(rollout.plain, before)
        return kept

    def _judge(self, expected: Outcome, found: Outcome, statement: Statement, construct: str, failed: bool) -> bool:
        """Whether both sides succeeded alike. Raises `Mismatch` where they may not differ as they do."""
        if _same(expected, found, statement):
            if expected.sqlstate:
                self._report.failed[construct] += 1
                self._report.codes[f"{expected.sqlstate}"] += 1
            elif expected.count > 0 or expected.rows or (expected.count < 0 and not expected.columns):
                self._report.done.update(in_statement(statement.sql))
            return not expected.sqlstate
        why = allowed(expected, found, statement, failed)
        if why is None:
            self._fail(f"plain:   {expected}  {expected.message}\noverlay: {found}  {found.message}")
        else:
            self._report.allowed[why] += 1
        return False

    async def _compare_tables(self, number: int) -> None:
        rollout = self._rollouts[number]
        tables = self._plain.tables
        expected = await self._plain.contents(rollout.plain)
        found = await self._overlay.contents(rollout.layers, tables)
        if expected != found:
            parts = [
                f"{table}\n  plain:   {expected[table]}\n  overlay: {found[table]}"
                for table in tables
                if expected[table] != found[table]
            ]
            self._fail(f"rows of rollout {number}: " + "\n".join(parts))
        numbers = await self._plain.counters(rollout.plain)
        drawn = await self._overlay.counters(rollout.layers.all)
        if numbers != drawn:
            self._fail(f"sequences of rollout {number}:\n  plain:   {numbers}\n  overlay: {drawn}")

    async def _compare_digest(self, number: int) -> None:
        """Equal rows have equal digests, others different ones, whichever way they were reached."""
        rollout = self._rollouts[number]
        rows = repr(await self._plain.contents(rollout.plain))
        digest = await self._overlay.digest(rollout.layers.all)
        here = f"rollout {number} after line {len(self._told)}"
        there, known = self._digests.setdefault(rows, (here, digest))
        if known != digest:
            self._fail(f"{there} and {here} hold equal rows but differ in digest")
        if self._by_digest.setdefault(digest, rows) != rows:
            self._fail(f"{here} has the digest of other rows")

    async def _compare_diff(self, a: _Saved, b: _Saved) -> None:
        """A diff names the rows that went and those that came, whichever keys they have."""
        found = await self._overlay.diff(a.chain, b.chain)
        for table in self._plain.tables:
            before, after = (Counter(_read(row) for row in saved.rows[table]) for saved in (a, b))
            shown = found.get(unquoted(table), _NO_CHANGE)
            # JSON shows a null of jsonb and no value alike: such a change is one, but can't be seen.
            changed = [c for c in shown.changed if c.before != c.after or None not in c.before.values()]
            went = Counter(map(repr, [*shown.removed, *(change.before for change in changed)]))
            came = Counter(map(repr, [*shown.added, *(change.after for change in changed)]))
            if (went, came) != (before - after, after - before):
                self._fail(f"diff of {table}:\n  plain:   {before - after} {after - before}\n  overlay: {went} {came}")
            total = len(shown.removed) + len(shown.added) + len(shown.changed)
            if total != shown.total:
                self._fail(f"diff of {table}: {total} rows, but {shown.total} are told")

    def _fail(self, difference: str) -> None:
        lines = "\n".join(self._told)
        raise Mismatch(f"\n{self._plain.ddl}\n{lines}\n--- {difference}")


_NO_CHANGE = TableDiff((), (), (), 0, False)


def _read(row: str) -> str:
    return repr(json.loads(row, parse_float=Decimal))


_AS_VALUES = """
select format('select string_agg(format(''(%s)'', %s), '', '') from %s t',
              string_agg('%L', ', ' order by attnum),
              string_agg('t.' || quote_ident(attname), ', ' order by attnum), $1::text)
from pg_attribute a where attrelid = $1::text::regclass and attnum > 0 and not attisdropped and attgenerated = ''
  and not exists (select from pg_constraint where confrelid = attrelid)
  and not exists (select from pg_trigger where tgrelid = attrelid and not tgisinternal)
  and not exists (select from pg_attribute i where i.attrelid = a.attrelid and i.attidentity = 'a')
group by attrelid
"""
"""The query that writes a table's rows as VALUES; null where other rows or triggers would take part."""


def _same(expected: Outcome, found: Outcome, statement: Statement) -> bool:
    if expected.sqlstate or found.sqlstate:
        return (expected.sqlstate, expected.broken, expected.told) == (found.sqlstate, found.broken, found.told)
    if (expected.count, expected.columns) != (found.count, found.columns):
        return False
    if statement.ordered:
        return expected.rows == found.rows
    return sorted(expected.rows) == sorted(found.rows)

"""The `schema` state: load an environment's DDL into a copy-on-write state, freeze, diff, digest, discard, unload.

Load runs the DDL and the seeds for real, in v_<h>, as a role that owns nothing else (`rights`); reads what came of
it from pg_catalog; refuses what can't be exact, all problems at once; moves the rows to the hidden tables and puts
views in the tables' place. One transaction: a state is there whole or not at all. The descriptor is kept as the comment
of s_<h>, so that loading the same content again finds it.

Binding a transaction to a chain, the lifecycle of layers and locks between calls are not here: megamcp.bind() and the
control plane do that.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any

import asyncpg

from megamcp.errors import UnsupportedSchema, UnsupportedStatement
from megamcp.loading import Script, as_script
from megamcp.loading.units import Progress
from megamcp.state import (
    bodies,
    catalog,
    companions,
    digests,
    estimates,
    filling,
    foreign_keys,
    grouping,
    late,
    refusals,
    refuse,
    rewrites,
    rights,
    tables,
    triggers,
    user_triggers,
    views,
)
from megamcp.state import clock as clocks
from megamcp.state.names import LAYER, ROW, hidden, ident, literal
from megamcp.state.queries import text

COMPILER_VERSION = 22
MODULUS = 1 << 128


@dataclass(frozen=True, slots=True)
class TableInfo:
    name: str
    columns: tuple[str, ...]
    primary: tuple[str, ...]
    """What tells rows apart: columns of a key, or the hidden `_mm_row`."""

    @property
    def keyless(self) -> bool:
        return self.primary == (ROW,)


@dataclass(frozen=True, slots=True)
class SchemaState:
    """What load() made. `hash` is of the content and names the schemas s_<hash> and v_<hash>.

    Roles belong to the whole cluster, so their names hold the deployment too: another database of the cluster may have
    the same state under other passwords.
    """

    hash: str
    tables: tuple[TableInfo, ...]
    deployment: str
    compiler: int = 0
    """The `COMPILER_VERSION` that made it; 0 of before this was written down."""

    @property
    def hidden_schema(self) -> str:
        return f"s_{self.hash}"

    @property
    def visible_schema(self) -> str:
        return f"v_{self.hash}"

    @property
    def companion_schema(self) -> str:
        return companions.schema_name(self.visible_schema)

    @property
    def owner_role(self) -> str:
        return f"megamcp_owner_{self.hash}_{self.deployment}"

    @property
    def view_role(self) -> str:
        return f"megamcp_view_{self.hash}_{self.deployment}"

    @property
    def tool_role(self) -> str:
        return f"megamcp_tool_{self.hash}_{self.deployment}"

    @property
    def query_role(self) -> str:
        return f"megamcp_query_{self.hash}_{self.deployment}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "SchemaState":
        return cls(
            hash=document["hash"],
            tables=tuple(TableInfo(t["name"], tuple(t["columns"]), tuple(t["primary"])) for t in document["tables"]),
            deployment=document["deployment"],
            compiler=document.get("compiler", 0),
        )


@dataclass(frozen=True, slots=True)
class Frozen:
    """`rows` the head layer holds (counters included: 0 means it may be reused); its 128-bit part of the digest."""

    rows: int
    digest: int


@dataclass(frozen=True, slots=True)
class Change:
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TableDiff:
    """Rows as JSON objects, in key order. `total` counts all differing keys; `truncated` says some were left out.

    Where no key tells rows apart, a changed row is one removed and one added, as often as it is there.
    """

    added: tuple[dict[str, Any], ...]
    removed: tuple[dict[str, Any], ...]
    changed: tuple[Change, ...]
    total: int
    truncated: bool

    def reversed(self) -> "TableDiff":
        """The way back."""
        back = tuple(Change(change.after, change.before) for change in self.changed)
        return TableDiff(self.removed, self.added, back, self.total, self.truncated)


def state_sql() -> str:
    """SQL of the functions that all states share (schema megamcp); safe to run again."""
    return text("state.sql")


def content_hash(scripts: Sequence[Script], clock_at: datetime, seed: int, salt: str = "") -> str:
    """16 hex digits of everything that a state is made from."""
    parts = [str(COMPILER_VERSION), *(one.content for one in scripts), clock_at.isoformat(), str(seed), salt]
    return hashlib.sha256("\0".join(f"{len(p)}:{p}" for p in parts).encode()).hexdigest()[:16]


async def load(
    conn: Any,
    *,
    ddl: Script | str,
    seeds: Sequence[Script | str],
    clock: datetime,
    seed: int,
    tool_password: str,
    query_password: str,
    salt: str = "",
    progress: Progress | None = None,
) -> SchemaState:
    """Makes the state of this content, or finds it. States of equal content are one, unless their `salt` differs.

    Raises UnsupportedSchema with every problem at once; PostgresError, with file and line as its note.
    """
    scripts = [as_script(ddl, "schema"), *(as_script(one, f"seed {n}") for n, one in enumerate(seeds, 1))]
    name = content_hash(scripts, clock, seed, salt)
    async with conn.transaction():
        # An outer transaction goes on with its own search path, and bound to nothing.
        path = await conn.fetchval("select current_setting('search_path')")
        await conn.execute("select pg_advisory_xact_lock(hashtextextended($1, 0))", f"megamcp state {name}")
        state = await _find(conn, name)
        if state is None:
            state = await _compile(conn, name, scripts, clock, seed, progress or (lambda *_: None))
        await reset_logins(conn, state, tool_password, query_password)
        await conn.execute("select set_config('search_path', $1, true), set_config('megamcp.binding', '', true)", path)
    return state


def refused(problems: Sequence[refuse.Problem]) -> UnsupportedSchema:
    lines = "; ".join(f"{p.construct} {p.object}: {p.reason}" for p in problems)
    return UnsupportedSchema(
        f"the schema holds what a copy-on-write state can't do exactly: {lines}",
        hint="Change what is listed in problems; docs/state.md says what is accepted.",
        problems=[asdict(p) for p in problems],
    )


async def _find(conn: Any, name: str) -> SchemaState | None:
    found = await conn.fetchval(
        "select obj_description(n.oid, 'pg_namespace') from pg_namespace n where nspname = $1", f"s_{name}"
    )
    return SchemaState.from_json(json.loads(found)) if found else None


async def _compile(
    conn: Any,
    name: str,
    scripts: Sequence[Script],
    clock_at: datetime,
    seed: int,
    progress: Progress,
) -> SchemaState:
    made = SchemaState(name, (), await conn.fetchval("select megamcp.deployment()"), COMPILER_VERSION)
    s, v, owner, view = made.hidden_schema, made.visible_schema, made.owner_role, made.view_role
    roles = {owner: "nologin", view: "nologin", made.tool_role: "login", made.query_role: "login"}
    await rights.patiently(conn, "".join(rights.role(r, o) for r, o in roles.items()) + rights.membership(tuple(roles)))
    await conn.execute(rights.schemas(s, v, owner, view) + rights.confined(s, v, owner, view))
    await rights.as_owner(conn, s, clocks.core(s, v) + rights.while_loading(s, view))
    ours = [
        row["oid"] for row in await conn.fetch("select oid from pg_proc where pronamespace = $1::text::regnamespace", v)
    ]
    await conn.execute("select megamcp.bind('{}', 0, $1, $2, true)", seed, clock_at)
    problems = await filling.run(conn, made, scripts, progress)
    found = await _introspect(conn, v, ours, problems)
    await _build(conn, made, found, progress)
    await rights.as_owner(
        conn,
        s,
        triggers.core(s, triggers=bool(found.triggers))
        + "".join(triggers.create(s, v, found, table) for table in found.tables)
        + foreign_keys.drain(s, v, found)
        + user_triggers.marks(s, v, found, triggers.HEAD)
        + digests.freeze(s, found.tables),
    )
    await _remake(conn, v, found)
    await rights.as_view(conn, v, "".join(views.defaults(s, v, table) for table in found.tables))
    beside = "".join(companions.create(s, v, found, table) for table in found.tables)
    await rights.as_owner(
        conn,
        s,
        beside
        + companions.truncate(s, v, found)
        + late.procedure(made.companion_schema, v, found)
        + companions.grants(v, (made.tool_role, view)),
    )
    await _rewrite_functions(conn, v, found)
    await rights.as_view(conn, v, await user_triggers.copies(conn, v, found, triggers.level_mark))
    await conn.execute(
        rights.released(s, v, view)
        + rights.grants(s, v, found, (owner, view, made.tool_role, made.query_role))
        + user_triggers.rights(v, found, owner, (made.tool_role, made.query_role))
    )
    await rights.no_temporary_tables(conn, made.tool_role)
    state = replace(made, tables=tuple(TableInfo(t.name, t.names, t.identity) for t in found.tables))
    await conn.execute(f"comment on schema {ident(s)} is {literal(json.dumps(state.to_json()))}")
    for done, table in enumerate(found.tables):
        progress("analyze", done, len(found.tables))
        await estimates.settle(conn, s, table)
    return state


async def _introspect(conn: Any, v: str, ours: list[int], problems: Sequence[refuse.Problem]) -> catalog.Catalog:
    """What was made. Raises with the problems that were found before and those that it shows."""
    shown = await refuse.judge(conn, v, ours)
    found = await catalog.read(conn, v, ours)
    if told := [*problems, *shown, *refuse.judge_catalog(found)]:
        raise refused(told)
    return found


async def _build(conn: Any, made: SchemaState, found: catalog.Catalog, progress: Progress) -> None:
    """Copies the rows to the hidden tables, drops the loaded ones and puts views in their place."""
    s, v = made.hidden_schema, made.visible_schema
    await rights.as_view(conn, v, f"grant select on all tables in schema {ident(v)} to {ident(made.owner_role)}")
    for done, table in enumerate(found.tables):
        progress(f"table {table.name}", done, len(found.tables))
        await rights.as_owner(
            conn,
            s,
            tables.create(s, v, table)
            + tables.indexes(s, found, table)
            + tables.ballast(s, table)
            + tables.policy(s, table, made.view_role),
        )
    await rights.as_owner(conn, s, await companions.shapes(conn, v, found))
    drops = [f"view if exists {ident(v)}.{ident(r.name)}" for r in reversed(found.remakes) if r.kind == "view"]
    drops += [f"table {ident(v)}.{ident(table.name)}" for table in found.tables]
    drops += [f"sequence if exists {ident(v)}.{ident(sequence.name)}" for sequence in found.sequences]
    await rights.as_view(
        conn,
        v,
        "".join(f"drop {what} cascade;\n" for what in drops)
        + "".join(views.create(s, v, table) for table in found.tables)
        + rights.to_owner(v, found, made.owner_role),
    )
    await rights.as_owner(conn, s, clocks.sequences(s, v, found.sequences) + foreign_keys.queue(s))
    await rights.as_view(conn, v, clocks.shown(s, v, found.sequences))


async def _remake(conn: Any, v: str, found: catalog.Catalog) -> None:
    """The environment's functions that went with the tables, and its views, in order of creation."""
    problems: list[refuse.Problem] = []
    for remake in found.remakes:
        if remake.kind == "view":
            try:
                async with conn.transaction():
                    await rights.as_view(conn, v, remake.definition)
            except asyncpg.GroupingError:
                problems += await _remake_grouped(conn, v, remake, found)
            except asyncpg.UndefinedTableError:  # a view that is refused
                if not problems:
                    raise
            continue
        if problems:  # it may read what wasn't made
            continue
        if await conn.fetchval("select to_regprocedure($1) is null", remake.name):
            await rights.as_view(conn, v, remake.definition)
        await rights.as_view(conn, v, f"alter function {remake.name} set search_path = {_path(v, remake)}")
    if problems:
        raise refused(problems)


async def _remake_grouped(conn: Any, v: str, view: catalog.Remake, found: catalog.Catalog) -> Sequence[refuse.Problem]:
    """Makes a view that PostgreSQL takes only with what hangs on a primary key in GROUP BY."""
    try:
        async with conn.transaction():
            await rights.as_view(conn, v, grouping.extended(view.definition, found))
    except (asyncpg.GroupingError, asyncpg.UndefinedFunctionError) as error:
        reason = f"{refusals.GROUPED_BY_KEY.reason}, and {error}"
        return [refuse.Problem("GROUP BY a primary key", view.name, reason, "Group by all columns.")]
    return ()


def _path(v: str, function: catalog.Remake) -> str:
    return f"{ident(v)}, pg_catalog, pg_temp, {triggers.level_mark(function.oid)}"


async def _rewrite_functions(conn: Any, v: str, found: catalog.Catalog) -> None:
    """INSERT … ON CONFLICT and GROUP BY a key in functions, for which the views and shapes must be there."""
    rewriter = rewrites.Rewriter()
    await conn.execute("select set_config('search_path', $1, true)", f"{ident(v)}, pg_catalog")

    async def fetch(sql: str, *arguments: Any) -> Any:
        async with conn.transaction():
            return await conn.fetch(sql, *arguments)

    async def rewrite(sql: str) -> tuple[str, bool]:
        return await rewriter.rewrite(sql, fetch)

    problems: list[refuse.Problem] = []
    for remake in found.remakes:
        if remake.kind != "function":
            continue
        try:
            definition = await bodies.rewritten(remake.definition, rewrite)
        except (bodies.NotRewritten, UnsupportedStatement) as error:
            hint = "Write it in the tool server."
            problems.append(
                refuse.Problem("ON CONFLICT or GROUP BY a primary key in a function", remake.name, str(error), hint)
            )
            continue
        if definition is not None:
            await rights.as_view(conn, v, definition)
            await rights.as_view(conn, v, f"alter function {remake.name} set search_path = {_path(v, remake)}")
    await conn.execute("set local search_path = ''")
    if problems:
        raise refused(problems)


async def reset_logins(conn: Any, state: SchemaState, tool: str, query: str) -> None:
    """Passwords and settings of the two logins as if just made: each may change its own, nobody can forbid it."""
    path = f"{ident(state.visible_schema)}, pg_catalog, pg_temp"
    await rights.patiently(
        conn,
        f"alter role {ident(state.tool_role)} reset all; alter role {ident(state.query_role)} reset all;"
        f"alter role {ident(state.tool_role)} password {literal(tool)};"
        f"alter role {ident(state.query_role)} password {literal(query)};"
        f"alter role {ident(state.tool_role)} set search_path = {path};"
        f"alter role {ident(state.query_role)} set search_path = {path};"
        # Many small subplans look dear enough for JIT; a call should keep to one core; the working set is in memory.
        # Dear pages would also hide what a sort costs beside the policy's probes: GROUP BY would sort, not hash.
        + "".join(
            f"alter role {ident(role)} set jit = off; alter role {ident(role)} set max_parallel_workers_per_gather = 0;"
            f"alter role {ident(role)} set seq_page_cost = 0.05; alter role {ident(role)} set random_page_cost = 0.05;"
            for role in (state.tool_role, state.query_role)
        )
        + f"alter role {ident(state.query_role)} set default_transaction_read_only = on;"
        f"alter role {ident(state.query_role)} set statement_timeout = '10s';",
    )


async def freeze(conn: Any, state: SchemaState, chain: Sequence[int], head: int) -> Frozen:
    """What the head layer holds and adds to the digest of the chain below it (`chain` may end with the head)."""
    below = [layer for layer in chain if layer != head]
    row = await conn.fetchrow(
        f'select rows, digest from {ident(state.hidden_schema)}."~freeze"($1::bigint[], $2)', below, head
    )
    return Frozen(rows=row["rows"], digest=int(row["digest"]))


async def digest(conn: Any, state: SchemaState, chain: Sequence[int]) -> int:
    """The digest of a chain, recomputed from its layers."""
    total = 0
    for n, layer in enumerate(chain):
        total += (await freeze(conn, state, chain[:n], layer)).digest
    return total % MODULUS


async def diff(
    conn: Any, state: SchemaState, a: Sequence[int], b: Sequence[int], limit: int, common: int = 0
) -> dict[str, TableDiff]:
    """Rows whose effective value differs between chains `a` and `b`, for each table that has any.

    `common` is the last layer of the newest point that both come from (0: the base); the nearer, the cheaper.
    """
    found: dict[str, TableDiff] = {}
    for info in state.tables:
        query = digests.diff(state.hidden_schema, info.name, info.columns, info.primary, limit)
        rows = await conn.fetch(query, list(a), list(b), common)
        if not rows:
            continue
        pairs = [(_row(r["before"]) if r["before"] else None, _row(r["after"]) if r["after"] else None) for r in rows]
        found[info.name] = TableDiff(
            added=tuple(y for x, y in pairs if x is None and y is not None),
            removed=tuple(x for x, y in pairs if x is not None and y is None),
            changed=tuple(Change(x, y) for x, y in pairs if x is not None and y is not None),
            total=rows[0]["total"],
            truncated=rows[0]["total"] > len(rows),
        )
    return found


def _row(row: str) -> dict[str, Any]:
    """A row's JSON; numbers with a fraction as Decimal, since a change in the last digit is a change."""
    return json.loads(row, parse_float=Decimal)  # type: ignore[no-any-return]


async def counters(conn: Any, state: SchemaState, chain: Sequence[int]) -> dict[str, int]:
    """Sequences, clock offset (µs) and random position as the chain has them; the newest layer wins."""
    rows = await conn.fetch(
        f'select distinct on (name) name, value from {ident(state.hidden_schema)}."~counters" '
        "where layer = any ($1::bigint[]) and name not like 'uncalled:%' order by name, layer desc",
        [0, *chain],
    )
    return {row["name"]: row["value"] for row in rows}


async def discard(conn: Any, state: SchemaState, layers: Sequence[int], limit: int | None = None) -> int:
    """Deletes rows of layers that nothing refers to any more. Returns how many; at `limit`, some may be left."""
    dead = [layer for layer in layers if layer > 0]
    total = 0
    tables = [(hidden(table.name, "delta"), LAYER) for table in state.tables]
    for name, column in [*tables, ("~counters", "layer")]:
        table = f"{ident(state.hidden_schema)}.{ident(name)}"
        status: str = await conn.execute(
            f"delete from {table} where ctid = any (array(select ctid from {table}"
            f" where {column} = any ($1::bigint[]) limit $2))",
            dead,
            None if limit is None else limit - total,
        )
        total += int(status.rsplit(" ", 1)[1])
        if total == limit:
            break
    return total


async def unload(conn: Any, state: SchemaState) -> None:
    """Drops the state's schemas and roles. Roles that another database still uses stay."""
    async with conn.transaction():
        await conn.execute(
            f"drop schema if exists {ident(state.companion_schema)} cascade;"
            f"drop schema if exists {ident(state.visible_schema)} cascade;"
            f"drop schema if exists {ident(state.hidden_schema)} cascade;"
        )
        roles = (state.tool_role, state.query_role, state.view_role, state.owner_role)
        await conn.execute("".join(map(rights.drop, roles)))

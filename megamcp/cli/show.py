"""How things look to people: tables that fit 80 columns, diffs, journals. Pure: models in, rich renderables out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from megamcp import types as t

STATUS_STYLE = {"open": "green", "closed": "dim", "expired": "yellow"}
KIND_STYLE = {"call": "cyan", "checkpoint": "magenta", "rollback": "yellow", "fork": "magenta", "score": "blue"}
SHOWN_ROWS = 20
_DIFF_STYLE = {"+": "green", "-": "red"}


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A plain table; ids are never broken, so that they can be copied."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1))
    for name in columns:
        made.add_column(
            name, justify="right" if name in right else "left", no_wrap=name in ("rollout", "checkpoint", "seq")
        )
    return made


def facts(**values: Any) -> Text:
    """Names and values, one a line; `_` in a name is shown as a space."""
    return listing({name.replace("_", " "): value for name, value in values.items()})


def listing(values: Mapping[str, Any]) -> Text:
    """Names and values, one a line. None is left out; nothing is broken, so that it can be copied."""
    kept = {name: value for name, value in values.items() if value is not None}
    width = max(map(len, kept), default=0)
    lines = (
        Text.assemble((name.ljust(width + 2), "dim"), value if isinstance(value, Text) else str(value))
        for name, value in kept.items()
    )
    return Text("\n").join(lines)


def left(until: datetime) -> str:
    """How long a lease still runs."""
    seconds = (until - datetime.now(UTC)).total_seconds()
    if seconds <= 0:
        return "over"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def status(value: str) -> Text:
    """A status in its colour."""
    return Text(value, style=STATUS_STYLE.get(value, ""))


def environments(found: Iterable[t.Environment]) -> RenderableType:
    """What can be opened."""
    shown = table("environment", "version", "servers", "tables", right=("tables",))
    for environment in found:
        servers = ", ".join(f"{server.name} ({server.kind})" for server in environment.servers)
        shown.add_row(environment.name, environment.hash, servers, _tables(environment))
    return (
        shown if shown.row_count else Text("No environment is loaded. Load one: megamcp env load FOLDER", style="dim")
    )


def keys(found: Iterable[t.Key]) -> RenderableType:
    """All keys; an id is what a key is revoked by."""
    shown = table("key", "scope", "tenant", "name", "until")
    for key in found:
        until = "revoked" if key.revoked_at else left(key.expires_at) if key.expires_at else ""
        shown.add_row(key.id, key.scope, key.tenant, key.name, until)
    return shown if shown.row_count else Text("No keys. Make one: megamcp key create NAME --scope trainer", style="dim")


def _tables(environment: t.Environment) -> str:
    """How many there are, as far as the gateway knows: what is in a database of a rollout's own is not its business."""
    known = [server for server in environment.servers if server.kind == "schema"]
    more = "+" if any(server.kind == "database" for server in environment.servers) else ""
    return f"{sum(len(server.tables) for server in known)}{more}" if known else "–"


def environment(found: t.Environment) -> RenderableType:
    """One environment."""
    servers = {
        f"server {server.name}": f"state: {server.kind}"
        + (f", tables: {', '.join(server.tables)}" if server.tables else "")
        + (", tables: as its SQL makes them in each database" if server.kind == "database" else "")
        for server in found.servers
    }
    return facts(
        environment=f"{found.name}@{found.hash}",
        clock=found.clock.isoformat(),
        seed=found.seed,
        loaded=found.loaded_at.isoformat(timespec="seconds"),
        **servers,
    )


def rollouts(found: Iterable[t.Rollout]) -> RenderableType:
    """A table of rollouts."""
    shown = table("rollout", "environment", "turn", "status", "lease", right=("turn",))
    for rollout in found:
        lease = left(rollout.expires_at) if rollout.status == "open" else ""
        shown.add_row(
            rollout.id, rollout.environment.partition("@")[0], str(rollout.turn), status(rollout.status), lease
        )
    return shown if shown.row_count else Text("No rollouts. Open one: megamcp rollout open ENVIRONMENT", style="dim")


def new_rollouts(made: Sequence[t.Rollout]) -> Text:
    """Rollouts that were just made: what one needs to go on is the URL."""
    lines = (Text.assemble(("● ", "green"), rollout.id, "\n  ", (rollout.url, "cyan")) for rollout in made)
    return Text("\n").join(lines)


def rollout(found: t.Rollout) -> RenderableType:
    """One rollout."""
    return facts(
        rollout=found.id,
        url=found.url,
        environment=found.environment,
        status=status(found.status),
        group=found.group,
        turn=found.turn,
        depth=found.depth,
        seq=found.seq,
        stands_on=found.checkpoint,
        forked_from=found.parent_checkpoint,
        seed=found.seed,
        labels=" ".join(f"{name}={value}" for name, value in found.labels.items()) or None,
        created=found.created_at.isoformat(timespec="seconds"),
        lease=f"{left(found.expires_at)} (until {found.expires_at.isoformat(timespec='seconds')})",
    )


def checkpoints(found: Iterable[t.Checkpoint]) -> RenderableType:
    """A table of checkpoints."""
    shown = table("checkpoint", "turn", "seq", "digest", "label", "lease", right=("turn", "seq"))
    for point in found:
        shown.add_row(
            point.id,
            str(point.turn),
            str(point.seq),
            short(point.digest),
            Text(point.label or ""),
            left(point.expires_at),
        )
    return shown if shown.row_count else Text("No checkpoints.", style="dim")


def checkpoint(found: t.Checkpoint) -> RenderableType:
    """One checkpoint."""
    return facts(
        checkpoint=found.id,
        label=found.label,
        rollout=found.rollout,
        environment=found.environment,
        parent=found.parent,
        turn=found.turn,
        depth=found.depth,
        seq=found.seq,
        digest=found.digest,
        pinned_by=", ".join(found.pins) or None,
        lease=f"{left(found.expires_at)} (until {found.expires_at.isoformat(timespec='seconds')})",
    )


def short(digest: str | None) -> str:
    """A digest's first characters, enough to tell two apart by eye."""
    return digest.removeprefix("sha256:")[:10] if digest else "—"


def tools(found: Iterable[t.Tool]) -> RenderableType:
    """A table of tools: `*` marks what must be given."""
    shown = table("tool", "arguments", "what it does")
    for tool in found:
        extra = tool.model_extra or {}
        schema = extra.get("inputSchema") or {}
        required = set(schema.get("required") or ())
        names = [f"{name}*" if name in required else name for name in schema.get("properties") or {}]
        sentence = str(extra.get("description") or "").strip().partition("\n")[0].partition(". ")[0]
        reads = bool((extra.get("annotations") or {}).get("readOnlyHint"))
        shown.add_row(Text(tool.name, style="" if reads else "bold"), Text(" ".join(names), style="dim"), sentence)
    return shown


def events(found: Iterable[t.Event]) -> RenderableType:
    """The journal, one row a line."""
    shown = table("seq", "what", "detail", right=("seq",))
    for event in found:
        shown.add_row(str(event.seq), Text(event.kind, style=KIND_STYLE.get(event.kind, "")), event_detail(event))
    return shown if shown.row_count else Text("Nothing yet.", style="dim")


def event_detail(event: t.Event) -> Text:
    """What one journal row says, in a line."""
    if event.kind == "call":
        mark = ("✗ ", "red") if event.is_error else ("✓ ", "green")
        if event.state in ("running", "unknown"):
            mark = ("… " if event.state == "running" else "? ", "yellow")
        took = f"  {event.duration_ms:.0f} ms" if event.duration_ms is not None else ""
        return Text.assemble(mark, event.tool or "", (f" {value(event.arguments or {})}", "dim"), (took, "dim"))
    data = dict(event.data or {})
    if isinstance(data.get("digest"), str):
        data["digest"] = short(data["digest"])
    first = data.pop("checkpoint", "")
    rest = " ".join(f"{name}={value(v)}" for name, v in data.items() if v not in (None, "", {}))
    return Text.assemble(str(first), " " if first and rest else "", (rest, "dim"))


def query(found: t.QueryResult, width: int) -> RenderableType:
    """Rows of a query: a table where it fits, else one value a line."""
    cells = [[value(cell) for cell in row] for row in found.rows]
    natural = sum(max(len(name), *(len(row[i]) for row in cells), 0) + 3 for i, name in enumerate(found.columns))
    count = f"{len(cells)} row{'' if len(cells) == 1 else 's'}{' and more' if found.truncated else ''}"
    note = Text(count, style="dim")
    if natural > width and len(found.columns) > 1:
        records = (listing(dict(zip(found.columns, row, strict=True))) for row in cells)
        return Text("\n\n").join([*records, note])
    shown = table(*found.columns)
    for row in cells:
        shown.add_row(*map(Text, row))
    return Group(shown, note)


def diff(found: t.Diff, *, limit: int = SHOWN_ROWS) -> RenderableType:
    """Every table, file and document that differs: `+` added, `-` removed, `~` changed."""
    lines = list(diff_lines(found, limit=limit))
    return Group(*lines) if lines else Text(f"No difference between {found.from_} and {found.to}.", style="dim")


def diff_lines(found: t.Diff, *, limit: int = SHOWN_ROWS) -> Iterator[Text]:
    """The same, a line at a time."""
    for server, state in sorted(found.servers.items()):
        for name, rows in sorted(state.tables.items()):
            parts = (("+", len(rows.added)), ("-", len(rows.removed)), ("~", len(rows.changed)))
            counts = " ".join(f"{sign}{count}" for sign, count in parts if count)
            more = f" of {rows.total} rows that differ" if rows.truncated else ""
            yield Text.assemble((f"{server}.{name}", "bold"), (f"  {counts}{more}", "dim"))
            shown = list(row_lines(rows))
            for line in shown[:limit]:
                yield Text.assemble("  ", line)
            if len(shown) > limit:
                yield Text(f"    … {len(shown) - limit} more (--json shows all)", style="dim")
        if state.files is not None:
            yield from _file_lines(server, state.files, limit)
        if state.document is not None:
            yield from _document_lines(server, state.document, limit)


def _file_lines(server: str, files: t.FilesDiff, limit: int) -> Iterator[Text]:
    """The files of one server's diff, each with so many lines of what differs in it."""
    kinds = (("+", "green", files.added), ("-", "red", files.removed), ("~", "yellow", files.changed))
    counts = " ".join(f"{sign}{len(found)}" for sign, _, found in kinds if found)
    more = " and more" if files.truncated else ""
    yield Text.assemble((f"{server} files", "bold"), (f"  {counts}{more}", "dim"))
    changes = sorted(((sign, style, change) for sign, style, found in kinds for change in found), key=_path)
    for sign, style, change in changes[:limit]:
        told = change.kind if change.size is None else f"{change.size} bytes"
        yield Text.assemble("  ", (f"{sign} ", style), plain(change.path), (f"  {told}", "dim"))
        lines = (change.text or "").splitlines()[2:]  # the names are said already
        for line in lines[:limit]:
            yield Text(f"      {plain(line)}", style=_DIFF_STYLE.get(line[:1], "dim"))
        if len(lines) > limit:
            yield Text(f"      … {len(lines) - limit} more lines (--json shows all)", style="dim")
    if len(changes) > limit:
        yield Text(f"    … {len(changes) - limit} more (--json shows all)", style="dim")


def _path(found: tuple[str, str, t.FileChange]) -> str:
    return found[2].path


def plain(text: str) -> str:
    """The text as a terminal may be given it: what would move or colour it is written out."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def _document_lines(server: str, found: t.DocumentDiff, limit: int) -> Iterator[Text]:
    """The places of one server's document."""
    parts = (("+", len(found.added)), ("-", len(found.removed)), ("~", len(found.changed)))
    counts = " ".join(f"{sign}{count}" for sign, count in parts if count)
    more = f" of {found.total} places that differ" if found.truncated else ""
    yield Text.assemble((f"{server} document", "bold"), (f"  {counts}{more}", "dim"))
    shown = [
        *(("+ ", "green", place.path, value(place.value)) for place in found.added),
        *(("- ", "red", place.path, value(place.value)) for place in found.removed),
        *(("~ ", "yellow", one.path, f"{value(one.before)} → {value(one.after)}") for one in found.changed),
    ]
    for sign, style, path, told in shown[:limit]:
        yield Text.assemble("  ", (sign, style), plain(path) or "(all of it)", " ", (told, "dim"))
    if len(shown) > limit:
        yield Text(f"    … {len(shown) - limit} more (--json shows all)", style="dim")


def row_lines(rows: t.TableDiff, table: str = "") -> Iterator[Text]:
    """The rows of one table's diff, with their sign; the table's name between, if given."""
    name = f"{table} " if table else ""
    for row in rows.added:
        yield Text.assemble(("+ ", "green"), name, row_text(row))
    for row in rows.removed:
        yield Text.assemble(("- ", "red"), name, row_text(row))
    for change in rows.changed:
        yield Text.assemble(("~ ", "yellow"), name, change_text(change))


def row_text(row: dict[str, Any]) -> str:
    """A row; columns that are null are left out."""
    return " ".join(f"{name}={value(cell)}" for name, cell in row.items() if cell is not None)


def change_text(change: t.RowChange) -> str:
    """What names a changed row, and only what changed in it."""
    before, after = change.before, change.after
    same = [name for name in before if name in after and before[name] == after[name]]
    name = "id" if "id" in same else next(iter(same), None)
    columns = [
        f"{column} {value(before.get(column))} → {value(after.get(column))}"
        for column in dict.fromkeys((*before, *after))
        if before.get(column) != after.get(column)
    ]
    return f"{name}={value(before[name])}  {', '.join(columns)}" if name else ", ".join(columns)


def value(cell: Any) -> str:
    """A value in one line."""
    if cell is None:
        return "∅"
    if isinstance(cell, str):
        return " ".join(cell.split())
    return json.dumps(cell, ensure_ascii=False, default=str)

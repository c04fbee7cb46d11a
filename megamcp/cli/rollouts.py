"""`megamcp rollout …`"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.json import JSON
from rich.text import Text

from megamcp.cli import arguments as args
from megamcp.cli import show
from megamcp.cli.output import TOOL_ERROR, Output, talks_to_gateway

if TYPE_CHECKING:
    from megamcp.client import Client, Rollout, SeedChoice, ToolResult
    from megamcp.types import Rollout as View

app = typer.Typer(no_args_is_help=True, help="Rollouts: one agent's run, with a state of its own.")

RolloutId = Annotated[str, typer.Argument(help="A rollout's id (ro_…).", metavar="ROLLOUT")]
CheckpointId = Annotated[str, typer.Argument(help="A checkpoint's id (cp_…).", metavar="CHECKPOINT")]
Count = Annotated[int, typer.Option("--count", "-n", min=1, help="How many.")]
Group = Annotated[str | None, typer.Option("--group", help="Rollouts that are compared with each other.")]
Ttl = Annotated[float | None, typer.Option("--ttl", help="Lease in seconds. Omitted: the gateway's default.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="key=value; may be repeated.")]
Point = "A checkpoint's id, base or head."


@app.command("open")
@talks_to_gateway
async def open_(
    client: "Client",
    out: Output,
    environment: Annotated[str, typer.Argument(help="Name, or name@version.")],
    count: Count = 1,
    group: Group = None,
    ttl: Ttl = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the environment's randomness.")] = None,
    label: Labels = None,
) -> None:
    """Open rollouts. Point any MCP client at the URL that is shown."""
    made = await client.open_many(
        environment, count, group=group, ttl_s=ttl, seed=seed, labels=args.labels(label or ())
    )
    _show_new(out, made)


@app.command("list")
@talks_to_gateway
async def list_(
    client: "Client",
    out: Output,
    group: Group = None,
    status: Annotated[Literal["open", "closed", "expired"] | None, typer.Option("--status", help="Only these.")] = None,
    environment: Annotated[str | None, typer.Option("--environment", help="Name, or name@version.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 100,
) -> None:
    """List rollouts, oldest first."""
    found: list[View] = []
    async for rollout in client.rollouts(group=group, status=status, environment=environment):
        if len(found) == limit:
            out.errors.print(f"There are more than {limit}; see --limit.", style="dim")
            break
        found.append(rollout.view)
    out.answer({"rollouts": found}, lambda: show.rollouts(found))


@app.command("show")
@talks_to_gateway
async def show_(client: "Client", out: Output, rollout: RolloutId) -> None:
    """Show a rollout."""
    found = (await client.rollout(rollout)).view
    out.answer(found, lambda: show.rollout(found))


@app.command()
@talks_to_gateway
async def renew(client: "Client", out: Output, rollout: RolloutId, ttl: Ttl = None) -> None:
    """Extend a rollout's lease, counted from now."""
    found = (await (await client.rollout(rollout)).renew(ttl)).view
    out.answer(found, lambda: show.rollout(found))


@app.command()
@talks_to_gateway
async def close(
    client: "Client",
    out: Output,
    rollouts: Annotated[list[str], typer.Argument(help="Rollouts' ids.", metavar="ROLLOUT...")],
) -> None:
    """Release rollouts. Their checkpoints live on until their own leases end."""
    for identifier in rollouts:
        await (await client.rollout(identifier)).close()
    out.answer({"closed": rollouts}, "\n".join(f"{identifier} is closed." for identifier in rollouts))


# -- what the agent sees ----------------------------------------------------------------------------------------------


@app.command()
@talks_to_gateway
async def tools(client: "Client", out: Output, rollout: RolloutId) -> None:
    """List the tools as the agent sees them.

    Bold ones write; * marks what must be given.
    """
    found = await (await client.rollout(rollout)).tools()
    out.answer({"tools": found}, lambda: show.tools(found))


@app.command()
@talks_to_gateway
async def call(
    client: "Client",
    out: Output,
    rollout: RolloutId,
    tool: Annotated[str, typer.Argument(help="The tool's name.")],
    argument: Annotated[
        list[str] | None, typer.Argument(help="key=value, or key:=JSON.", metavar="[KEY=VALUE]...")
    ] = None,
    arguments: Annotated[
        str | None, typer.Option("--arguments", help="All as one JSON object; @FILE reads a file, - stdin.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--idempotency-key", help="The same key again gives the recorded result.")
    ] = None,
) -> None:
    """Call a tool as the agent would.

    Exit status 3 when the tool answers with an error.
    """
    whole = args.from_json(arguments) if arguments is not None else {}
    pairs = args.pairs(argument or ())
    target = await client.rollout(rollout)
    schema = await _input_schema(target, tool) if any(not is_json for _, _, is_json in pairs) else {}
    result = await target.call(tool, {**whole, **args.from_pairs(pairs, schema)}, idempotency_key=key)
    _show_result(out, result)
    if result.is_error:
        raise typer.Exit(TOOL_ERROR)


async def _input_schema(rollout: "Rollout", tool: str) -> dict[str, Any]:
    for known in await rollout.tools():
        if known.name == tool:
            return dict((known.model_extra or {}).get("inputSchema") or {})
    return {}


def _show_result(out: Output, result: "ToolResult") -> None:
    if out.as_json:
        out.json(result.raw)
    elif result.is_error:
        code = f"{result.code}: " if result.code else ""
        out.print(Text.assemble(("✗ ", "red"), (code, "bold red"), (result.text, "red")))
    elif result.value is not None:
        out.print(JSON.from_data(result.value))
    else:
        out.print(Text(result.text))


# -- moving in history ------------------------------------------------------------------------------------------------


@app.command()
@talks_to_gateway
async def checkpoint(
    client: "Client",
    out: Output,
    rollout: RolloutId,
    label: Annotated[str | None, typer.Option("--label", help="Free text.")] = None,
    turn: Annotated[int | None, typer.Option("--turn", min=0, help="Omitted: the one before + 1.")] = None,
    ttl: Ttl = None,
) -> None:
    """Checkpoint a rollout as it is now."""
    made = (await (await client.rollout(rollout)).checkpoint(label, turn=turn, ttl_s=ttl)).view
    out.answer(made, lambda: show.checkpoint(made))


@app.command()
@talks_to_gateway
async def checkpoints(client: "Client", out: Output, rollout: RolloutId) -> None:
    """List a rollout's checkpoints, oldest first."""
    found = [point.view for point in await (await client.rollout(rollout)).checkpoints()]
    out.answer({"checkpoints": found}, lambda: show.checkpoints(found))


@app.command()
@talks_to_gateway
async def fork(
    client: "Client",
    out: Output,
    checkpoint: CheckpointId,
    count: Count = 1,
    group: Group = None,
    ttl: Ttl = None,
    seed: Annotated[str, typer.Option("--seed", help="inherit, fresh, or a number.")] = "inherit",
    label: Labels = None,
) -> None:
    """Open rollouts that start from a checkpoint."""
    chosen = _seed(seed)
    point = await client.checkpoint(checkpoint)
    made = await point.fork(count, group=group, ttl_s=ttl, seed=chosen, labels=args.labels(label or ()))
    _show_new(out, made)


def _seed(text: str) -> "SeedChoice":
    match text:
        case "inherit":
            return "inherit"
        case "fresh":
            return "fresh"
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter("inherit, fresh, or a number", param_hint="--seed") from None


@app.command()
@talks_to_gateway
async def rollback(client: "Client", out: Output, rollout: RolloutId, checkpoint: CheckpointId) -> None:
    """Move a rollout back to a checkpoint of its own, or to the one that it was forked from."""
    found = (await (await client.rollout(rollout)).rollback(checkpoint)).view
    out.answer(found, lambda: show.rollout(found))


def _show_new(out: Output, made: list["Rollout"]) -> None:
    views = [rollout.view for rollout in made]
    out.answer({"rollouts": views}, lambda: show.new_rollouts(views))


# -- reading ----------------------------------------------------------------------------------------------------------


@app.command()
@talks_to_gateway
async def diff(
    client: "Client",
    out: Output,
    rollout: RolloutId,
    from_: Annotated[str, typer.Option("--from", help=Point)] = "base",
    to: Annotated[str, typer.Option("--to", help=Point)] = "head",
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows, files and lines shown of each.")] = show.SHOWN_ROWS,
) -> None:
    """Show what differs between two points: rows, and files with their lines."""
    found = await (await client.rollout(rollout)).diff(from_, to)
    out.answer(found, lambda: show.diff(found, limit=rows))


@app.command()
@talks_to_gateway
async def digest(
    client: "Client",
    out: Output,
    rollout: RolloutId,
    at: Annotated[str, typer.Option("--at", help=Point)] = "head",
    counters: Annotated[bool, typer.Option("--counters", help="Sequences, clock and random position too.")] = False,
) -> None:
    """Show the digest of the state at a point: equal states have equal digests.

    The memory of a process has none: its server's part is `opaque`, and there is no digest of the whole.
    """
    found = await (await client.rollout(rollout)).digest(at)
    shown = {f"server {server}": part for server, part in found.servers.items()}
    shown |= {f"files {server}": part for server, part in found.files.items()}
    if counters:
        shown |= {
            f"{server} {name}": str(number)
            for server, known in found.counters.items()
            for name, number in known.items()
        }
    out.answer(found, lambda: show.facts(digest=found.digest or "—", **shown))


@app.command()
@talks_to_gateway
async def events(
    client: "Client",
    out: Output,
    rollout: RolloutId,
    after: Annotated[int, typer.Option("--after", min=0, help="Only rows numbered above this.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the rollout ends.")] = False,
) -> None:
    """Show the journal, the ancestors' part first.

    With --follow --json: one JSON document a line.
    """
    target = await client.rollout(rollout)
    if not follow:
        found = await target.events(after)
        out.answer({"events": found}, lambda: show.events(found))
        return
    async for event in target.follow(after):
        if out.as_json:
            out.json(event, indent=None)
        else:
            out.print(Text.assemble(f"{event.seq:>5}  {event.kind:<10}  ", show.event_detail(event)))


@app.command()
@talks_to_gateway
async def query(
    client: "Client",
    out: Output,
    rollout: RolloutId,
    sql: Annotated[str, typer.Argument(help="One SELECT.")],
    server: Annotated[str | None, typer.Option("--server", help="May be left out where one has SQL state.")] = None,
    at: Annotated[str | None, typer.Option("--at", help=Point)] = None,
) -> None:
    """Read a rollout's state with SQL."""
    found = await (await client.rollout(rollout)).query(sql, server=server, at=at)
    out.answer(found, lambda: show.query(found, out.console.width))


@app.command()
@talks_to_gateway
async def dsn(
    client: "Client",
    out: Output,
    rollout: RolloutId,
    server: Annotated[str | None, typer.Option("--server", help="May be left out where one has a database.")] = None,
) -> None:
    """Print the DSN of a rollout's own database: `psql "$(megamcp rollout dsn ro_…)"`."""
    found = await (await client.rollout(rollout)).dsn(server)
    out.answer(found, lambda: Text(found.dsn, no_wrap=True, overflow="ignore"))

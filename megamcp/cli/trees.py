"""`megamcp tree`"""

from typing import TYPE_CHECKING, Annotated

import typer

from megamcp.cli.output import Output

if TYPE_CHECKING:
    from megamcp.client import Client


async def tree(
    client: "Client",
    out: Output,
    rollout: Annotated[
        str | None, typer.Argument(help="Show this rollout and its relatives.", metavar="[ROLLOUT]")
    ] = None,
    group: Annotated[str | None, typer.Option("--group", help="Show this group and its ancestors.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Without either: so many of the newest.")] = 200,
) -> None:
    """Show how rollouts and checkpoints hang together."""
    from megamcp.tree import collect, document, draw

    if rollout is not None and group is not None:
        raise typer.BadParameter("give a rollout or --group, not both", param_hint="--group")
    forest = await collect(client, rollout=rollout, group=group, limit=limit)
    out.answer(document(forest), lambda: draw(forest))

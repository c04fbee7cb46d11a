"""`megamcp checkpoint …`"""

from typing import TYPE_CHECKING, Annotated

import typer

from megamcp.cli import show
from megamcp.cli.output import Output, talks_to_gateway

if TYPE_CHECKING:
    from megamcp.client import Client

app = typer.Typer(no_args_is_help=True, help="Checkpoints: points that can be forked and gone back to.")

CheckpointId = Annotated[str, typer.Argument(help="A checkpoint's id (cp_…).", metavar="CHECKPOINT")]
Owner = Annotated[str, typer.Option("--owner", help="Who holds it.")]
Ttl = Annotated[float | None, typer.Option("--ttl", help="Seconds. Omitted: the gateway's default.")]


@app.command("show")
@talks_to_gateway
async def show_(client: "Client", out: Output, checkpoint: CheckpointId) -> None:
    """Show a checkpoint."""
    found = (await client.checkpoint(checkpoint)).view
    out.answer(found, lambda: show.checkpoint(found))


@app.command()
@talks_to_gateway
async def pin(client: "Client", out: Output, checkpoint: CheckpointId, owner: Owner, ttl: Ttl = None) -> None:
    """Hold a checkpoint under a name, whatever its own lease says."""
    found = (await (await client.checkpoint(checkpoint)).pin(owner, ttl)).view
    out.answer(found, lambda: show.checkpoint(found))


@app.command()
@talks_to_gateway
async def unpin(client: "Client", out: Output, checkpoint: CheckpointId, owner: Owner) -> None:
    """Let go of a pin."""
    await (await client.checkpoint(checkpoint)).unpin(owner)
    out.answer({"checkpoint": checkpoint, "unpinned": owner}, f"{owner} holds {checkpoint} no more.")


@app.command()
@talks_to_gateway
async def renew(client: "Client", out: Output, checkpoint: CheckpointId, ttl: Ttl = None) -> None:
    """Extend a checkpoint's lease, counted from now."""
    found = (await (await client.checkpoint(checkpoint)).renew(ttl)).view
    out.answer(found, lambda: show.checkpoint(found))


@app.command()
@talks_to_gateway
async def release(client: "Client", out: Output, checkpoint: CheckpointId) -> None:
    """End a checkpoint's lease. Rollouts that stand on it are not touched."""
    await (await client.checkpoint(checkpoint)).release()
    out.answer({"checkpoint": checkpoint, "released": True}, f"{checkpoint} is released.")

"""`megamcp env …`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamcp.cli import show
from megamcp.cli.output import Output, talks_to_gateway

if TYPE_CHECKING:
    from megamcp.client import Client

app = typer.Typer(no_args_is_help=True, help="Environments: what can be opened.")


@app.command("list")
@talks_to_gateway
async def list_(client: "Client", out: Output) -> None:
    """List what can be opened."""
    found = await client.environments()
    out.answer({"environments": found}, lambda: show.environments(found))


@app.command("show")
@talks_to_gateway
async def show_(
    client: "Client",
    out: Output,
    name: Annotated[str, typer.Argument(help="Name, or name@version.")],
) -> None:
    """Show an environment: its clock, servers and tables."""
    found = await client.environment(name)
    out.answer(found, lambda: show.environment(found))


@app.command()
@talks_to_gateway
async def load(
    client: "Client",
    out: Output,
    path: Annotated[str, typer.Argument(help="Folder with an environment.toml, or an mcp.json. The gateway reads it.")],
) -> None:
    """Load an environment. Loading the same content again changes nothing."""
    out.busy(f"Loading {path} …")
    found = await client.load_environment(_absolute(path))
    out.answer(found, lambda: show.environment(found))


def _absolute(path: str) -> str:
    # The gateway has a working directory of its own. A path that isn't here is meant for its machine.
    here = Path(path).expanduser()
    return str(here.resolve()) if here.exists() else path

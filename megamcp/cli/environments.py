"""`megamcp env …`"""

import asyncio
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamcp.cli import show
from megamcp.cli.bar import Bar
from megamcp.cli.output import FAILED, Output, talks_to_gateway
from megamcp.errors import BadRequest

if TYPE_CHECKING:
    from megamcp.client import Client

CONSENT_S = 600.0
POLL_S = 1.0

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
    path: Annotated[
        str | None,
        typer.Argument(
            help="Folder with an environment.toml, or an mcp.json. The gateway reads it.", show_default=False
        ),
    ] = None,
    from_dsn: Annotated[
        str | None,
        typer.Option(
            envvar="MEGAMCP_FROM_DSN",
            help="Make the folder from this PostgreSQL first. Its password may also be in PGPASSWORD or ~/.pgpass.",
            metavar="DSN",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            help="With --from-dsn: the PostgreSQL schema to take; else public, or all for kind database.",
            show_default=False,
        ),
    ] = None,
    tables: Annotated[
        list[str] | None, typer.Option(help="With --from-dsn: only these tables and views; repeat it.", metavar="NAME")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="With --from-dsn: the environment's name; else the database's.", show_default=False),
    ] = None,
    kind: Annotated[str, typer.Option(help="With --from-dsn: state as `schema` or as `database`.")] = "schema",
    server_entry: Annotated[
        str | None,
        typer.Option(
            help="With --from-dsn: the tool server, module:object. Kind database has the bundled sql server if not.",
            metavar="ENTRY",
            show_default=False,
        ),
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="With --from-dsn: the new folder; else ./NAME.", show_default=False)
    ] = None,
) -> None:
    """Load an environment. Loading the same content again changes nothing."""
    made = False
    with Bar(out) as bar:
        if from_dsn is not None:
            from megamcp.loading.export import Wanted, export

            if path is not None:
                raise BadRequest("Give a path or --from-dsn, not both.", hint="--into names the new folder.")
            wanted = Wanted(from_dsn, schema, tuple(tables or ()), kind, name, server_entry)
            path = str(await export(wanted, into, bar.progress))
            made = True
        if path is None:
            raise BadRequest("What should be loaded?", hint="Give a folder, or --from-dsn.")
        try:
            found = await client.load_environment(_absolute(path), progress=bar.progress)
        except BaseException as error:
            # Kept only for a gateway elsewhere, to which it has to be brought.
            if made and getattr(error, "code", None) != "environment_not_there":
                shutil.rmtree(path, ignore_errors=True)
            raise
    out.answer(found, lambda: show.environment(found))


@app.command()
@talks_to_gateway
async def authorize(
    client: "Client",
    out: Output,
    name: Annotated[str, typer.Argument(help="Name, or name@version.")],
    server: Annotated[
        str | None, typer.Argument(help="One of its servers; else each with a url.", show_default=False)
    ] = None,
    again: Annotated[bool, typer.Option(help="Forget the consent that was given, and ask for it anew.")] = False,
    wait: Annotated[bool, typer.Option(help="Open the page here, and wait until consent is given.")] = True,
) -> None:
    """Have a person consent that the gateway uses servers at URLs."""
    names = [server] if server else [one.name for one in (await client.environment(name)).servers if one.url]
    urls: dict[str, str | None] = {}
    for one in names:
        urls[one] = url = await client.authorize(name, one, again=again)
        if url is None:
            continue
        out.errors.print(f"Open this page to authorize {one}:\n{url}", soft_wrap=True, markup=False)
        if wait:
            typer.launch(url)
            give_up = time.monotonic() + CONSENT_S
            while urls[one] is not None and time.monotonic() < give_up:
                await asyncio.sleep(POLL_S)
                urls[one] = await client.authorize(name, one)
    waiting = {one: url for one, url in urls.items() if url is not None}
    out.answer(
        {"authorized": [one for one in names if one not in waiting], "waiting": waiting},
        lambda: "\n".join(f"{one}: {'waits for consent' if one in waiting else 'authorized'}" for one in names),
    )
    if waiting and wait:
        raise typer.Exit(FAILED)


def _absolute(path: str) -> str:
    # The gateway has a working directory of its own. A path that isn't here is meant for its machine.
    here = Path(path).expanduser()
    return str(here.resolve()) if here.exists() else path

"""The command line. A thin shell: every command is a few calls of `megamcp.client`, or starts what another module runs.

`output` has what commands share, `show` how things look, `arguments` how tool arguments are written; each other module
is one group of commands. Commands import what they need when they run, so that `megamcp --help` is quick.
"""

from typing import Annotated

import typer

from megamcp import __version__
from megamcp.cli import checkpoints, doctoring, environments, keys, rollouts, serving, watching
from megamcp.cli.output import Json, Output, talks_to_gateway
from megamcp.cli.trees import tree

app = typer.Typer(
    name="megamcp",
    help="An MCP gateway that gives every rollout its own state: checkpoint, fork, roll back, diff.",
    epilog="Start with `megamcp demo`, then `megamcp serve` and `megamcp rollout open retail`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serving.serve)
app.command()(serving.demo)
app.command()(doctoring.doctor)
app.command("tool-server")(serving.tool_server)
app.add_typer(environments.app, name="env")
app.add_typer(rollouts.app, name="rollout")
app.add_typer(checkpoints.app, name="checkpoint")
app.add_typer(keys.app, name="key")
app.command()(talks_to_gateway(tree))
app.command()(talks_to_gateway(watching.top))


@app.command()
def version(as_json: Json = False) -> None:
    """Show the version."""
    Output(as_json).answer({"version": __version__}, __version__)


def _show_version(wanted: bool) -> None:
    if wanted:
        Output(as_json=False).print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_show_version, show_default=False
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point."""
    app()

"""`megamcp doctor`: what works on this machine, and why the rest doesn't."""

import asyncio
import logging
from dataclasses import asdict

import typer
from rich.console import Group
from rich.text import Text

from megamcp.cli.output import FAILED, Json, Output, failing_clearly


def doctor(as_json: Json = False) -> None:
    """See what works on this machine, and why the rest doesn't.

    Tries out PostgreSQL, the file system and the runtimes of sandboxes, with the settings that a gateway would have
    (MEGAMCP_…). Exit status 1 where a gateway could not start.
    """
    out = Output(as_json)
    with failing_clearly(out):
        from megamcp import __version__
        from megamcp.cli.serving import settings_of
        from megamcp.doctor import Finding, examine

        logging.getLogger("sandboxes").setLevel(logging.ERROR)
        settings = settings_of(log_level=None)
        found = asyncio.run(examine(settings))
        ready = all(finding.works for finding in found if finding.needed)

        def lines(finding: Finding) -> Text:
            mark = ("✔ ", "green") if finding.works else ("✘ ", "red" if finding.needed else "yellow")
            hint = f"\n    {finding.hint}" if finding.hint and not finding.works else ""
            return Text.assemble(mark, (finding.name, "bold"), f"  {finding.told}", (hint, "dim"))

        document = {"version": __version__, "ready": ready, "findings": [asdict(finding) for finding in found]}
        out.answer(document, lambda: Group(*map(lines, found)))
        if not ready:
            raise typer.Exit(FAILED)

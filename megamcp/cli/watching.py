"""`megamcp top`: what a gateway is doing, as it does it."""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import typer

from megamcp.cli.output import Output

if TYPE_CHECKING:
    from megamcp.client import Client


async def top(
    client: "Client",
    out: Output,
    once: Annotated[bool, typer.Option("--once", help="Tell once of what happens in --interval, and end.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Watch calls, times and errors by tool, rollouts and sandboxes.

    With --json a document for each look, one a line; with --once one document. `--once --interval 0.1` is quick.
    """
    from rich.live import Live

    from megamcp.top import Look, document, draw, read

    async def look() -> Look:
        return read(await client.metrics(), time.monotonic())

    old = await look()
    if once:
        await asyncio.sleep(interval)
        told = document(await look(), old)
        out.answer(told, lambda: draw(told))
        return
    out.quiet()
    live = Live(draw(document(old, None)), console=out.console, screen=out.console.is_terminal, auto_refresh=False)
    with contextlib.nullcontext() if out.as_json else live:
        while True:
            await asyncio.sleep(interval)
            new = await look()
            told = document(new, old)
            if out.as_json:
                out.json(told, indent=None)
            else:
                live.update(draw(told), refresh=True)
            old = new

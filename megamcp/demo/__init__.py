"""`megamcp demo`: the whole idea on the bundled store, told step by step, every claim checked.

`gateway` starts a gateway of the demo's own on a free port and in a temporary folder, so that it works anywhere and
leaves nothing behind; `story` is what happens on it; `narrator` tells it and keeps account of the claims. Agents are
plain MCP clients (the official SDK) that know a URL and nothing else. A claim that does not hold ends the demo with an
error that says which one.
"""

import asyncio
import contextlib
import importlib
import signal
from pathlib import Path

from megamcp.cli.output import Output
from megamcp.demo.gateway import own_gateway
from megamcp.demo.narrator import Narrator

__all__ = ["run"]


def run(out: Output, *, data_dir: Path | None = None, url: str | None = None) -> None:
    """Run it to its end, on the gateway at `url` or one of its own.

    Raises `MegaMCPError` when a claim does not hold or the gateway does not start.
    """
    tell = Narrator(out)
    try:
        asyncio.run(_run(tell, data_dir, url))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None  # SIGTERM; to the command line it is the same
    finally:
        tell.quiet()


async def _run(tell: Narrator, data_dir: Path | None, url: str | None) -> None:
    # Importing the SDK takes a second: it happens while the gateway starts.
    story = asyncio.create_task(asyncio.to_thread(importlib.import_module, "megamcp.demo.story"))
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError):  # asked to stop: what was started is still taken down
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with contextlib.AsyncExitStack() as stack:
        if url is None:
            url = await stack.enter_async_context(own_gateway(tell, data_dir))
        await story
        from megamcp.client import Client
        from megamcp.demo.story import Story

        client = await stack.enter_async_context(Client(url))
        await Story(tell, client).play()
        tell.waiting("Stopping …")
    tell.end("Nothing is left behind." if data_dir is None else f"The data is in {data_dir}.")

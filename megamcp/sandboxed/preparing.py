"""What the sandboxes of an environment's servers share is made when it is loaded: packages are got, entries imported.
No first call waits for that, or finds out that there is no network or no such module.

It isn't kept: a keeper that doesn't have it, or not any more, makes it at the first call.
"""

import time

from megamcp.environments import LoadedEnvironment
from megamcp.errors import MegaMCPError, Unprocessable
from megamcp.loading.units import Progress
from megamcp.sandboxed.boxes import spec_of
from megamcp.sandboxed.host import Host, translated


async def prepare(host: Host, environment: LoadedEnvironment, progress: Progress) -> None:
    """Tells of each server. Where no runtime works, or an entry doesn't, that is told, and no error; else raises what a
    first call would."""

    def tell(remark: str) -> None:
        progress(remark, 0, 0)

    for server in environment.servers:
        if server.process is None:
            continue
        entry = server.config.entry
        try:
            kind = await host.kind(server.process.runtime, entry=entry is not None, image=server.process.image)
        except Unprocessable as error:
            tell(f"{server.name}: {error.message} {error.hint or ''}".rstrip())
            continue
        keeper, _ = await host.keeper()
        tell(f"{server.name}: what {server.config.command or entry} needs is got ready ({kind})")
        began = time.monotonic()
        try:
            with translated(server.name):
                await keeper.prepare(spec_of(server, environment, kind))
        except MegaMCPError as error:
            if entry is not None:  # it may be written later, or get another runtime
                tell(f"{environment.full_name} is loaded, but {server.name} does not work yet: {error.message}")
                continue
            tell(f"{environment.full_name} is loaded, but {server.name} is not ready; its first call will try again.")
            raise
        tell(f"{server.name}: ready after {time.monotonic() - began:.1f} s")

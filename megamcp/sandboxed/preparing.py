"""What the sandboxes of an environment's commands share is made when it is loaded, and its packages are got then: no
first call waits for that, or finds out that there is no network.

It isn't kept: a keeper that doesn't have it, or not any more, makes it at the first call.
"""

import time

from megamcp.environments import LoadedEnvironment
from megamcp.errors import MegaMCPError, Unprocessable
from megamcp.loading.units import Progress
from megamcp.sandboxed.boxes import spec_of
from megamcp.sandboxed.host import Host, translated


async def prepare(host: Host, environment: LoadedEnvironment, progress: Progress) -> None:
    """Tells of each server. Where no runtime works that is told, and no error. Raises what a first call would."""

    def tell(remark: str) -> None:
        progress(remark, 0, 0)

    for server in environment.servers:
        if server.process is None or server.config.command is None:
            continue
        try:
            kind = await host.kind(server.process.runtime, entry=False, image=server.process.image)
        except Unprocessable as error:
            tell(f"{server.name}: {error.message} {error.hint or ''}".rstrip())
            continue
        keeper, _ = await host.keeper()
        tell(f"{server.name}: what {server.config.command} needs is got ready ({kind})")
        began = time.monotonic()
        try:
            with translated(server.name):
                await keeper.prepare(spec_of(server, environment, kind))
        except MegaMCPError:
            tell(f"{environment.full_name} is loaded, but {server.name} is not ready; its first call will try again.")
            raise
        tell(f"{server.name}: ready after {time.monotonic() - began:.1f} s")

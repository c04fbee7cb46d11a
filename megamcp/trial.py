"""An environment that somebody watches being loaded is tried out: what would fail at the first call is told then.

Its servers that the gateway starts itself are started, by the processes that then serve; those that run elsewhere, or
in a process a rollout outside of sandboxes, aren't asked. The environment is loaded already, and stays so; what is
wrong with a server's code is a remark and no error, since that may be written after the rest.
"""

from megamcp.dataplane import Dataplane
from megamcp.definitions import DocumentConfig
from megamcp.documents import journal as sql
from megamcp.documents.content import unpack
from megamcp.environments import LoadedEnvironment
from megamcp.errors import MegaMCPError
from megamcp.loading.units import Progress
from megamcp.sandboxed import Host
from megamcp.sandboxed.preparing import prepare
from megamcp.store import Store


async def try_out(
    environment: LoadedEnvironment, host: Host, dataplane: Dataplane, store: Store, progress: Progress
) -> None:
    """Tells of each server. Raises what `prepare` does."""
    await prepare(host, environment, progress)
    for server in environment.servers:
        state = server.config.state
        try:
            if not await dataplane.started(environment.id, server.name):
                continue
            if isinstance(state, DocumentConfig) and state.initial is not None:
                content = await store.value(sql.BASE_CONTENT, environment.id, server.name)
                await dataplane.demand_document(environment.id, server.name, unpack(content))
        except MegaMCPError as error:
            progress(f"{environment.full_name} is loaded, but {server.name} does not work yet: {error.message}", 0, 0)
        else:
            progress(f"{server.name}: its server is started", 0, 0)

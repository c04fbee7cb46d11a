"""How each server of an environment is reached, as the data plane is told: an address, or a command with its variables.

Secrets by reference are put in place here, in the process that uses them; what holds them has them in `secrets` too, so
that they are left out of what is told. The module keeps nothing and asks no server.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from megamcp import references
from megamcp.dataplane.ports import (
    SOCKET,
    Authority,
    ChildTarget,
    DedicatedTarget,
    ServerView,
    StdioTarget,
    UrlTarget,
)
from megamcp.definitions import DSN, DocumentConfig
from megamcp.environments import Environments, LoadedEnvironment, LoadedServer
from megamcp.errors import NotFound
from megamcp.handles import Signer
from megamcp.migrate import migrate
from megamcp.settings import Settings
from megamcp.store import Store


@dataclass(frozen=True, slots=True)
class Targets:
    """The servers of this gateway's environments."""

    settings: Settings
    signer: Signer
    dsn: str
    authority: Callable[[LoadedEnvironment, LoadedServer], Authority]

    def view(self, loaded: LoadedEnvironment, server: LoadedServer) -> ServerView:
        """Raises `Unprocessable` (`secret_missing`)."""
        config = server.config
        stateful = server.schema is not None or server.database is not None or server.document
        own = server.database is not None
        if config.url:
            plain = {name: text for name, text in config.headers.items() if not references.present(text)}
            target = UrlTarget(config.url, plain, self.authority(loaded, server), sse=config.transport == "sse")
            return ServerView(server.name, target, exactly_once=stateful, own_database=own, journaled=loaded.journaled)
        if (config.command and not server.document) or server.process:
            return ServerView(server.name, DedicatedTarget(config.restart == "on_move"), exactly_once=False)
        told = variables(server)
        environ: dict[str, str] = {"MEGAMCP_TOOL_POOL": str(self.settings.tool_connections), **told.texts}
        if server.login:
            environ["MEGAMCP_TOOL_DSN"] = role_dsn(self.dsn, server.login, self.signer.password("tool"))
        if server.document:
            environ |= {
                "MEGAMCP_TOOL_DOCUMENT_BYTES": str(self.settings.document_bytes),
                "MEGAMCP_TOOL_SERVER": server.name,
            }
        if isinstance(config.state, DocumentConfig) and config.command:
            state, program = config.state, (config.command, *config.args)
            tools = ("--load", str(state.load), "--dump", str(state.dump), "--program", *program)
            command = (sys.executable, "-m", "megamcp.sdk", "--socket", SOCKET, *tools)
            proxy = ChildTarget(command, environ, str(loaded.folder / (config.cwd or ".")), told.secrets)
            return ServerView(server.name, proxy, exactly_once=True)
        assert config.entry is not None
        child = ChildTarget.sdk(config.entry, _with_path(environ, loaded), str(loaded.folder), told.secrets)
        return ServerView(server.name, child, exactly_once=stateful, own_database=own, journaled=loaded.journaled)


def variables(server: LoadedServer) -> references.Resolved:
    """A server's `env`. Raises `Unprocessable` (`secret_missing`)."""
    return references.resolve_all(server.config.env, f"servers.{server.name}.env")


async def tool_dsn(dsn: str, environment: str, server: str | None = None) -> str:
    """DSN of the role that a tool server of a loaded environment works as, for one that runs alone.

    `dsn` is the control role's. Raises `NotFound`.
    """
    signer = await migrate(dsn)
    async with Store.open(dsn, 1) as store:
        loaded = await Environments(store, signer).find(environment)
    able = [one for one in loaded.servers if one.login and server in (None, one.name)]
    if len(able) != 1 or able[0].login is None:
        names = ", ".join(one.name for one in loaded.servers if one.login)
        raise NotFound(
            f"Environment {loaded.name} has no server {server!r} with a login of its own."
            if server
            else f"Environment {loaded.name} has {len(able)} servers with a login of their own: name one.",
            code="server_not_found",
            hint=f"Such servers: {names or 'none'}.",
        )
    return role_dsn(dsn, able[0].login, signer.password("tool"))


def stdio_target(
    server: LoadedServer, environment: LoadedEnvironment, dsn: str, password: str, epoch: int
) -> StdioTarget:
    """A dedicated server's command for a rollout whose database is reached at `dsn`."""
    config, told = server.config, variables(server)
    assert config.command is not None
    return StdioTarget(
        (config.command, *(text.replace(DSN, dsn) for text in config.args)),
        {name: text.replace(DSN, dsn) for name, text in told.texts.items()},
        cwd=str(environment.folder / (config.cwd or ".")),
        generation=epoch,
        secrets=(dsn, password, *told.secrets),
    )


def role_dsn(dsn: str, role: str, password: str) -> str:
    """The same database for another login."""
    parts = urlsplit(dsn)
    login = f"{quote(role, safe='')}:{quote(password, safe='')}"
    options = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("user", "password")]
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(("postgresql", f"{login}@{place}", parts.path, urlencode(options), ""))


def _with_path(environ: Mapping[str, str], loaded: LoadedEnvironment) -> dict[str, str]:
    """An environment's own modules are found in its folder."""
    known = os.environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(loaded.folder), known)))}

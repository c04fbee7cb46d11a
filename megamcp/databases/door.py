"""The door for SQL clients: a DSN for each rollout's own database, and the relay that it leads to.

The DSN names the rollout and the server, not the database: the relay asks here where that is now, so the DSN stays good
when the rollout is rolled back to a copy. Opened at the start where its port is set, so that a DSN which another
gateway gave out is good here too; else when the first DSN is asked for.
"""

import asyncio
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from megamcp.databases import journal as sql
from megamcp.databases.heads import Databases
from megamcp.demands import no_rollout
from megamcp.environments import Environments, LoadedServer
from megamcp.errors import Conflict, Gone, Unprocessable
from megamcp.handles import Signer
from megamcp.relay import Relay, Route
from megamcp.settings import Settings
from megamcp.store import Store

ANY = ("0.0.0.0", "::")


class Door:
    """Hands out DSNs. One relay a process, on a port of its own."""

    def __init__(
        self, store: Store, environments: Environments, databases: Databases, signer: Signer, settings: Settings
    ) -> None:
        self._store = store
        self._environments = environments
        self._databases = databases
        self._signer = signer
        self._settings = settings
        self._relay: Relay | None = None
        self._port = 0
        self._opening = asyncio.Lock()

    async def dsn(self, rollout: str, server: str | None, *, reached_as: str | None = None) -> dict[str, Any]:
        """The DSN and its parts. `reached_as` is the name under which the asker knows this host.

        Raises `NotFound`, `Gone`, `Unprocessable` (`no_database`), `Conflict` (`port_in_use`).
        """
        name = (await self._find(rollout, server))[0].name
        await self.open()
        port = self._settings.relay_public_port or self._port
        host = self._settings.relay_host
        if host in ANY:
            host = reached_as or "127.0.0.1"
        password = self._password(rollout, name)
        place = f"[{host}]" if ":" in host else host
        url = f"postgresql://{rollout}:{password}@{place}:{port}/{quote(name, safe='')}"
        return {
            "server": name,
            "dsn": url,
            "host": host,
            "port": port,
            "user": rollout,
            "database": name,
            "password": password,
        }

    async def aclose(self) -> None:
        """Ends every client's connection."""
        if self._relay is not None:
            await self._relay.close()

    async def open(self) -> None:
        """Lets clients in. Raises `Conflict` (`port_in_use`)."""
        async with self._opening:
            if self._relay is not None:
                return
            relay = Relay(self._resolve)
            host, port = self._settings.relay_host, self._settings.relay_port
            try:
                self._port = await relay.listen(host, port, shared=port != 0 and self._settings.workers > 1)
            except OSError as error:
                raise Conflict(
                    f"The relay can't listen on {host}:{port}: {error.strerror or error}.",
                    code="port_in_use",
                    hint="Set MEGAMCP_RELAY_PORT to a free one, or to 0.",
                ) from error
            self._relay = relay

    async def _resolve(self, user: str, database: str) -> Route:
        """Where a client's login leads right now."""
        server, environment, epoch = await self._find(user, database)
        place = await self._databases.place(user, epoch, server, environment)
        parts = urlsplit(place.dsn)
        host = parts.hostname or dict(parse_qsl(parts.query)).get("host", "")
        port = parts.port or int(dict(parse_qsl(parts.query)).get("port", 5432))
        login = self._databases.password(place.name)
        return Route(unquote(host), port, place.name, place.name, login, self._password(user, database))

    async def _find(self, rollout: str, server: str | None) -> tuple[LoadedServer, Any, int]:
        row = await self._store.row(sql.STANDING, rollout)
        if row is None:
            raise no_rollout(rollout)
        if row["status"] != "open":
            raise Gone(f"Rollout {rollout} is {row['status']}.", code=f"rollout_{row['status']}")
        environment = await self._environments.by_id(row["environment"])
        able = {one.name: one for one in environment.servers if one.database}
        if server is None and len(able) == 1:
            server = next(iter(able))
        if server is None or server not in able:
            raise Unprocessable(
                f"Environment {environment.name} has no server {server!r} with a database of the rollout's own."
                if server
                else f"Environment {environment.name} has {len(able)} servers with databases of the rollout's own.",
                code="no_database",
                hint=f"Servers with state of kind database: {', '.join(able) or 'none'}.",
            )
        return able[server], environment, row["epoch"]

    def _password(self, rollout: str, server: str) -> str:
        return self._signer.password(f"dsn {rollout} {server}")

"""Ways into the databases of one cluster: as the superuser, and as a database's hand.

Raises `NotFound`, `Conflict` (`database_sealed`), `Unavailable`, `NoCapacity`: the errors of connecting, once for all.
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import asyncpg

from megamcp import outages
from megamcp.errors import Conflict, NotFound, Unavailable
from megamcp.state.clones import logins
from megamcp.state.clones.sessions import Sessions

MAINTENANCE = ""
COPIED_S = 5.0
"""How long a copy may take before its source counts as sealed."""


def place(dsn: str) -> str:
    """User, host and port of a DSN, for people. No password and no option but these."""
    parts = urlsplit(dsn)
    options = dict(parse_qsl(parts.query))
    user = unquote(parts.netloc.rpartition("@")[0].partition(":")[0]) or options.get("user", "")
    host = parts.netloc.rpartition("@")[2] or options.get("host", "localhost")
    port = "" if re.search(r":\d+$", host) else f":{options.get('port', '5432')}"
    return f"{user}{'@' if user else ''}{host}{port}"


class Access:
    """Holds the superuser's DSN and the passwords of hands; neither is ever shown."""

    def __init__(self, cluster: str, dsn: str, most: int) -> None:
        self._cluster = cluster
        self._dsn = dsn
        self.place = place(dsn)
        self._hands: dict[str, str] = {}  # database → password of its hand
        self.sessions = Sessions(most)

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine."""
        parts = urlsplit(self._dsn)
        host = unquote(parts.hostname or dict(parse_qsl(parts.query)).get("host", ""))
        return host.startswith("/") or host in ("", "localhost", "127.0.0.1", "::1")

    def dsn_for(self, database: str, user: str, password: str) -> str:
        """DSN of a login. It holds the password: don't log it."""
        parts = urlsplit(self._dsn)
        place = parts.netloc.rpartition("@")[2]
        options = [(key, value) for key, value in parse_qsl(parts.query) if key not in ("user", "password", "dbname")]
        who = f"{quote(user, safe='')}:{quote(password, safe='')}@"
        return urlunsplit(("postgresql", who + place, "/" + quote(database, safe=""), urlencode(options), ""))

    def _dsn_of(self, database: str) -> str:
        parts = urlsplit(self._dsn)
        options = [(key, value) for key, value in parse_qsl(parts.query) if key != "dbname"]
        return urlunsplit((parts.scheme, parts.netloc, "/" + quote(database, safe=""), urlencode(options), ""))

    @asynccontextmanager
    async def maintenance(self) -> AsyncIterator[Any]:
        try:
            async with self.sessions.use(MAINTENANCE, self._dsn) as connection:
                yield connection
        except outages.DRIVER as error:
            if not outages.lost(error):
                raise
            raise Unavailable(
                f"State cluster {self._cluster} at {self.place} can't be reached ({type(error).__name__}).",
                code="state_cluster_unavailable",
                hint="Try again when it is back. If it is gone for good, what was on it is lost, the journal is not.",
            ) from error

    @asynccontextmanager
    async def session(self, name: str) -> AsyncIterator[Any]:
        """The superuser's, in one database. Waits for a while where a copy of the database is being made."""
        async with contextlib.AsyncExitStack() as stack:
            yield await self._let_in(stack, name)

    async def _let_in(self, stack: contextlib.AsyncExitStack, name: str) -> Any:
        give_up = time.monotonic() + COPIED_S
        while True:
            try:
                return await stack.enter_async_context(self.sessions.use(name, self._dsn_of(name)))
            except asyncpg.InvalidCatalogNameError as error:
                raise NotFound(f"There is no database {name}.", code="database_not_found") from error
            except asyncpg.ObjectNotInPrerequisiteStateError as error:
                if "not currently accepting connections" not in str(error):
                    raise
                if time.monotonic() > give_up:
                    raise Conflict(f"Database {name} takes no connections now.", code="database_sealed") from error
            except (asyncpg.ConnectionDoesNotExistError, asyncpg.AdminShutdownError):  # ended while it came in
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(0.003)

    @asynccontextmanager
    async def hand(self, name: str) -> AsyncIterator[Any]:
        """A connection of the database's hand, which is made when it's first needed.

        Functions of the user's run in it. Of what they leave (settings, temporary tables, statements under the name of
        another) nothing is there the next time.
        """
        role = logins.hand(name)
        if name in self._hands:
            with contextlib.suppress(asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError):
                async with self._hand_session(name, role) as connection:
                    yield connection
                    return
        password = secrets.token_hex(32)
        async with self.maintenance() as admin:
            exists = await admin.fetchval("select exists (select from pg_roles where rolname = $1)", role)
            await admin.execute(logins.hand_login(name, password, exists=exists))
        self._hands[name] = password
        async with self._hand_session(name, role) as connection:
            yield connection

    @asynccontextmanager
    async def _hand_session(self, name: str, role: str) -> AsyncIterator[Any]:
        dsn = self.dsn_for(name, role, self._hands[name])
        async with self.sessions.use(name, dsn, shared=True) as connection:
            await connection.execute("discard all")
            yield connection

    def forget_hand(self, database: str) -> None:
        """The database goes; its hand with it."""
        self._hands.pop(database, None)

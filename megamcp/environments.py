"""Environments: each version is loaded once, by the hash of its definition and files, and looked up from then on.

Loading the same content again costs a query. What an environment is, is said in `definitions` and read by `reading`;
its servers' state is loaded by `megamcp.state`, their processes are run by the data plane.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
from pydantic import TypeAdapter

from megamcp import state
from megamcp.access.principal import visible
from megamcp.definitions import (
    DatabaseConfig,
    DocumentConfig,
    EnvironmentConfig,
    ProcessConfig,
    SchemaConfig,
    ServerConfig,
)
from megamcp.documents import logins
from megamcp.documents.content import demand_size
from megamcp.documents.journal import SET_BASE
from megamcp.errors import Conflict, Gone, NotFound, TooLarge, Unavailable, Unprocessable
from megamcp.handles import Signer
from megamcp.loading import Script
from megamcp.loading.units import Progress
from megamcp.reading import Source, database_hash, read
from megamcp.state.clones.source import INSIDE
from megamcp.state.schema import COMPILER_VERSION
from megamcp.store import ENVIRONMENT, Store


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """A server of a loaded environment."""

    name: str
    config: ServerConfig
    schema: state.SchemaState | None
    database: str | None = None
    """Hash of the content that the rollouts' databases are copies of."""
    login: str | None = None
    """PostgreSQL role of its process, where it is a shared one with a state."""
    files: str | None = None
    """Hash of what the working folder of each rollout's sandbox starts with."""

    @property
    def stateful(self) -> bool:
        """Whether it has a state that checkpoints keep."""
        return self.schema is not None or self.database is not None or self.process is not None or self.document

    def demand_current(self) -> None:
        """Raises `Gone` where this version of MegaMCP didn't make its state: the code inside is another's."""
        if self.schema is not None:
            current = self.schema.compiler == COMPILER_VERSION
        else:
            current = self.database is None or self.database.endswith(f"-{INSIDE}")
        if not current:
            raise Gone(
                f"The state of server {self.name} was made by another version of MegaMCP.",
                code="state_outdated",
                hint="Load the environment again (at start this is done for those that come along or are named in the"
                " settings) and open a new rollout: that makes a new version of it.",
            )

    @property
    def document(self) -> bool:
        """Whether its state is a document."""
        return isinstance(self.config.state, DocumentConfig)

    @property
    def process(self) -> ProcessConfig | None:
        """How its sandboxes are made, where it has any."""
        return self.config.state if isinstance(self.config.state, ProcessConfig) else None


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """A version of an environment in this database. Never changes once loaded."""

    id: int
    name: str
    hash: str
    folder: Path
    clock: datetime
    seed: int
    loaded_at: datetime
    servers: tuple[LoadedServer, ...]
    tenant: str | None = None
    """Whose it is; None for everyone's."""
    journaled: bool = True
    """Whether calls leave a row in the journal."""

    @property
    def full_name(self) -> str:
        """name@hash"""
        return f"{self.name}@{self.hash}"

    @property
    def has_databases(self) -> bool:
        """Whether a rollout of it has a database of its own."""
        return any(server.database for server in self.servers)

    @property
    def has_documents(self) -> bool:
        """Whether a rollout of it has documents."""
        return any(server.document for server in self.servers)

    @property
    def has_dedicated(self) -> bool:
        """Whether a rollout of it has processes of its own."""
        return any((server.config.command and not server.document) or server.process for server in self.servers)

    @property
    def has_sandboxes(self) -> bool:
        """Whether a rollout of it has sandboxes."""
        return any(server.process for server in self.servers)

    def named(self, name: str) -> LoadedServer:
        """The server of that name. Raises `NotFound`."""
        for server in self.servers:
            if server.name == name:
                return server
        raise NotFound(f"Environment {self.name} has no server {name!r}.", code="server_not_found")

    @property
    def schemas(self) -> tuple[state.SchemaState, ...]:
        """The copy-on-write states of its servers, each once."""
        return tuple({server.schema.hash: server.schema for server in self.servers if server.schema}.values())

    def server(self, name: str | None) -> LoadedServer:
        """The server with SQL state of that name, or the only one. Raises `NotFound`."""
        able = {server.name: server for server in self.servers if server.schema or server.database}
        if name is None and len(able) == 1:
            return next(iter(able.values()))
        if name is None or name not in able:
            raise NotFound(
                f"Environment {self.name} has no server {name!r} with SQL state."
                if name
                else f"Environment {self.name} has {len(able)} servers with SQL state: name one.",
                code="server_not_found",
                hint=f"Servers with SQL state: {', '.join(able) or 'none'}.",
            )
        return able[name]


Build = Callable[[str, Sequence[Script], Progress | None], Awaitable[object]]
"""Makes the database of a content (hash, SQL), or finds it."""


class Environments:
    """Loads and looks up. Versions never change, so what was read once is kept."""

    def __init__(self, store: Store, signer: Signer, document_bytes: int = 32 << 20) -> None:
        self._store = store
        self._signer = signer
        self._document_bytes = document_bytes
        self._by_id: dict[int, LoadedEnvironment] = {}

    async def load(
        self, path: Path, progress: Progress | None = None, build: Build | None = None, tenant: str | None = None
    ) -> LoadedEnvironment:
        """Load a version, all of it or nothing; a version that is there already is returned as it is. A name is one
        tenant's or everyone's (None), with all its versions.

        With `build`, databases are made now; without it when a rollout first needs one.
        """
        source = await asyncio.to_thread(read, path)
        for name, content in source.documents.items():
            try:
                demand_size(len(content), self._document_bytes)
            except TooLarge as error:
                error.message = f"servers.{name}: {error.message}"
                raise
        if build is not None:
            for name, server in source.config.servers.items():
                if isinstance(server.state, DatabaseConfig):
                    await build(database_hash(source.scripts[name]), source.scripts[name], progress)
        async with self._store.transaction() as connection:
            await connection.execute("set local lock_timeout = 0")  # a load of the same may take its time
            await connection.execute(
                "select pg_advisory_xact_lock(hashtextextended('environment ' || $1, 7726))", source.hash
            )
            await _demand_name(connection, source.config.name, tenant)
            found = await connection.fetchrow(ENVIRONMENT, source.config.name, source.hash)
            identifier = found["id"] if found else await self._insert(connection, source, progress, tenant)
            if found:
                await self._reset_logins(connection, identifier)
                await connection.execute(
                    "update megamcp.environments set loaded_at = clock_timestamp(), definition = $2 where id = $1",
                    identifier,
                    _definition(source),
                )
        self._by_id.pop(identifier, None)
        return await self.by_id(identifier)

    async def _reset_logins(self, connection: asyncpg.Connection, identifier: int) -> None:
        """Undoes what a tool server did to its own login (its password, its settings)."""
        rows = await connection.fetch(
            "select descriptor from megamcp.servers where environment = $1 and kind = 'schema'", identifier
        )
        for row in rows:
            known = state.SchemaState.from_json(row["descriptor"])
            await state.reset_logins(connection, known, self._signer.password("tool"), self._signer.password("query"))
        for row in await connection.fetch(
            "select role from megamcp.servers where environment = $1 and kind = 'document'", identifier
        ):
            await logins.reset(connection, row["role"], self._signer.password("tool"))

    async def _insert(
        self, connection: asyncpg.Connection, source: Source, progress: Progress | None, tenant: str | None
    ) -> int:
        config = source.config
        identifier: int = await connection.fetchval(
            "insert into megamcp.environments (name, hash, definition, clock, seed, tenant)"
            " values ($1, $2, $3, $4, $5, $6) returning id",
            config.name,
            source.hash,
            _definition(source),
            config.clock,
            config.seed,
            tenant,
        )
        for position, (name, server) in enumerate(config.servers.items()):
            schema: state.SchemaState | None = None
            role: str | None = None
            descriptor: dict[str, Any] | None = None
            if isinstance(server.state, DatabaseConfig):
                descriptor = {"database": database_hash(source.scripts[name])}
            elif name in source.contents:
                descriptor = {"files": source.contents[name]}
            if isinstance(server.state, SchemaConfig):
                schema = await _load_state(
                    connection,
                    name,
                    ddl=source.scripts[name][0],
                    seeds=source.scripts[name][1:],
                    salt=name,  # two servers of one environment with equal files have states of their own
                    clock=config.clock,
                    seed=config.seed,
                    tool_password=self._signer.password("tool"),
                    query_password=self._signer.password("query"),
                    progress=progress,
                )
                await connection.execute(f'grant megamcp_tools to "{schema.tool_role}"')
                await connection.execute(f'grant megamcp_queries to "{schema.query_role}"')
            elif isinstance(server.state, DocumentConfig):
                role = await logins.make(connection, f"{source.hash} {name}", self._signer.password("tool"))
            await connection.execute(
                "insert into megamcp.servers (environment, name, position, kind, role, query_role, state, descriptor)"
                " values ($1, $2, $3, $4, $5, $6, $7, $8)",
                identifier,
                name,
                position,
                server.state.kind,
                schema.tool_role if schema else role,
                schema and schema.query_role,
                schema.hash if schema else next(iter(descriptor.values())) if descriptor else None,
                schema.to_json() if schema else descriptor,
            )
            if name in source.documents:
                await connection.execute(SET_BASE, identifier, name, source.documents[name])
        return identifier

    async def find(self, name: str) -> LoadedEnvironment:
        """By name (its newest version) or name@hash. Raises `NotFound`."""
        plain, at, version = name.partition("@")
        row = await self._store.row(ENVIRONMENT, plain, version if at else None)
        if row is None or not visible(row["tenant"]):
            rows = await self._store.rows("select distinct name, tenant from megamcp.environments order by name")
            known = [row["name"] for row in rows if visible(row["tenant"])]
            raise NotFound(
                f"There is no environment {name!r}.",
                code="environment_not_found",
                hint=f"Loaded: {', '.join(known) or 'none'}. Load one with `megamcp env load`.",
            )
        return await self.by_id(row["id"])

    async def by_id(self, identifier: int, on: asyncpg.Connection | None = None) -> LoadedEnvironment:
        """By the database's number. Raises `NotFound`.

        A caller that holds a connection says so with `on`: asking the pool for a second one may wait for those who
        do the same.
        """
        if known := self._by_id.get(identifier):
            return known
        async with contextlib.nullcontext(on) if on else self._store.connection() as connection:
            row = await connection.fetchrow("select * from megamcp.environments where id = $1", identifier)
            servers = await connection.fetch(
                "select name, descriptor, role from megamcp.servers where environment = $1 order by position",
                identifier,
            )
        if row is None:
            raise NotFound(f"There is no environment number {identifier}.", code="environment_not_found")
        config = EnvironmentConfig.model_validate(row["definition"]["config"])
        loaded = LoadedEnvironment(
            id=identifier,
            name=row["name"],
            hash=row["hash"],
            folder=Path(row["definition"]["folder"]),
            clock=row["clock"],
            seed=row["seed"],
            loaded_at=row["loaded_at"],
            tenant=row["tenant"],
            journaled=config.journal != "none",
            servers=tuple(
                _loaded_server(s["name"], config.servers[s["name"]], s["descriptor"], s["role"]) for s in servers
            ),
        )
        return self._by_id.setdefault(identifier, loaded)

    async def all(self) -> list[LoadedEnvironment]:
        """Every loaded version, newest first."""
        rows = await self._store.rows("select id from megamcp.environments order by loaded_at desc, id desc")
        return [await self.by_id(row["id"]) for row in rows]


async def _demand_name(connection: asyncpg.Connection, name: str, tenant: str | None) -> None:
    """Raises `Conflict` where the name is another tenant's."""
    await connection.execute("select pg_advisory_xact_lock(hashtextextended('environment of ' || $1, 7726))", name)
    rows = await connection.fetch("select distinct tenant from megamcp.environments where name = $1", name)
    if rows and tenant not in [row["tenant"] for row in rows]:
        raise Conflict(f"There is an environment {name!r} of another tenant.", code="environment_of_another_tenant")


def _loaded_server(
    name: str, config: ServerConfig, descriptor: dict[str, Any] | None, login: str | None
) -> LoadedServer:
    if descriptor is None:
        return LoadedServer(name, config, None, login=login)
    if "database" in descriptor:
        return LoadedServer(name, config, None, database=descriptor["database"])
    if "files" in descriptor:
        return LoadedServer(name, config, None, files=descriptor["files"])
    return LoadedServer(name, config, state.SchemaState.from_json(descriptor), login=login)


async def _load_state(connection: asyncpg.Connection, server: str, **content: Any) -> state.SchemaState:
    """`state.load`; a mistake in the environment's SQL is the environment's, told in PostgreSQL's words."""
    try:
        return await state.load(connection, **content)
    except asyncpg.PostgresError as error:
        where = ", ".join([f"servers.{server}", *getattr(error, "__notes__", ())])
        told = f"{error.args[0]}" + (f" ({error.detail})" if getattr(error, "detail", None) else "")
        if isinstance(error, asyncpg.DiskFullError):
            raise Unavailable(
                f"PostgreSQL's disk is full: {where}: {told}",
                code="disk_full",
                hint="Nothing was loaded. Give PostgreSQL more room and load again.",
            ) from error
        if (error.sqlstate or "")[:2] in ("08", "40", "53", "57", "58"):
            raise
        raise Unprocessable(
            f"{where}: PostgreSQL refuses the schema or its seed: {told}",
            code="invalid_environment",
            hint=getattr(error, "hint", None) or "Nothing was loaded. Try the files on an empty database with psql.",
            sqlstate=error.sqlstate,
            context=getattr(error, "context", None),
        ) from error


def _definition(source: Source) -> dict[str, Any]:
    adapter = TypeAdapter(EnvironmentConfig)
    return {
        "folder": str(source.folder),
        "config": adapter.dump_python(source.config, mode="json", by_alias=True, exclude_unset=True),
    }


def bundled() -> list[Path]:
    """Folders of the environments that come with the package."""
    import tool_servers

    root = Path(tool_servers.__path__[0])
    return sorted(path.parent for path in root.glob("*/environment.toml"))

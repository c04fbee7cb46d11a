"""Environments: read `environment.toml` (or `mcp.json`), name the version by content, load it once.

A version is its definition and the text of its files; loading the same content again costs a query. This module owns
what an environment *is*: its servers' state is loaded by `megamcp.state`, their processes are run by the data plane.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import asyncpg
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from megamcp import state
from megamcp.errors import NotFound, Unavailable, Unprocessable
from megamcp.handles import Signer
from megamcp.loading import Script
from megamcp.loading.script import read as read_script
from megamcp.loading.units import Progress
from megamcp.store import ENVIRONMENT, Store

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _SqlConfig(_Config):
    """DDL and rows: a schema file and seeds, or a dump in place of both."""

    schema_file: str = Field("schema.sql", alias="schema")
    seed: list[str] = Field(default_factory=list)
    dump: str | None = Field(None, description="Made by pg_dump: text (also .gz), custom, tar, or a folder.")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.dump is not None and self.model_fields_set & {"schema_file", "seed"}:
            raise ValueError("give dump, or schema and seed, not both")
        return self


class SchemaConfig(_SqlConfig):
    """State in a copy-on-write PostgreSQL schema. Paths are relative to the environment's folder."""

    kind: Literal["schema"]
    source_schema: str = Field("public", description="The one that is taken of a dump.", min_length=1, max_length=63)


class DatabaseConfig(_SqlConfig):
    """State in a PostgreSQL database of the rollout's own. Paths are relative to the environment's folder."""

    kind: Literal["database"]


class NoneConfig(_Config):
    """No state of its own: calls pass through."""

    kind: Literal["none"] = "none"


class PlannedConfig(BaseModel):
    """Kinds that have a name but no backend in this version; refused at load."""

    kind: Literal["document", "process"]


StateConfig = Annotated[SchemaConfig | DatabaseConfig | NoneConfig | PlannedConfig, Field(discriminator="kind")]


DSN = "{dsn}"
"""Stands in `args` and `env` of a command for the DSN of the rollout's database."""


def _unsaid(value: object) -> bool:
    """A field that says nothing is no part of a version's hash."""
    return value in (None, "never")


class ServerConfig(_Config):
    """One tool server: our child (`entry`), one that runs elsewhere (`url`), or a process a rollout (`command`)."""

    entry: str | None = Field(None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    url: str | None = Field(None, pattern=r"^https?://")
    headers: dict[str, str] = Field(default_factory=dict)
    command: str | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    cwd: str | None = Field(None, exclude_if=_unsaid)
    restart: Literal["never", "on_move"] = Field("never", exclude_if=_unsaid)
    state: StateConfig = Field(default_factory=NoneConfig)

    @field_validator("url")
    @classmethod
    def _usable_url(cls, url: str | None) -> str | None:
        if url is not None and (not url.isascii() or not urlsplit(url).hostname):
            raise ValueError("an http or https URL in ASCII, with a host")
        return url

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> "ServerConfig":
        ways = [name for name in ("entry", "url", "command") if getattr(self, name)]
        if len(ways) != 1:
            raise ValueError("give exactly one of entry, url or command")
        if isinstance(self.state, SchemaConfig) and self.command:
            raise ValueError("state of kind schema needs entry or url: only a server on megamcp.sdk can use it")
        if not self.command and (self.args or self.cwd or self.restart != "never"):
            raise ValueError("args, cwd and restart belong to a command")
        told = [*self.args, *self.env.values()]
        if isinstance(self.state, DatabaseConfig) and self.command and not any(DSN in text for text in told):
            raise ValueError(
                f"state of kind database and no {DSN} in args or env: write it where the server is to find the DSN of "
                "its database"
            )
        return self


class EnvironmentConfig(_Config):
    """`environment.toml`."""

    name: str = Field(pattern=NAME.pattern)
    description: str = Field("", max_length=2000)
    clock: AwareDatetime = Field(
        default_factory=lambda: datetime.fromisoformat("2026-01-01T00:00:00+00:00"),
        description="What now() says.",
    )
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    servers: dict[str, ServerConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _server_names(self) -> "EnvironmentConfig":
        for name in self.servers:
            if not NAME.match(name) or "__" in name:
                raise ValueError(f"server name {name!r}: letters, digits, - and _ only, no double underscore")
        return self


@dataclass(frozen=True, slots=True)
class Source:
    """An environment as found on disk."""

    folder: Path
    config: EnvironmentConfig
    scripts: dict[str, list[Script]]
    """SQL of each server that has any, in order."""
    hash: str


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """A server of a loaded environment."""

    name: str
    config: ServerConfig
    schema: state.SchemaState | None
    database: str | None = None
    """Hash of the content that the rollouts' databases are copies of."""


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

    @property
    def full_name(self) -> str:
        """name@hash"""
        return f"{self.name}@{self.hash}"

    @property
    def has_databases(self) -> bool:
        """Whether a rollout of it has a database of its own."""
        return any(server.database for server in self.servers)

    @property
    def has_dedicated(self) -> bool:
        """Whether a rollout of it has processes of its own."""
        return any(server.config.command for server in self.servers)

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


def read(path: Path) -> Source:
    """Read an environment from its folder, its `environment.toml` or an `mcp.json`.

    Raises `Unprocessable` (`invalid_environment`) that names the file and every problem in it.
    """
    file = path
    try:
        path = path.expanduser().resolve()
        file = path / "environment.toml" if path.is_dir() else path
        if path.is_dir() and not file.exists() and (path / "mcp.json").exists():
            file = path / "mcp.json"
        text = _text(file)
    except (OSError, ValueError, RuntimeError) as error:  # the last two: a NUL or an unknown ~user in the path
        raise _invalid(file, str(error)) from error
    try:
        raw = _from_mcp_json(file, json.loads(text)) if file.suffix == ".json" else tomllib.loads(text)
        config = EnvironmentConfig.model_validate(raw)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise _invalid(file, str(error)) from error
    except ValidationError as error:
        problems = [{"where": ".".join(map(str, e["loc"])), "problem": e["msg"]} for e in error.errors()]
        told = "; ".join(f"{p['where'] or 'file'}: {p['problem']}" for p in problems)
        raise _invalid(file, told, problems=problems) from error
    scripts = {name: _scripts(file.parent, name, server) for name, server in config.servers.items()}
    digest = hashlib.sha256(config.model_dump_json(by_alias=True, exclude_defaults=True).encode())
    for name, found in scripts.items():
        digest.update("".join(f"\0{name}\0{script.name}\0{script.content}" for script in found).encode())
    if any(server.entry or server.command for server in config.servers.values()):
        for code in sorted(file.parent.glob("*.py")):  # tools that change make a new version, on processes of its own
            digest.update(b"\0" + code.name.encode() + b"\0" + hashlib.sha256(code.read_bytes()).digest())
    return Source(
        file.parent, config, {name: found for name, found in scripts.items() if found}, digest.hexdigest()[:16]
    )


_MCP_JSON = ("url", "headers", "command", "args", "env", "cwd", "state", "restart")
"""What is read of a server in an `mcp.json`; the last two are ours. Other programs' fields are left alone."""


def _from_mcp_json(file: Path, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not isinstance(raw.get("mcpServers"), dict):
        raise _invalid(file, "there is no object mcpServers")
    name = raw.get("name") or re.sub(r"[^A-Za-z0-9_-]", "-", file.parent.name) or "environment"
    servers = {
        key: {field: value[field] for field in _MCP_JSON if field in value}
        for key, value in raw["mcpServers"].items()
        if isinstance(value, dict)
    }
    return {"name": name, "servers": servers}


def _scripts(folder: Path, name: str, server: ServerConfig) -> list[Script]:
    where = f"servers.{name}"
    if server.command and not isinstance(server.state, DatabaseConfig):
        raise Unprocessable(
            f"{where} is started by a command, so each rollout gets a process of its own: that needs state of kind"
            f" database, not {server.state.kind}.",
            code="unsupported_server",
            hint=f"Give it a database ({DSN} in args or env is its DSN), or start it yourself and give its url.",
        )
    match server.state:
        case PlannedConfig(kind=kind):
            raise Unprocessable(
                f"{where}: state of kind {kind} is not in this version.",
                code="unsupported_state",
                hint="Use schema, database or none.",
            )
        case SchemaConfig(dump=str(dump)) as config:
            return [_script(folder, dump, dump=True, schema=config.source_schema)]
        case DatabaseConfig(dump=str(dump)):
            return [_script(folder, dump, dump=True)]
        case SchemaConfig(schema_file=schema, seed=seeds) | DatabaseConfig(schema_file=schema, seed=seeds):
            return [_script(folder, relative) for relative in (schema, *seeds)]
    return []


def _script(folder: Path, relative: str, **how: Any) -> Script:
    path = folder / relative
    try:
        path = path.resolve()
        if not path.is_relative_to(folder.resolve()):
            raise _invalid(path, "lies outside of the environment's folder")
        return read_script(path, relative, **how)
    except (OSError, ValueError) as error:
        raise _invalid(path, str(error)) from error


def _text(file: Path) -> str:
    """A regular file's text: a pipe or a device would never end. Raises OSError, ValueError."""
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is not a regular file")
    return file.read_text(encoding="utf-8")


def _invalid(file: Path, reason: str, **extra: Any) -> Unprocessable:
    return Unprocessable(
        f"{file.name}: {reason}",
        code="invalid_environment",
        hint="See docs/environments.md for the format.",
        **extra,
    )


def database_hash(scripts: Sequence[Script]) -> str:
    """16 hex digits of everything that a database is made from."""
    parts = ["database 2", *(script.content for script in scripts)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


Build = Callable[[str, Sequence[Script], Progress | None], Awaitable[object]]
"""Makes the database of a content (hash, SQL), or finds it."""


class Environments:
    """Loads and looks up. Versions never change, so what was read once is kept."""

    def __init__(self, store: Store, signer: Signer) -> None:
        self._store = store
        self._signer = signer
        self._by_id: dict[int, LoadedEnvironment] = {}

    async def load(self, path: Path, progress: Progress | None = None, build: Build | None = None) -> LoadedEnvironment:
        """Load a version, all of it or nothing; a version that is there already is returned as it is.

        With `build`, databases are made now; without it when a rollout first needs one.
        """
        source = await asyncio.to_thread(read, path)
        if build is not None:
            for name, server in source.config.servers.items():
                if isinstance(server.state, DatabaseConfig):
                    await build(database_hash(source.scripts[name]), source.scripts[name], progress)
        async with self._store.transaction() as connection:
            await connection.execute(
                "select pg_advisory_xact_lock(hashtextextended('environment ' || $1, 7726))", source.hash
            )
            found = await connection.fetchrow(ENVIRONMENT, source.config.name, source.hash)
            identifier = found["id"] if found else await self._insert(connection, source, progress)
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
            "select descriptor from megamcp.servers where environment = $1 and descriptor is not null", identifier
        )
        for row in rows:
            known = state.SchemaState.from_json(row["descriptor"])
            await state.reset_logins(connection, known, self._signer.password("tool"), self._signer.password("query"))

    async def _insert(self, connection: asyncpg.Connection, source: Source, progress: Progress | None) -> int:
        config = source.config
        identifier: int = await connection.fetchval(
            "insert into megamcp.environments (name, hash, definition, clock, seed)"
            " values ($1, $2, $3, $4, $5) returning id",
            config.name,
            source.hash,
            _definition(source),
            config.clock,
            config.seed,
        )
        for position, (name, server) in enumerate(config.servers.items()):
            schema = database = None
            if isinstance(server.state, DatabaseConfig):
                database = {"database": database_hash(source.scripts[name])}
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
            await connection.execute(
                "insert into megamcp.servers (environment, name, position, kind, role, query_role, state, descriptor)"
                " values ($1, $2, $3, $4, $5, $6, $7, $8)",
                identifier,
                name,
                position,
                server.state.kind,
                schema and schema.tool_role,
                schema and schema.query_role,
                schema.hash if schema else database and database["database"],
                schema.to_json() if schema else database,
            )
        return identifier

    async def find(self, name: str) -> LoadedEnvironment:
        """By name (its newest version) or name@hash. Raises `NotFound`."""
        plain, at, version = name.partition("@")
        row = await self._store.row(ENVIRONMENT, plain, version if at else None)
        if row is None:
            known = await self._store.rows("select distinct name from megamcp.environments order by name")
            raise NotFound(
                f"There is no environment {name!r}.",
                code="environment_not_found",
                hint=f"Loaded: {', '.join(r['name'] for r in known) or 'none'}. Load one with `megamcp env load`.",
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
                "select name, descriptor from megamcp.servers where environment = $1 order by position",
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
            servers=tuple(_loaded_server(s["name"], config.servers[s["name"]], s["descriptor"]) for s in servers),
        )
        return self._by_id.setdefault(identifier, loaded)

    async def all(self) -> list[LoadedEnvironment]:
        """Every loaded version, newest first."""
        rows = await self._store.rows("select id from megamcp.environments order by loaded_at desc, id desc")
        return [await self.by_id(row["id"]) for row in rows]


def _loaded_server(name: str, config: ServerConfig, descriptor: dict[str, Any] | None) -> LoadedServer:
    if descriptor is None:
        return LoadedServer(name, config, None)
    if "database" in descriptor:
        return LoadedServer(name, config, None, descriptor["database"])
    return LoadedServer(name, config, state.SchemaState.from_json(descriptor))


async def _load_state(connection: asyncpg.Connection, server: str, **content: Any) -> state.SchemaState:
    """`state.load`; a mistake in the environment's SQL is the environment's, told in PostgreSQL's words."""
    try:
        return await state.load(connection, **content)
    except asyncpg.PostgresError as error:
        where = ", ".join([f"servers.{server}", *getattr(error, "__notes__", ())])
        told = f"{error}" + (f" ({error.detail})" if getattr(error, "detail", None) else "")
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
        "config": adapter.dump_python(source.config, mode="json", by_alias=True),
    }


def bundled() -> list[Path]:
    """Folders of the environments that come with the package."""
    import tool_servers

    root = Path(tool_servers.__path__[0])
    return sorted(path.parent for path in root.glob("*/environment.toml"))

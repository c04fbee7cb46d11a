"""What an environment is: `environment.toml` (or `mcp.json`) as models, its SQL files, the hash that names a version.

Reads files and decides whether they make sense; loads nothing and knows no database.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import msgspec
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from megamcp.documents.content import NotJson, packed_whole
from megamcp.errors import Unprocessable
from megamcp.loading import Script
from megamcp.loading.script import read as read_script
from megamcp.state.clones.source import INSIDE
from megamcp.state.schema import COMPILER_VERSION
from sandboxes.files import digest

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


class Runtime(StrEnum):
    """How a sandbox is frozen; `auto` takes the best that works on the host."""

    AUTO = "auto"
    FORK = "fork"
    CRIU = "criu"
    DOCKER = "docker"


class ProcessConfig(_Config):
    """State in a process and its files: a sandbox a rollout. Paths are relative to the environment's folder."""

    kind: Literal["process"]
    runtime: Runtime = Runtime.AUTO
    files: str | None = Field(None, description="Folder with what the working folder starts with.")
    image: str | None = Field(None, description="Docker image, or a folder with a root file system.")
    workdir: str = Field("/workspace", pattern=r"^/[^:,]*$", description="The working folder, as the server sees it.")
    network: bool = Field(False, description="Whether the server may reach the network.")
    memory_mb: int = Field(1024, ge=16, le=1 << 20)
    disk_mb: int = Field(1024, ge=1, le=1 << 20)
    pids: int = Field(256, ge=4, le=1 << 16)
    cpus: float = Field(1.0, gt=0, le=1024)


class DocumentConfig(_Config):
    """State as one JSON document: of a plain Python class, or of a program with two tools that load and dump it. Paths
    are relative to the environment's folder."""

    kind: Literal["document"]
    initial: str | None = Field(None, description="JSON file that the document starts as; else as the server makes it.")
    load: str | None = Field(None, description="Of a command: its tool that takes a document. Agents don't see it.")
    dump: str | None = Field(None, description="Of a command: its tool that gives the document, as JSON.")


StateConfig = Annotated[
    SchemaConfig | DatabaseConfig | DocumentConfig | ProcessConfig | NoneConfig, Field(discriminator="kind")
]


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

    @model_validator(mode="before")
    @classmethod
    def _a_process_each(cls, raw: Any) -> Any:
        """A command without a state of its own kind keeps what it knows in its process."""
        if isinstance(raw, dict) and raw.get("command") and "state" not in raw:
            return {**raw, "state": {"kind": "process"}}
        return raw

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
        if isinstance(self.state, DocumentConfig) and self.url and (self.state.load or self.state.dump):
            raise ValueError(
                "load and dump belong to a command: a program at a url serves others too, so nothing here could say"
                " that it still holds what it was told to load; give its command, or state of kind none, by which calls"
                " pass through"
            )
        if isinstance(self.state, DocumentConfig) and bool(self.command) != bool(self.state.load and self.state.dump):
            raise ValueError(
                "state of kind document needs an entry that is a plain Python class, or a command with the names of its"
                " tools that load and dump the document; other programs keep state of kind process"
            )
        if isinstance(self.state, ProcessConfig) and self.url:
            raise ValueError("state of kind process needs entry or command: what runs elsewhere can't be frozen here")
        if not self.command and (self.args or self.cwd or self.restart != "never"):
            raise ValueError("args, cwd and restart belong to a command")
        told = [*self.args, *self.env.values()]
        if isinstance(self.state, DatabaseConfig) and self.command and not any(DSN in text for text in told):
            raise ValueError(
                f"state of kind database and no {DSN} in args or env: write it where the server is to find the DSN of "
                "its database"
            )
        if isinstance(self.state, ProcessConfig) and any(DSN in text for text in told):
            raise ValueError(f"{DSN} in args or env, but only state of kind database has a DSN")
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
    contents: dict[str, str]
    """Hash of the files that each server's working folder starts with, where it has any."""
    documents: dict[str, bytes]
    """Content of what each server's document starts as, where it is said."""
    hash: str


def read(path: Path) -> Source:
    """Read an environment from its folder, its `environment.toml` or an `mcp.json`.

    Raises `Unprocessable` (`invalid_environment`) that names the file and every problem in it, or
    `environment_not_there`.
    """
    file = path
    try:
        path = path.expanduser().resolve()
        file = path / "environment.toml" if path.is_dir() else path
        if path.is_dir() and not file.exists() and (path / "mcp.json").exists():
            file = path / "mcp.json"
        text = _text(file)
    except FileNotFoundError as error:
        raise Unprocessable(
            f"The gateway finds no {file} on its machine.",
            code="environment_not_there",
            hint="Give a folder that holds an environment.toml, or an mcp.json, by its path on the gateway's machine.",
        ) from error
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
    total = hashlib.sha256(config.model_dump_json(by_alias=True, exclude_defaults=True).encode())
    for name, found in scripts.items():
        total.update("".join(f"\0{name}\0{script.name}\0{script.content}" for script in found).encode())
        # Loaded by another version of MegaMCP it is another version of the environment.
        maker = INSIDE if isinstance(config.servers[name].state, DatabaseConfig) else str(COMPILER_VERSION)
        total.update(f"\0{maker}".encode() * bool(found))
    contents: dict[str, str] = {}
    documents: dict[str, bytes] = {}
    for name, server in config.servers.items():
        if isinstance(server.state, ProcessConfig) and server.state.files is not None:
            contents[name] = _content(file.parent, server.state.files)
            total.update(f"\0{name}\0{contents[name]}".encode())
        if isinstance(server.state, DocumentConfig) and server.state.initial is not None:
            documents[name] = _document(file.parent, name, server.state.initial)
            total.update(f"\0{name}\0".encode() + documents[name])
    if any(server.entry or server.command for server in config.servers.values()):
        for code in sorted(file.parent.glob("*.py")):  # tools that change make a new version, on processes of its own
            total.update(b"\0" + code.name.encode() + b"\0" + hashlib.sha256(code.read_bytes()).digest())
    return Source(
        file.parent,
        config,
        {name: found for name, found in scripts.items() if found},
        contents,
        documents,
        total.hexdigest()[:16],
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
    if server.command and isinstance(server.state, NoneConfig):
        raise Unprocessable(
            f"servers.{name} is started by a command, so each rollout gets a process of its own: that needs state of"
            f" kind process or database, not {server.state.kind}.",
            code="unsupported_server",
            hint="Leave its state out (a sandbox keeps it), or start the server yourself and give its url.",
        )
    match server.state:
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


def _content(folder: Path, relative: str) -> str:
    """Digest of a folder of files. Raises `Unprocessable`."""
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise _invalid(path, "lies outside of the environment's folder")
    try:
        return digest(path)
    except OSError as error:
        raise _invalid(path, str(error)) from error


def _document(folder: Path, server: str, relative: str) -> bytes:
    """Packed content of a JSON file. Raises `Unprocessable`."""
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise _invalid(path, "lies outside of the environment's folder")
    try:
        return packed_whole(msgspec.json.decode(_text(path)))
    except (OSError, ValueError, NotJson) as error:  # msgspec's are ValueErrors
        raise _invalid(path, f"what servers.{server} starts as: {error}") from error


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
    """16 hex digits of the SQL that a database is made from, and 8 of what is put in besides."""
    parts = ["database", *(script.content for script in scripts)]
    return f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}-{INSIDE}"

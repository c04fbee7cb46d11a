"""An environment as it lies on disk: its definition, SQL, files and documents, and the hash that names its version.

Reads files and decides whether they make sense; loads nothing and knows no database.
"""

import contextlib
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from megamcp.contradictions import contradictions, of_other_programs, problem_of
from megamcp.definitions import (
    DatabaseConfig,
    DocumentConfig,
    EnvironmentConfig,
    NoneConfig,
    ProcessConfig,
    SchemaConfig,
    ServerConfig,
)
from megamcp.documents.content import NotJson, packed_whole
from megamcp.errors import Unprocessable
from megamcp.loading import Script
from megamcp.loading.script import read as read_script
from megamcp.references import missing_secrets
from megamcp.state.clones.source import INSIDE
from megamcp.state.schema import COMPILER_VERSION
from sandboxes.files import digest
from sandboxes.types import SandboxError


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
        raise _invalid(file.name, str(error)) from error
    try:
        raw = _from_mcp_json(file, json.loads(text)) if file.suffix == ".json" else tomllib.loads(text)
        config = EnvironmentConfig.model_validate(raw)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise _invalid(file.name, str(error)) from error
    except ValidationError as error:
        raise _problems(file, [problem_of(one) for one in error.errors()]) from error
    if problems := contradictions(config.servers):
        raise _problems(file, problems)
    if problems := missing_secrets(config.servers):
        raise _problems(file, problems)
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
        if server.cwd is not None:
            _demand_cwd(file.parent, name, server, server.cwd)
        if isinstance(server.state, ProcessConfig) and server.state.files is not None:
            contents[name] = _content(file.parent, f"servers.{name}.state.files", server.state.files)
            total.update(f"\0{name}\0{contents[name]}".encode())
        if isinstance(server.state, DocumentConfig) and server.state.initial is not None:
            documents[name] = _document(file.parent, f"servers.{name}.state.initial", server.state.initial)
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


_MCP_JSON = ("url", "transport", "headers", "command", "args", "env", "cwd", "state", "restart", "oauth")
"""What is read of a server in an `mcp.json`; state and restart are ours. Other programs' fields are left alone."""


def _from_mcp_json(file: Path, raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict) or not isinstance(raw.get("mcpServers"), dict):
        found = f", but {', '.join(raw)}" if isinstance(raw, dict) and raw else ""
        raise _invalid(file.name, f"there is no object mcpServers{found}")
    name = raw.get("name") or re.sub(r"[^A-Za-z0-9_-]", "-", file.parent.name) or "environment"
    said = {key: value for key, value in raw["mcpServers"].items() if isinstance(value, dict)}
    if problems := [one for key, value in said.items() for one in of_other_programs(key, value, _MCP_JSON)]:
        raise _problems(file, problems)
    servers = {key: {field: value[field] for field in _MCP_JSON if field in value} for key, value in said.items()}
    for key, server in servers.items():
        if said[key].get("type") == "sse":
            server.setdefault("transport", "sse")
        if "oauth" in server:
            server["oauth"] = _ours(server["oauth"])
    return {"name": name, "servers": {**raw["mcpServers"], **servers}}


def _ours(oauth: object) -> object:
    """Other programs have an `oauth`, too: how they call the client's id, and what is about their own machine."""
    if not isinstance(oauth, dict):
        return oauth
    own = {"client_id" if name == "clientId" else name: value for name, value in oauth.items()}
    return {name: value for name, value in own.items() if name != "callbackPort"}


def _scripts(folder: Path, name: str, server: ServerConfig) -> list[Script]:
    if server.command and isinstance(server.state, NoneConfig):
        raise Unprocessable(
            f"servers.{name} is started by a command, so each rollout gets a process of its own: that needs state of"
            f" kind process or database, not {server.state.kind}.",
            code="unsupported_server",
            hint="Leave its state out (a sandbox keeps it), or start the server yourself and give its url.",
        )
    where = f"servers.{name}.state"
    match server.state:
        case SchemaConfig(dump=str(dump)) as config:
            return [_script(folder, f"{where}.dump", dump, dump=True, schema=config.source_schema)]
        case DatabaseConfig(dump=str(dump)):
            return [_script(folder, f"{where}.dump", dump, dump=True)]
        case SchemaConfig(schema_file=schema, seed=seeds) | DatabaseConfig(schema_file=schema, seed=seeds):
            return [
                _script(folder, f"{where}.schema", schema),
                *(_script(folder, f"{where}.seed", seed) for seed in seeds),
            ]
    return []


def _script(folder: Path, where: str, relative: str, **how: Any) -> Script:
    with _told_of(where, relative):
        return read_script(_inside(folder, relative), relative, **how)


def _content(folder: Path, where: str, relative: str) -> str:
    """Digest of a folder of files. Raises `Unprocessable`."""
    with _told_of(where, relative):
        path = _inside(folder, relative)
        if not path.is_dir():
            raise NotADirectoryError(f"there is no folder {path}")
        return digest(path)


def _document(folder: Path, where: str, relative: str) -> bytes:
    """Packed content of a JSON file. Raises `Unprocessable`."""
    with _told_of(where, relative):
        return packed_whole(msgspec.json.decode(_text(_inside(folder, relative))))


def _demand_cwd(folder: Path, name: str, server: ServerConfig, cwd: str) -> None:
    """Raises `Unprocessable` where a command is to be started in a folder that this host ought to have."""
    of_keeper = isinstance(server.state, ProcessConfig) and os.path.isabs(cwd)
    of_image = isinstance(server.state, ProcessConfig) and server.state.image is not None
    if not of_keeper and not of_image:
        with _told_of(f"servers.{name}.cwd", cwd):
            if not (folder / cwd).is_dir():
                raise NotADirectoryError(f"there is no folder {folder / cwd}")


def _inside(folder: Path, relative: str) -> Path:
    """Raises ValueError, OSError."""
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError("it lies outside of the environment's folder")
    return path


@contextlib.contextmanager
def _told_of(where: str, relative: str) -> Iterator[None]:
    """What is wrong with a file is told by the field that names it."""
    try:
        yield
    except (OSError, ValueError, NotJson, SandboxError) as error:  # msgspec's are ValueErrors
        what = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else error
        raise _invalid(relative, f"{what} ({where})") from error


def _text(file: Path) -> str:
    """A regular file's text: a pipe or a device would never end. Raises OSError, ValueError."""
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is not a regular file")
    return file.read_text(encoding="utf-8")


def _problems(file: Path, problems: list[dict[str, str]]) -> Unprocessable:
    told = "; ".join(f"{problem['where'] or 'file'}: {problem['problem']}" for problem in problems)
    return _invalid(file.name, told, problems=problems)


def _invalid(file: str, reason: str, **extra: Any) -> Unprocessable:
    return Unprocessable(
        f"{file}: {reason}",
        code="invalid_environment",
        hint="See docs/environments.md for the format.",
        **extra,
    )


def database_hash(scripts: Sequence[Script]) -> str:
    """16 hex digits of the SQL that a database is made from, and 8 of what is put in besides."""
    parts = ["database", *(script.content for script in scripts)]
    return f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}-{INSIDE}"

"""What an environment is: `environment.toml` (or `mcp.json`) as models.

Definitions of versions that were loaded long ago are read with them as well: what is refused here can't be read any
more. `reading` reads the files, `contradictions` says what a new version may not say.
"""

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator, model_validator

from megamcp import references

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


class Grant(StrEnum):
    """How the gateway gets a token for a server."""

    AUTHORIZATION_CODE = "authorization_code"
    """A person consents once, in a browser."""
    CLIENT_CREDENTIALS = "client_credentials"
    """The gateway's own credentials are enough."""


class OAuthConfig(_Config):
    """What the gateway is to a server's authorization server. Nothing of it is needed where that registers clients by
    itself."""

    grant: Grant = Grant.AUTHORIZATION_CODE
    client_id: str | None = Field(None, description="Of a client that is registered already.", min_length=1)
    client_secret: str | None = Field(None, description="A reference: ${env:NAME} or ${file:/path}.")
    private_key: str | None = Field(None, description="A reference to a PEM: the client signs instead of a secret.")
    algorithm: Literal["RS256", "ES256"] = Field("ES256", description="What private_key signs by.")
    client_metadata_url: str | None = Field(
        None, pattern=r"^https://[^/]+/.+", description="Client id metadata document, in place of the gateway's own."
    )
    scopes: list[str] = Field(default_factory=list, description="Asked for besides those that the server names.")
    issuer: str | None = Field(
        None, pattern=r"^https?://", description="The only authorization server that may see this client."
    )

    @field_validator("scopes", mode="before")
    @classmethod
    def _in_words(cls, scopes: Any) -> Any:
        return scopes.split() if isinstance(scopes, str) else scopes

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for name in ("client_secret", "private_key"):
            if (text := getattr(self, name)) is not None and not references.only(text):
                raise ValueError(f"{name} is kept in the database as it stands here: write ${{env:NAME}} or a file's")
        if (self.client_secret or self.private_key) and not self.client_id:
            raise ValueError("client_secret and private_key belong to a client_id")
        if self.client_secret and self.private_key:
            raise ValueError("give client_secret or private_key, not both")
        if self.grant is Grant.CLIENT_CREDENTIALS and not (self.client_secret or self.private_key):
            raise ValueError("grant client_credentials needs client_id, and client_secret or private_key")
        if self.grant is Grant.AUTHORIZATION_CODE and self.private_key:
            raise ValueError("private_key is for the grant client_credentials")
        return self


DSN = "{dsn}"
"""Stands in `args` and `env` of a command for the DSN of the rollout's database."""


def _unsaid(value: object) -> bool:
    """A field that says nothing is no part of a version's hash."""
    return value in (None, "never", "calls")


class ServerConfig(_Config):
    """One tool server: our child (`entry`), one that runs elsewhere (`url`), or a process a rollout (`command`)."""

    entry: str | None = Field(None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    url: str | None = Field(None, pattern=r"^https?://")
    headers: dict[str, str] = Field(default_factory=dict)
    oauth: OAuthConfig | None = Field(None, description="Of a url.")
    command: str | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    transport: Literal["http", "sse"] | None = Field(
        None, exclude_if=_unsaid, description="Of a url: `sse` is the one of 2024-11-05, before streamable HTTP."
    )
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
    journal: Literal["calls", "none"] = Field(
        "calls", description="`none`: calls leave no row. Only where no server keeps state here.", exclude_if=_unsaid
    )
    servers: dict[str, ServerConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _server_names(self) -> "EnvironmentConfig":
        for name in self.servers:
            if not NAME.match(name) or "__" in name:
                raise ValueError(f"server name {name!r}: letters, digits, - and _ only, no double underscore")
        return self

    @model_validator(mode="after")
    def _what_may_go_unrecorded(self) -> "EnvironmentConfig":
        kept = [name for name, server in self.servers.items() if server.state.kind != "none"]
        if self.journal == "none" and kept:
            raise ValueError(
                f'journal = "none", but {", ".join(kept)} keeps state: what changes it has to be in the journal; take '
                "journal out, or make an environment of its own of the servers without state"
            )
        return self

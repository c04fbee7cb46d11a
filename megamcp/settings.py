"""Every setting of the gateway: `MEGAMCP_<NAME>` in the environment, or a keyword in tests.

Durations are seconds, sizes are bytes. `docs/settings.md` lists them all; a test compares it with this file.
"""

import difflib
import ipaddress
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

OTHER_VARIABLES = frozenset(
    {
        # the command line, the client, tool servers and tests read these; compose.yaml has its image's name in one
        *("MEGAMCP_URL", "MEGAMCP_FROM_DSN", "MEGAMCP_FAILPOINTS", "MEGAMCP_IMAGE", "MEGAMCP_ENVIRONMENT"),
        *("MEGAMCP_TOOL_DSN", "MEGAMCP_TOOL_POOL", "MEGAMCP_TOOL_SERVER", "MEGAMCP_TRUST_READ_ONLY"),
        *("MEGAMCP_TOOL_INSTANCES", "MEGAMCP_TOOL_INSTANCE_BYTES", "MEGAMCP_TOOL_DOCUMENT_BYTES"),
        *("MEGAMCP_TEST_DSN", "MEGAMCP_TEST_BASE", "MEGAMCP_TEST_OVERLAY_SERVER"),
    }
)
"""Variables that begin as settings do and are none."""


def default_data_dir() -> Path:
    """Where the embedded PostgreSQL lives: `~/.megamcp`, or a temporary folder for a user without a home."""
    try:
        return Path.home() / ".megamcp"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "megamcp"


class Settings(BaseSettings):
    """Read once at start; nothing here changes while the gateway runs."""

    model_config = SettingsConfigDict(env_prefix="MEGAMCP_", extra="ignore")

    database_url: SecretStr | None = Field(
        None, description="DSN of a PostgreSQL 18 of your own. Unset: an embedded one in `data_dir`."
    )
    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="Folder of the embedded PostgreSQL and of run-time files.",
    )
    state_urls: list[SecretStr] = Field(
        default_factory=list,
        description="DSNs (JSON list) of PostgreSQL 18 clusters for state of kind `database`, of logins that may do all"
        " there. Unset: an embedded one in `state_dir`, started when it is first needed.",
    )
    state_dir: Path | None = Field(
        None,
        description="Folder of the embedded state cluster, best on XFS with reflink or on btrfs. Unset: `state` in"
        " `data_dir`.",
    )
    sandbox_socket: Path | None = Field(
        None,
        description="Unix socket of the host's keeper of sandboxes (`python -m sandboxes`). Unset: one of the gateway's"
        " own, with the gateway's rights, started when it is first needed.",
    )
    sandbox_dir: Path | None = Field(
        None, description="Folder of the gateway's own keeper. Unset: `sandboxes` in `data_dir`."
    )
    sandbox_park_s: float = Field(
        600, gt=0, description="A sandbox that was not used for so long waits on disk, where its runtime can do that."
    )
    relay_host: str = Field(
        "127.0.0.1", description="Address that SQL clients with a rollout's DSN connect to; `0.0.0.0` for all."
    )
    relay_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port that they connect to, listened on from the start; 0 takes a free one, different in each"
        " process, when it is first needed.",
    )
    relay_public_port: int | None = Field(
        None, ge=1, le=65535, description="Port that DSNs name, where clients come in by another than the relay's own."
    )
    host: str = Field("127.0.0.1", description="Address that `megamcp serve` listens on.")
    port: int = Field(8600, ge=0, le=65535, description="Port that `megamcp serve` listens on; 0 takes a free one.")
    public_url: str | None = Field(
        None,
        description="Base of the rollout URLs that are handed out, and of the page that a consent for a tool server"
        " comes back to. Unset: taken from each request, and the address that is listened on.",
    )
    workers: int = Field(1, ge=1, le=64, description="Gateway processes. Every lock is in PostgreSQL.")
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Origins (JSON list) whose web pages may reach rollouts, besides this machine's; `*` allows all.",
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Names (JSON list) that requests may call the gateway by in `Host`, besides addresses, `localhost`,"
        " and those of `host` and `public_url`; `*` allows all. Unset, and keys are wanted: all.",
    )
    api_key: SecretStr | None = Field(
        None,
        description="The first admin's key. When set, `/v1` and `/e/` want `Authorization: Bearer <key>`: this one, or"
        " one of `megamcp key create`. Rollout URLs are their own secret.",
    )
    agent_keys: bool = Field(
        False, description="Whether rollout URLs want a key too, of the rollout's tenant. Where keys are wanted at all."
    )
    open_to_all: bool = Field(
        False,
        description="Listen on other than loopback addresses without any key: for where something else keeps strangers"
        " out.",
    )
    jwt_issuer: str | None = Field(
        None,
        description="Issuer (`iss`) whose JWTs are taken as keys, signed by RS256, ES256 or EdDSA. When set, keys are"
        " wanted.",
    )
    jwt_audience: str | None = Field(
        None,
        description="Their audience (`aud`). Unset: `public_url`, or what is listened on; URLs below it are taken too.",
    )
    jwt_jwks_url: str | None = Field(
        None, description="Where the issuer's keys are. Unset: `/.well-known/jwks.json` below the issuer."
    )
    jwt_scope_claim: str = Field(
        "scope", description="Claim that has `megamcp:admin`, `:trainer`, `:agent` or `:read-only`: text or list."
    )
    jwt_tenant_claim: str = Field(
        "tenant", description="Claim that names the tenant. Empty: all tokens are of the tenant `default`."
    )
    audit_log: Path | None = Field(
        None,
        description="File that admin and lifecycle actions are appended to, a line of JSON each. Unset: the log, where"
        " keys are wanted.",
    )
    token_key: SecretStr | None = Field(
        None,
        min_length=16,
        description="What tokens for tool servers are encrypted by in the database; gateways that share one need the"
        " same. Unset: `token.key` in `data_dir`, made when it is first needed.",
    )
    environments: list[Path] = Field(
        default_factory=list,
        description="Environment folders (JSON list) to load at start, besides the bundled ones.",
    )
    bundled_environments: bool = Field(True, description="Load the bundled environments at start.")
    reload: bool = Field(
        False, description="Load the environments again when a file in their folders changes. SIGHUP does it once."
    )

    rollout_ttl_s: float = Field(3600, gt=0, description="Lease of a rollout whose caller names none.")
    checkpoint_ttl_s: float = Field(86400, gt=0, description="Lease of a checkpoint whose caller names none.")
    max_ttl_s: float = Field(30 * 86400, gt=0, description="Longest lease that may be asked for.")
    max_rollouts: int = Field(200_000, gt=0, description="Open rollouts in all; one more is answered with 429.")
    max_fork: int = Field(1000, gt=0, description="Most rollouts that one request may open or fork.")
    chain_layers: int = Field(
        8, ge=2, description="A rollout whose chain has more layers than this is put on a squashed one."
    )
    squash_interval_s: float = Field(0.5, gt=0, description="Pause between two looks for chains to squash.")
    reap_interval_s: float = Field(5, gt=0, description="Pause between two runs of the reaper.")
    journal_days: float = Field(30, gt=0, description="Journal rows of ended rollouts are kept this long.")
    blob_bytes: int = Field(
        4 << 30, gt=0, description="Bytes of results over 32 KiB that are kept; the oldest go first."
    )

    call_timeout_s: float = Field(60, gt=0, description="Deadline of a tool call, waiting included.")
    connect_timeout_s: float = Field(5, gt=0, description="Deadline for a connection to a tool server.")
    start_timeout_s: float = Field(30, gt=0, description="Deadline for a tool server's process to become ready.")
    quiesce_timeout_s: float = Field(
        30, ge=0, description="How long a checkpoint waits for running calls before it ends them."
    )
    rollback_grace_s: float = Field(
        0.5, ge=0, description="How long rollback and release wait for running calls before they end them."
    )
    database_log: int = Field(
        16 << 20,
        gt=0,
        description="Undo log behind which a checkpoint is a copy of its own; no way back is much longer. What lies"
        " before the oldest one's copy is trimmed.",
    )
    rewind_timeout_s: float = Field(
        60,
        gt=0,
        description="How long a database may take to put rows back. Over it, a copy is made in its place, with the"
        " same limit.",
    )
    query_timeout_s: float = Field(10, gt=0, description="Deadline of an evaluator's SQL query.")
    query_rows: int = Field(10_000, gt=0, description="Most rows that an evaluator's SQL query returns.")
    diff_rows: int = Field(
        1_000, gt=0, description="Most rows that a diff lists for each table, and files for each server."
    )

    document_bytes: int = Field(
        32 << 20, gt=0, le=256 << 20, description="Largest document of a tool server with state of kind `document`."
    )
    max_body_bytes: int = Field(64 << 20, gt=0, description="Largest request body.")
    max_result_bytes: int = Field(64 << 20, gt=0, description="Largest result taken from a tool server.")
    queue_per_rollout: int = Field(64, gt=0, description="Calls of one rollout that may wait; one more gets 429.")
    calls_in_flight: int = Field(1000, gt=0, description="Calls of one gateway process; one more gets 429.")
    dedicated_processes: int = Field(
        100, gt=0, description="Processes of dedicated servers in each gateway process; idle ones make room for others."
    )
    dedicated_idle_s: float = Field(
        300, gt=0, description="A dedicated server's process that had nothing to do for so long is stopped."
    )
    control_connections: int = Field(12, ge=2, description="PostgreSQL connections of each gateway process.")
    state_connections: int = Field(
        32, ge=1, description="Connections of each process to databases of a state cluster, for checkpoints and such."
    )
    load_statement_s: float = Field(
        600,
        gt=0,
        description="Longest that one statement of an environment's SQL may take, for state of kind `database`.",
    )
    spare_databases: int = Field(
        4, ge=0, description="Copies of each source in use that are kept ready for rollouts to come, on each cluster."
    )
    database_quota: int = Field(
        1 << 30, gt=0, description="Disk that one rollout's database may have to itself, in bytes; over it, writes end."
    )
    disk_reserve: int = Field(
        1 << 30,
        ge=0,
        description="Free space that a state cluster's file system keeps, in bytes; copies end before it.",
    )
    tool_connections: int = Field(8, ge=1, description="PostgreSQL connections of each tool server process.")
    query_connections: int = Field(4, ge=1, description="PostgreSQL connections of each process for evaluators' SQL.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="How much is logged.")
    log_format: Literal["text", "json"] = Field(
        "text", description="Form of the log's lines; docs/operate.md says what documents of `json` hold."
    )

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine reaches the gateway."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def unknown_variables(names: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Those of the variables that look like settings and that nothing reads, each with the setting that is most like
    it, if any is. What begins with `MEGAMCP_SECRET_` is for environments to refer to."""
    known = [f"MEGAMCP_{name.upper()}" for name in Settings.model_fields]
    for name in sorted(names):
        ours = name.upper().startswith("MEGAMCP_") and not name.upper().startswith("MEGAMCP_SECRET_")
        if ours and name.upper() not in (*known, *OTHER_VARIABLES):
            yield name, next(iter(difflib.get_close_matches(name.upper(), known, 1, 0.7)), None)

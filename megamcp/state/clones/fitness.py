"""Whether a server can be a state cluster, and what is made ready in it once.

Looks at the version, the login's rights and the file system; makes the roles that all databases share; closes other
databases to rollouts' logins.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import asyncpg

from megamcp.errors import Unprocessable
from megamcp.state.clones import disk, logins
from megamcp.state.names import ident

log = logging.getLogger(__name__)

PROBE = "mm_probe"


async def demand(connection: Any, where: str) -> None:
    """Raises `Unprocessable` (`postgres_too_old`, `postgres_rights`) for a server that can't be a state cluster."""
    row = await connection.fetchrow(
        "select current_setting('server_version_num')::int as number,"
        " current_setting('server_version') as version,"
        " rolsuper from pg_roles where rolname = current_user"
    )
    if row["number"] < 180000:
        raise Unprocessable(
            f"The state cluster at {where} runs PostgreSQL {row['version']}; databases as state need 18.",
            code="postgres_too_old",
            hint="Name a PostgreSQL 18 in MEGAMCP_STATE_URLS, or leave that out: the embedded one is 18.",
        )
    if not row["rolsuper"]:
        raise Unprocessable(
            f"The login of the state cluster at {where} is no superuser.",
            code="postgres_rights",
            hint="ALTER ROLE … SUPERUSER, or name another in MEGAMCP_STATE_URLS: databases as state need event triggers"
            " and changed catalogs, which only a superuser makes.",
        )


async def examine(connection: Any, where: str) -> str:
    """Path of the data folder. Makes the roles that all databases share. Raises what `demand` raises."""
    await demand(connection, where)
    await connection.execute(logins.group(logins.OWNER) + logins.group(logins.HANDS))
    folder: str = await connection.fetchval("select setting from pg_settings where name = 'data_directory'")
    return folder


async def close_others(connection: Any, cluster: str, prefix: str, control: str | None) -> None:
    """A database's login may go nowhere else. Databases let everybody in until somebody says otherwise.

    `control` is the control plane's database, where that is on this cluster.
    """
    others = await connection.fetch(
        "select datname, datname = current_database() or datname in ('postgres', 'template1') or datname = $2 as known"
        " from pg_database"
        " where datallowconn and (not starts_with(datname, $1) or datname = $2) and exists ("
        "select from aclexplode(coalesce(datacl, acldefault('d', datdba))) a"
        " where a.grantee = 0 and a.privilege_type = 'CONNECT')",
        prefix,
        control,
    )
    tools = await connection.fetch("select rolname from pg_roles where rolname in ('megamcp_tools', 'megamcp_queries')")
    for row in others:
        if not row["known"]:
            log.warning(
                "state cluster %s: everybody may connect to its database %s, rollouts' logins too; to end that: REVOKE"
                " CONNECT ON DATABASE … FROM PUBLIC",
                cluster,
                row["datname"],
            )
            continue
        await connection.execute(f"revoke connect on database {ident(row['datname'])} from public")
        for role in tools:  # the control plane's tool servers log in to its own database
            await connection.execute(f"grant connect on database {ident(row['datname'])} to {ident(role['rolname'])}")


async def shares_blocks(connection: Any, cluster: str, folder: Path | None) -> bool:
    """Whether a copy shares its blocks here (reflink): one is made. Wants the lock for cloning.

    PostgreSQL's clone copy works on any file system of Linux, and where it can't share it copies in full without a
    word. So the copy's files are looked at; on a server whose files aren't at hand (`folder` None) nobody can tell.
    """
    if folder is None:
        log.warning("state cluster %s is not on this machine: whether copies share blocks can't be told", cluster)
        return False
    await connection.execute(f"drop database if exists {PROBE}")
    try:
        await connection.execute("set file_copy_method = clone")
        await connection.execute(
            f"create database {PROBE} template template0 strategy file_copy allow_connections false"
        )
        row = await connection.fetchrow(
            "select oid, pg_database_size(oid) as size from pg_database where datname = $1", PROBE
        )
        own = await asyncio.to_thread(disk.own_bytes, folder / "base" / str(row["oid"]))
        return own is not None and own < row["size"] / 2
    except asyncpg.PostgresError as error:
        log.info("state cluster %s: no clone copy: %s", cluster, error)
        return False
    finally:
        await connection.execute("reset file_copy_method")
        await connection.execute(f"drop database if exists {PROBE}")

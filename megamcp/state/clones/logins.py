"""Roles of the cluster's databases, as SQL.

- `mm_owner` (no login) owns what users make, in every database; it has no rights on anything that databases share.
- A database's login may connect to that database alone, and works as `mm_owner`.
- A database's *hand* puts rows back in it. Putting rows in may run functions of the user's (in indexes, checks,
  domains), so it is never done with the superuser's rights, and a hand reaches one database as a login does.
- `mm_hands` (no login): the functions of schema megamcp that hands may call.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from megamcp.state.names import ident, literal

OWNER = "mm_owner"
HANDS = "mm_hands"
# Stretching is for passwords that can be guessed. Ours have 256 random bits, and a client spends 10 ms on 4096 rounds.
_ITERATIONS = 1


def hand(database: str) -> str:
    """Name of the role that puts rows back in a database."""
    return f"{database}_hand"


def scram_verifier(password: str, *, iterations: int = _ITERATIONS) -> str:
    """What PostgreSQL stores of a password (RFC 5803), so that the password itself is in no statement and no log."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    texts = (base64.b64encode(part).decode() for part in (salt, stored, server))
    return "SCRAM-SHA-256${}:{}${}:{}".format(iterations, *texts)


def is_password(verifier: str, password: str) -> bool:
    """Whether what PostgreSQL stores is of this password."""
    try:
        _, parts, keys = verifier.split("$")
        rounds, salt = parts.split(":")
        if int(rounds) != _ITERATIONS:  # a role may write itself one with rounds for hours
            return False
        server = base64.b64decode(keys.split(":")[1])
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(salt), _ITERATIONS)
    except (ValueError, IndexError, OverflowError):
        return False
    return hmac.compare_digest(hmac.digest(salted, b"Server Key", "sha256"), server)


def group(role: str) -> str:
    """Make a role without a login, unless it's there."""
    return f"""do $do$ begin
      if not exists (select from pg_roles where rolname = {literal(role)}) then
        create role {ident(role)} nologin;
      end if;
    exception when duplicate_object or unique_violation then null; end $do$;"""


def login(database: str, role: str, password: str, *, exists: bool) -> str:
    """Make a login of a database, or renew it: its password, its right to connect, and that it works as the owner."""
    verb = "alter" if exists else "create"
    role_sql, database_sql = ident(role), ident(database)
    return (
        f"{verb} role {role_sql} login password {literal(scram_verifier(password))};"
        f"grant {OWNER} to {role_sql} with inherit true, set true;"
        + (f"alter role {role_sql} reset all; alter role {role_sql} in database {database_sql} reset all;" * exists)
        + f"grant connect on database {database_sql} to {role_sql};"
        f"alter role {role_sql} in database {database_sql} set role = {literal(OWNER)};"
    )


def hand_login(database: str, password: str, *, exists: bool) -> str:
    """Make the hand of a database, or renew it. Triggers of the user's and foreign keys are quiet for it."""
    verb = "alter" if exists else "create"
    role = ident(hand(database))
    return (
        f"{verb} role {role} login bypassrls password {literal(scram_verifier(password))};"
        f"grant {OWNER}, {HANDS} to {role} with inherit true, set false;"
        f"alter role {role} reset all; alter role {role} set session_replication_role = 'replica';"
        f"grant connect on database {ident(database)} to {role};"
    )


# Settings are joined once: they have no index by role.
_STRAYED = """select r.rolname as login, r.rolpassword as verifier,
    array_agg(case when s.setdatabase = d.oid then s.one else '' end) filter (where s.setrole is not null) as settings
  from pg_authid r join pg_database d on d.datname = r.rolname
  left join (select x.setrole, x.setdatabase, unnest(x.setconfig) as one from pg_db_role_setting x) s
    on s.setrole = r.oid
 where starts_with(r.rolname, $1) and r.rolcanlogin
 group by r.rolname, r.rolpassword"""


async def strayed(
    connection: Any, prefix: str, password: Callable[[str], str], sound: MutableMapping[str, str]
) -> list[str]:
    """Logins of the databases of a prefix that have changed their own password or settings, as every role may.

    `sound` keeps the verifiers that were found good, for the next time.
    """
    found = []
    for row in await connection.fetch(_STRAYED, prefix):
        login, verifier = row["login"], row["verifier"] or ""
        if sound.get(login) != verifier and is_password(verifier, password(login)):
            sound[login] = verifier
        if sound.get(login) != verifier or row["settings"] != [f"role={OWNER}"]:
            found.append(login)
    return found


async def policy_for(connection: Any, role: str) -> str | None:
    """A policy in this database that is for a role, in words."""
    found: str | None = await connection.fetchval(
        "select pg_describe_object(s.classid, s.objid, s.objsubid) from pg_shdepend s"
        " where s.dbid = (select oid from pg_database where datname = current_database())"
        " and s.refclassid = 'pg_authid'::regclass and s.refobjid = (select oid from pg_roles where rolname = $1)"
        " and s.deptype = 'r' limit 1",
        role,
    )
    return found


async def strangers(connection: Any, database: str, *, but: str | None = None) -> list[str]:
    """Roles that own something in a database, or were granted something there, and should not."""
    rows = await connection.fetch(
        "select distinct r.rolname from pg_shdepend s join pg_roles r on r.oid = s.refobjid"
        " where s.dbid = (select oid from pg_database where datname = $1) and s.refclassid = 'pg_authid'::regclass"
        " and not r.rolsuper and r.oid >= 16384 and r.rolname <> all ($2::text[])",
        database,
        [OWNER, HANDS, but or ""],
    )
    return [row["rolname"] for row in rows]


_STRAYS = """select r.rolname
  from pg_roles r, lateral (select regexp_replace(r.rolname, '_(hand|builder)$', '') as name) o
 where starts_with(r.rolname, $1)
   and not exists (select from pg_database d where d.datname in (o.name, o.name || '_new'))"""


async def places(connection: Any, role: str) -> list[str]:
    """Databases in which something names a role."""
    rows = await connection.fetch(
        "select distinct d.datname from pg_shdepend s join pg_database d on d.oid = s.dbid"
        " where s.refclassid = 'pg_authid'::regclass and s.refobjid = (select oid from pg_roles where rolname = $1)",
        role,
    )
    return [row["datname"] for row in rows]


async def strays(connection: Any, prefix: str) -> list[str]:
    """Roles of databases of ours that are gone. A database is made before its roles and dropped before them."""
    rows = await connection.fetch(_STRAYS, prefix)
    return [row["rolname"] for row in rows]


async def disown(admin: Any, roles: Sequence[str]) -> None:
    """In the database of this connection: what the roles own becomes the owner's, what they were granted is taken back.

    DROP OWNED also takes back a role's right to connect to *other* databases, which it gets again.
    """
    async with admin.transaction():
        for role in roles:
            databases = await admin.fetch(
                "select d.datname from pg_database d, aclexplode(d.datacl) a, pg_roles r"
                " where a.grantee = r.oid and r.rolname = $1 and a.privilege_type = 'CONNECT'",
                role,
            )
            await admin.execute(f"reassign owned by {ident(role)} to {OWNER}; drop owned by {ident(role)}")
            for row in databases:
                await admin.execute(f"grant connect on database {ident(row['datname'])} to {ident(role)}")

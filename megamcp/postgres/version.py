"""Is a PostgreSQL that the user brought new enough? One question, one connection, closed again."""

from typing import Any

import asyncpg

from megamcp import errors, outages

MINIMUM = 18


async def check_server(dsn: str, *, timeout: float = 10.0) -> int:
    """The server's major version, once it's known to be at least `MINIMUM`.

    Takes SQLAlchemy's spelling of the scheme too (`postgresql+asyncpg://`). The password is in no message.
    Raises `Unprocessable` (`postgres_too_old`, `bad_database_url`) or `Unavailable` (`database_unreachable`).
    """
    scheme, separator, rest = dsn.partition("://")
    if scheme.partition("+")[0] not in {"postgresql", "postgres"} or not separator:
        raise errors.Unprocessable(
            "The database URL isn't one of PostgreSQL.",
            code="bad_database_url",
            hint="It has the form postgresql://user:password@host:5432/database.",
        )
    try:
        connection: Any = await asyncpg.connect(f"postgresql://{rest}", timeout=timeout)
    except (asyncpg.exceptions.ClientConfigurationError, ValueError) as error:
        raise errors.Unprocessable(
            f"The database URL can't be used: {type(error).__name__}.",
            code="bad_database_url",
            hint="It has the form postgresql://user:password@host:5432/database; escape special characters.",
        ) from error
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise errors.Unprocessable(  # waiting changes nothing here
            f"PostgreSQL at {_place(rest)} refuses the login: {error}.",
            code="bad_database_url",
            hint="Check the user, the password and the name of the database.",
        ) from error
    except outages.DRIVER as error:
        reason = str(error) or type(error).__name__
        raise errors.Unavailable(
            f"PostgreSQL at {_place(rest)} can't be used: {reason}.",
            code="database_unreachable",
            hint="Check that the server runs, that it listens there, and the user, password and database.",
        ) from error
    try:
        version = connection.get_server_version()
    finally:
        await connection.close(timeout=timeout)
    found = f"{version.major}.{version.micro or version.minor}"
    if version.major < MINIMUM:
        raise errors.Unprocessable(
            f"PostgreSQL at {_place(rest)} is version {found}; MegaMCP needs {MINIMUM}.",
            code="postgres_too_old",
            hint="Upgrade the server, or leave the database URL out: MegaMCP then runs its own PostgreSQL.",
            found=version.major,
            needed=MINIMUM,
        )
    return int(version.major)


def _place(rest: str) -> str:
    """Host and database of a DSN, without the credentials and the parameters other than the host."""
    location, _, query = rest.rpartition("@")[2].partition("?")
    host = next((part[5:] for part in query.split("&") if part.startswith("host=")), "")
    return f"{host}{location}" if host else location or "the default host"

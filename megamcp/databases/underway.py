"""The databases that this process is making right now, so that one whose making failed is noticed and taken away.

A row that says `creating` belongs to a process. Others see when the process has died; whether a living one still works
on it only that process knows. Nothing here makes a database or drops one: a condemned row is the keeper's.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from megamcp.databases import journal as sql
from megamcp.errors import NotFound, Unavailable
from megamcp.store import Store


class Underway:
    """One per process. `owner` is the number of it that rows carry."""

    def __init__(self, store: Store, owner: Callable[[], int]) -> None:
        self._store = store
        self._owner = owner
        self._names: set[str] = set()
        self._suspects: set[str] = set()

    @asynccontextmanager
    async def making(self, name: str) -> AsyncIterator[None]:
        """While the block makes a database whose row is there. When it fails, the row is condemned.

        Raises `Unavailable` where the database was taken away meanwhile: others took this process for dead.
        """
        self._names.add(name)
        try:
            yield
        except BaseException as error:
            ours: str | None = name
            with contextlib.suppress(Exception):  # else `condemn_abandoned` does it
                ours = await asyncio.shield(self._store.value(sql.CONDEMN_UNMADE, [name]))
            gone = isinstance(error, NotFound) and error.code == "database_not_found"
            if gone or (ours is None and isinstance(error, Exception)):
                raise not_made() from error
            raise
        finally:
            self._names.discard(name)

    async def ready(self, name: str, *, sealed: bool, lineage: Mapping[str, int] | None = None) -> None:
        """The database can be used. Raises `Unavailable` where the row was condemned while it was made."""
        known = None if lineage is None else dict(lineage)
        if await self._store.value(sql.READY, name, sealed, known) is None:
            raise not_made()

    async def condemn_abandoned(self) -> None:
        """Rows of this process that nothing here works on. Looked at twice, since a spare is taken before it is known
        which it was."""
        found = {row["name"] for row in await self._store.rows(sql.UNMADE, self._owner())} - self._names
        if sure := found & self._suspects:
            await self._store.value(sql.CONDEMN_UNMADE, list(sure))
        self._suspects = found


def not_made() -> Unavailable:
    """A row was condemned while its database was made."""
    return Unavailable(
        "The gateway lost its place in the control database while it made a database; that one is dropped.",
        code="database_not_made",
        retry_after=1,
        hint="Try again.",
    )

"""FOR UPDATE and its like, taken out of a statement: a call that writes is alone on its rollout.

What PostgreSQL forbids them with keeps them, so that it says so itself. It's asked by EXPLAIN: a lock of a view that
may not be locked fails later than one that makes no sense.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import postgast
from postgast import pg_query_pb2 as pb

from megamcp.state.fixed import without_parameters

CLAUSE = re.compile(r"\bfor\s+(no\s|key\s|update|share)", re.I)
_SENSELESS = ("0A000", "42P01")
"""With aggregates, on the nullable side of a join; OF a table that isn't there."""


async def unlocked(tree: pb.ParseResult, sql: str, fetch: Callable[..., Awaitable[Any]]) -> bool:
    """Takes the clauses out of `tree`, which is of `sql`; true when there were any that PostgreSQL takes."""
    locking = [select for select in postgast.find_nodes(tree, pb.SelectStmt) if select.locking_clause]
    if not locking:
        return False
    try:
        await fetch(f"explain {without_parameters(sql)}")
    except Exception as error:
        state = getattr(error, "sqlstate", None)
        if state is None:
            raise
        if state in _SENSELESS:
            return False
    for select in locking:
        select.ClearField("locking_clause")
    return True

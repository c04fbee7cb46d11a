"""States of tool servers: one package a kind of state, one module a concern. `schema` is the copy-on-write kind.

What the rest of MegaMCP calls is here; generators of SQL are the package's own.
"""

from megamcp.state.schema import (
    MODULUS,
    Change,
    Frozen,
    SchemaState,
    TableDiff,
    TableInfo,
    content_hash,
    counters,
    diff,
    digest,
    discard,
    freeze,
    load,
    reset_logins,
    state_sql,
    unload,
)

__all__ = [
    "MODULUS",
    "Change",
    "Frozen",
    "SchemaState",
    "TableDiff",
    "TableInfo",
    "content_hash",
    "counters",
    "diff",
    "digest",
    "discard",
    "freeze",
    "load",
    "reset_logins",
    "state_sql",
    "unload",
]

"""PostgreSQL for a gateway that has none: an embedded server in a data folder, watched by a small supervisor.

`EmbeddedPostgres` starts and stops it, `check_server` looks at a server of the user's own. The names are
loaded when first asked for: the supervisor is a module of this package and must start in milliseconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megamcp.postgres.cluster import EmbeddedPostgres
    from megamcp.postgres.version import MINIMUM, check_server

__all__ = ["MINIMUM", "EmbeddedPostgres", "check_server"]


def __getattr__(name: str) -> Any:
    if name == "EmbeddedPostgres":
        from megamcp.postgres.cluster import EmbeddedPostgres

        return EmbeddedPostgres
    if name in {"MINIMUM", "check_server"}:
        from megamcp.postgres import version

        return getattr(version, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

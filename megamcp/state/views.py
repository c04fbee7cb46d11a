"""SQL of what a tool sees: the views over the hidden tables, and their columns' defaults. Both run as the view role.

The environment's own views are made again over these as they were: PostgreSQL writes through them where it would write
through one over a table. Who may do what with a view is said in `rights`.
"""

from megamcp.state.catalog import Table
from megamcp.state.names import ident, idents
from megamcp.state.tables import parent
from megamcp.state.triggers import default_of


def create(state: str, visible: str, table: Table) -> str:
    name = f"{ident(visible)}.{ident(table.name)}"
    return f"create view {name} as select {idents(table.names)} from {parent(state, table.name)};\n"


def defaults(state: str, visible: str, table: Table) -> str:
    """Defaults on the view: PostgreSQL evaluates them only for columns left out or DEFAULT, as for a table."""
    parts: list[str] = []
    for column in table.columns:
        expression = default_of(state, table, column)
        if expression is not None:
            parts.append(
                f"alter view {ident(visible)}.{ident(table.name)} alter column {ident(column.name)} "
                f"set default {expression};\n"
            )
    return "".join(parts)

"""An agent writes SQL: full PostgreSQL on a database of the rollout's own, which the gateway can fork and roll back.

Works on any environment with state of kind `database`; the schema is the environment's, nothing here knows it.
"""

from typing import Annotated

from pydantic import Field
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Server, ToolError
from megamcp.sdk.foreign import Result, run_foreign

server = Server(
    "sql",
    instructions="A PostgreSQL 18 database of your own. Look at it with list_tables and describe_table, read with"
    " query, change it with execute (one statement a call; each call is one transaction).",
    version="1",
)

_TABLES = """select n.nspname as schema, c.relname as name,
       case c.relkind when 'v' then 'view' when 'm' then 'materialized view' when 'f' then 'foreign table'
                      else 'table' end as kind,
       greatest(c.reltuples, 0)::bigint as estimated_rows, obj_description(c.oid, 'pg_class') as comment
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind in ('r', 'p', 'v', 'm', 'f') and not c.relispartition
   and n.nspname not in ('pg_catalog', 'information_schema', 'megamcp') and n.nspname !~ '^pg_(toast|temp)'
 order by 1, 2"""

_COLUMNS = """select a.attname as column, format_type(a.atttypid, a.atttypmod) as type, not a.attnotnull as nullable,
       pg_get_expr(d.adbin, d.adrelid) as default, col_description(a.attrelid, a.attnum) as comment
  from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
 where a.attrelid = to_regclass(:name) and a.attnum > 0 and not a.attisdropped order by a.attnum"""

_CONSTRAINTS = """select conname as name, pg_get_constraintdef(oid) as definition from pg_constraint
 where conrelid = to_regclass(:name) and contype in ('p', 'u', 'f', 'c', 'x') order by contype, conname"""

_INDEXES = (
    "select pg_get_indexdef(indexrelid) as definition from pg_index where indrelid = to_regclass(:name) order by 1"
)

Limit = Annotated[int, Field(ge=1, le=10_000, description="Most rows to return.")]


@server.tool(read_only=True)
async def list_tables(db: AsyncConnection) -> list[dict[str, object]]:
    """List the tables and views, with PostgreSQL's estimate of their rows."""
    return [dict(row) for row in (await db.execute(text(_TABLES))).mappings()]


@server.tool(read_only=True)
async def describe_table(db: AsyncConnection, table: str) -> dict[str, object]:
    """Show a table's or view's columns, constraints and indexes.

    Args:
        table: Its name, with the schema where it is not on the search path.
    """
    columns = [dict(row) for row in (await db.execute(text(_COLUMNS), {"name": table})).mappings()]
    if not columns:
        raise ToolError(
            "no_such_table", f"There is no table or view {table!r}; list_tables shows those that there are."
        )
    constraints = [dict(row) for row in (await db.execute(text(_CONSTRAINTS), {"name": table})).mappings()]
    indexes = [row[0] for row in await db.execute(text(_INDEXES), {"name": table})]
    return {"table": table, "columns": columns, "constraints": constraints, "indexes": indexes}


@server.tool(read_only=True)
async def query(db: AsyncConnection, sql: str, limit: Limit = 1000) -> Result:
    """Run one statement that only reads, and return its rows.

    Args:
        sql: One statement, without parameters.
    """
    return await run_foreign(db, sql, rows=limit)


@server.tool
async def execute(db: AsyncConnection, sql: str, limit: Limit = 1000) -> Result:
    """Run one statement of any kind (INSERT, UPDATE, CREATE TABLE, SELECT …) and return what it says, and its rows.

    Args:
        sql: One statement, without parameters.
    """
    return await run_foreign(db, sql, rows=limit)

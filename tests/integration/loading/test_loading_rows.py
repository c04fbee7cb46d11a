"""Rows of COPY come to what PostgreSQL's own COPY makes of them, in values, defaults and errors."""

from pathlib import Path

import asyncpg
import pytest

from megamcp.errors import MegaMCPError
from tests.integration.loading.conftest import Place, folder_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TYPES = """
create type color as enum ('red', 'blue');
create domain short as varchar(3);
create domain shorter as short check (value <> 'bad');
create domain positive as int check (value > 0);
create type pair as (n int, color color, short short);
create table t (
  pair pair, pairs pair[],
  id int generated always as identity primary key, color color, colors color[], short short, shorter shorter,
  shorts shorter[], positive positive, code varchar(3), plain char(4), amount numeric(5, 2), twice int generated always
  as (id * 2) stored, note text default 'none', at timestamptz default now(), flags bit(3), days daterange
);
"""
GOOD = [
    ("id, color, colors", "7\tred\t{blue,red}"),
    ("id, short, shorter, shorts", "7\tabc\tab\t{a,NULL,abc}"),
    ("id, pair, pairs", '7\t(1,red,abc)\t{"(2,,)","(,blue,\\\\"a\\\\")"}'),
    ("id, code, plain, amount", "7\tabc   \tx\t1.234"),
    ("id, note", "7\t\\N"),
    ("id, note", "7\ttab\\there\\\\ \\x41 é\\n"),
    ("id, flags, days", "7\t101\t[2025-01-01,2025-01-05]"),
    ("color, positive", "blue\t3"),
]
BAD = [
    ("id, color", "7\tgreen"),
    ("id, colors", "7\t{green}"),
    ("id, short", "7\tabcd"),
    ("id, shorter", "7\tabcd"),
    ("id, shorter", "7\tbad"),
    ("id, shorts", "7\t{abcd}"),
    ("id, pair", "7\t(x,,)"),
    ("id, pair", "7\t(1,green,)"),
    ("id, pair", "7\t(1,,abcd)"),
    ("id, pairs", '7\t{"(1,,abcd)"}'),
    ("id, positive", "7\t0"),
    ("id, positive", "7\tx"),
    ("id, code", "7\tabcd"),
    ("id, amount", "7\t12345"),
    ("id, flags", "7\t1011"),
    ("id, nothing", "7\t1"),
    ("id, twice", "7\t14"),
    ("id, id", "7\t7"),
    ("id", "\\N"),
]
SHOWN = (
    "id, pair, pairs, color, colors, short, shorter, shorts, positive, code, plain, amount, twice, note, flags, days"
)


async def by_postgres(place: Place, columns: str, row: str) -> str:
    """The row, or the SQLSTATE, of plain PostgreSQL."""
    transaction = place.control.transaction()
    await transaction.start()
    try:
        await place.control.execute("create schema plain; set local search_path = plain;" + TYPES)

        async def rows():  # type: ignore[no-untyped-def]
            yield row.encode() + b"\n"

        await place.control.copy_to_table(
            "t", columns=columns.split(", "), source=rows(), schema_name="plain", timeout=None
        )
        return str(await place.control.fetchval(f"select row({SHOWN})::text from t"))
    except asyncpg.PostgresError as error:
        return str(error.sqlstate)
    finally:
        await transaction.rollback()


def seeded(tmp_path: Path, columns: str, row: str) -> Path:
    return folder_of(tmp_path / "rows", schema=TYPES, seed=f"copy t ({columns}) from stdin;\n{row}\n\\.\n")


@pytest.mark.parametrize(("columns", "row"), GOOD)
async def test_a_row_comes_to_what_postgresql_makes_of_it(place: Place, tmp_path: Path, columns: str, row: str) -> None:
    loaded = await place.load(seeded(tmp_path, columns, row))
    base = f'{loaded.servers[0].schema.hidden_schema}."t~base"'
    found = await place.control.fetchval(f"select row({SHOWN})::text from {base}")
    assert found == await by_postgres(place, columns, row)


@pytest.mark.parametrize(("columns", "row"), BAD)
async def test_a_row_is_refused_as_postgresql_refuses_it(place: Place, tmp_path: Path, columns: str, row: str) -> None:
    with pytest.raises(MegaMCPError, match=r"seed\.sql, line") as raised:
        await place.load(seeded(tmp_path, columns, row))
    assert raised.value.extra["sqlstate"] == await by_postgres(place, columns, row)


async def test_defaults_of_copied_rows_are_the_environment_s(place: Place, tmp_path: Path) -> None:
    seed = "copy t (id) from stdin;\n1\n\\.\ncopy t (color) from stdin;\nred\nblue\n\\.\nselect setval('t_id_seq', 9);"
    loaded = await place.load(folder_of(tmp_path / "defaults", schema=TYPES, seed=seed.replace("\n1\n", "\n5\n")))
    base = f'{loaded.servers[0].schema.hidden_schema}."t~base"'
    rows = await place.control.fetch(f"select id, note, at = '2026-01-01 00:00Z' as at from {base} order by id")
    assert [tuple(row) for row in rows] == [(1, "none", True), (2, "none", True), (5, "none", True)]


async def test_csv_is_read_with_its_options(place: Place, tmp_path: Path) -> None:
    seed = (
        "copy t (id, note) from stdin with (format csv, header, delimiter ';', null '-');\n"
        'id;note\n1;"a;""b""\nc"\n2;-\n\\.\n'
    )
    loaded = await place.load(folder_of(tmp_path / "csv", schema=TYPES, seed=seed))
    base = f'{loaded.servers[0].schema.hidden_schema}."t~base"'
    rows = await place.control.fetch(f"select id, note from {base} order by id")
    assert [tuple(row) for row in rows] == [(1, 'a;"b"\nc'), (2, None)]


@pytest.mark.parametrize(
    "copy",
    [
        "copy t from '/etc/passwd'",
        "copy t from program 'id'",
        "copy t (id) from stdin where pg_sleep(1) is null",
        "copy t (id) from stdin (on_error ignore)",
        "copy (select 1) to stdout",
        "copy t from stdin (format binary)",
        "copy pg_catalog.pg_class from stdin",
    ],
)
async def test_a_copy_that_is_no_rows_of_the_file_is_refused(place: Place, tmp_path: Path, copy: str) -> None:
    before = await place.left()
    folder = folder_of(tmp_path / "refused", schema=TYPES, seed=f"{copy};\n1\n\\.\n")
    with pytest.raises(MegaMCPError, match=r"seed\.sql|seed"):
        await place.load(folder)
    assert await place.left() == before


async def test_what_a_copied_row_evaluates_has_no_rights_of_the_gateway(place: Place, tmp_path: Path) -> None:
    """A check and a domain that would change a control table run as the environment's role."""
    schema = (
        "create domain spying as text check (value <> ''"
        " and not pg_catalog.has_table_privilege('megamcp.rollouts', 'select'));"
        "create table t (id int primary key, v spying, check (not has_table_privilege('megamcp.rollouts', 'select')));"
    )
    await place.load(folder_of(tmp_path / "spying", schema=schema, seed="copy t from stdin;\n1\tx\n\\.\n"))

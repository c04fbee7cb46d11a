"""SQL is cut where psql cuts it, whatever the size of the chunks that it comes in."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from megamcp.errors import Unprocessable
from megamcp.loading import dumps, inserts
from megamcp.loading.split import Command, Comment, Rows, Statement, pieces

SCRIPT = rb"""-- c;x
\restrict abc
create table "a;b" (x text default 'it''s; e', y text default E'\';' );
/* a /* b; */ c ; */ select $$;$$, $a$ ; $$ $a$, a$b$c;
create function f() returns int language sql begin atomic; select case when true then 1 else 2 end; select 2; end;
create rule r as on insert to t do (select 1; select 2);
COPY public.t (a, b) FROM stdin;
1	x;'
\\.	\.
\.

copy e from stdin;
\.
select 1 -- ; no
; ;
insert into t values ('a''b;', e'x\\');
select e'''a;' as b, 2 - 1 / 3"""

CUT: list[tuple[type, bytes, int, bytes]] = [
    (Comment, b"-- c;x", 1, b""),
    (Command, b"\\restrict abc", 2, b""),
    (Statement, b"create table \"a;b\" (x text default 'it''s; e', y text default E'\\';' )", 3, b""),
    (Statement, b"select $$;$$, $a$ ; $$ $a$, a$b$c", 4, b""),
    (
        Statement,
        b"create function f() returns int language sql begin atomic;"
        b" select case when true then 1 else 2 end; select 2; end",
        5,
        b"",
    ),
    (Statement, b"create rule r as on insert to t do (select 1; select 2)", 6, b""),
    (Rows, b"COPY public.t (a, b) FROM stdin", 7, b"1\tx;'\n\\\\.\t\\.\n"),
    (Rows, b"copy e from stdin", 12, b""),
    (Statement, b"select 1 -- ; no", 14, b""),
    (Statement, b"insert into t values ('a''b;', e'x\\\\')", 16, b""),
    (Statement, b"select e'''a;' as b, 2 - 1 / 3", 17, b""),
]


async def _chunks(raw: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


async def _cut(raw: bytes, size: int) -> list[tuple[type, bytes, int, bytes]]:
    found = []
    async for piece in pieces(_chunks(raw, size), "x.sql"):
        rows = b"".join([chunk async for chunk in piece.chunks]) if isinstance(piece, Rows) else b""
        found.append((type(piece), piece.text, piece.line, rows))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 16, 33, 64, 100, 1000])
def test_pieces_don_t_depend_on_chunks(size: int) -> None:
    assert asyncio.run(_cut(SCRIPT, size)) == CUT


def test_rows_that_nobody_reads_are_skipped() -> None:
    async def kinds() -> list[type]:
        return [type(piece) async for piece in pieces(_chunks(SCRIPT, 50), "x.sql")]

    assert asyncio.run(kinds()) == [kind for kind, *_ in CUT]


def test_line_breaks_of_windows_are_taken() -> None:
    script = b"select 1;\r\ncopy t from stdin;\r\n1\ta\r\n\\.\r\nselect 2;\r\n"
    for size in (1, 4, 100):
        cut = asyncio.run(_cut(script, size))
        assert [(text, rows) for _, text, _, rows in cut] == [
            (b"select 1", b""),
            (b"copy t from stdin", b"1\ta\r\n"),
            (b"select 2", b""),
        ]


@pytest.mark.parametrize("script", [b"copy t from stdin;\n1\n2\n", b"select 1 /* not ended"])
def test_a_file_that_was_cut_off_is_told_with_its_line(script: bytes) -> None:
    with pytest.raises(Unprocessable, match=r"x\.sql: line \d"):
        asyncio.run(_cut(script, 7))


@pytest.mark.parametrize(
    "statement",
    [
        "insert into t values (1, 'a', null)",
        "INSERT INTO \"T t\" (a, \"b\") VALUES (-1.5e3, 'it''s'), (DEFAULT,  true)",
        "insert into t (id) overriding system value values (1)",
    ],
)
def test_inserts_of_constants_are_known_without_a_parser(statement: str) -> None:
    assert inserts.plain(statement.encode()) == statement.encode()


@pytest.mark.parametrize(
    "statement",
    [
        "insert into t values (now())",
        "insert into t values (1) returning id",
        "insert into t select 1",
        "insert into other.t values (1)",
        "insert into pg_class values (1)",
        "insert into t values (e'\\'), (f())--')",
        "insert into t values ('a'), (1",
        "insert into t values (1); drop table t",
    ],
)
def test_any_other_insert_is_left_to_the_parser(statement: str) -> None:
    assert inserts.plain(statement.encode()) is None


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("insert into shop.t values (1)", "insert into t values (1)"),
        ('ALTER TABLE ONLY shop."T" ADD CHECK (shop.f(a) > 0)', 'ALTER TABLE ONLY "T" ADD CHECK (f(a) > 0)'),
        ("alter table t alter id set default nextval('shop.s'::regclass)", None),
        ("SELECT pg_catalog.setval('shop.\"S s\"', 3, true)", "SELECT setval('\"S s\"', 3, true)"),
        ("create table t (a shop.kind[], shopping text, b text default 'shop.x'::text)", None),
        ("create function shop.f() returns int language sql as $$select a from shop.t$$", None),
    ],
)
def test_a_schema_is_taken_off_its_names_and_nothing_else(statement: str, expected: str | None) -> None:
    found = dumps.unqualified(statement, "shop")
    assert found == (expected or statement.replace("shop.", "").replace("'x'", "'shop.x'"))


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("ALTER TABLE shop.t OWNER TO app", "owner"),
        ('ALTER FUNCTION shop.f(a integer) OWNER TO "App User"', "owner"),
        ("GRANT SELECT ON TABLE shop.t TO app", "grant"),
        ("REVOKE ALL ON SCHEMA shop FROM PUBLIC", "grant"),
        ("ALTER DEFAULT PRIVILEGES FOR ROLE app IN SCHEMA shop GRANT SELECT ON TABLES TO app", "grant"),
        ("SET statement_timeout = 0", "setting"),
        ("SET client_encoding = 'UTF8'", "setting"),
        ("SELECT pg_catalog.set_config('search_path', '', false)", "setting"),
        ("CREATE EXTENSION IF NOT EXISTS plpgsql WITH SCHEMA pg_catalog", "plpgsql"),
        ("COMMENT ON EXTENSION pgcrypto IS 'x'", "comment"),
        ("ALTER TABLE ONLY shop.t REPLICA IDENTITY FULL", "replication"),
        ("CREATE PUBLICATION p FOR ALL TABLES", "replication"),
        ("COMMENT ON TABLE shop.t IS 'owner to nobody'", None),
        ("SELECT pg_catalog.setval('shop.s', 1, true)", None),
        ("CREATE EXTENSION IF NOT EXISTS pgcrypto", None),
        ("ALTER TABLE ONLY shop.t ADD CONSTRAINT c CHECK (a > 0)", None),
    ],
)
def test_what_means_nothing_here_is_left_out(statement: str, what: str | None) -> None:
    assert dumps.left_out(statement.encode(), "x.sql", 1) == what


def test_old_strings_are_refused() -> None:
    with pytest.raises(Unprocessable, match="line 3"):
        dumps.left_out(b"SET standard_conforming_strings = off", "x.sql", 3)

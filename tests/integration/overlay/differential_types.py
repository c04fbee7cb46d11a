"""Types of the columns of random schemas, each with a few values: tiny domains, so that keys clash and rows match."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A type with a few values. `bad` ones are refused by the type."""

    good: tuple[str, ...]
    bad: tuple[str, ...] = ()
    equal: bool = True
    ordered: bool = True
    exact: bool = True
    """Equal values look the same."""
    construct: str = ""
    """Must be taken for the type to be drawn."""
    prelude: str = ""

    @property
    def literals(self) -> tuple[str, ...]:
        return self.good + self.bad


_MOOD = "create type mood as enum ('sad', 'ok', 'happy');"
_SCORE = "create domain score as int check (value > 0);"
_PAIR = "create type pair as (n int, word text);"
_TAGS = "create domain tags as text[] check (cardinality(value) < 4);"
_SPAN = "create type span as range (subtype = numeric);"
_GRADE = f"{_SCORE}\ncreate domain grade as score check (value < 9);"
_CALM = f"{_MOOD}\ncreate domain calm as mood check (value <> 'happy');"
_WORD = "create domain word as text not null check (value <> 'no');"
_BOX = f"{_PAIR}\ncreate type box_of as (p pair, n int[]);"
_WHOLE = f"{_PAIR}\ncreate domain whole as pair check ((value).n is distinct from 7);"

KINDS: dict[str, Kind] = {
    "int": Kind(("0", "1", "2", "3", "4", "5", "-1")),
    "bigint": Kind(("0", "1", "2", "3", "7", "9000000000")),
    "smallint": Kind(("0", "1", "2", "3", "9"), ("70000",)),
    "text": Kind(("'a'", "'b'", "'c'", "''", "'Ab'", "'it''s'")),
    "varchar(4)": Kind(("'a'", "'bb'", "'ccc'"), ("'toolong'",)),
    "char(3)": Kind(("'a'", "'a  '", "'bcd'"), ("'toolong'",)),
    "numeric(6,2)": Kind(("0", "1.5", "2.25", "-3", "1.555"), ("99999",)),
    "numeric": Kind(("0", "1.0", "1.00", "2.5", "'NaN'"), exact=False),
    "float8": Kind(("0", "'-0'", "1.5", "'NaN'", "1e300"), exact=False),
    "bool": Kind(("true", "false")),
    "timestamptz": Kind(("'2026-01-15T09:00:00Z'", "'2025-12-31T23:59:59Z'", "now()")),
    "timestamp(0)": Kind(("'2026-01-15T09:00:00'", "'2025-12-31T23:59:59.7'")),
    "date": Kind(("'2026-01-15'", "'2024-02-29'", "'infinity'")),
    "interval": Kind(("'1 day'", "'24 hours'", "'1 month'"), exact=False),
    "jsonb": Kind(("""'{"a": 1}'""", "'[1, 2]'", "'null'", """'{"b": {"c": "x"}}'""")),
    "json": Kind(("""'{"a":  1}'""", "'[1,2]'"), ("'{'",), equal=False, ordered=False, construct="json"),
    "int[]": Kind(("'{1,2}'", "'{}'", "array[3]", "'{NULL}'", "'[0:1]={1,2}'")),
    "text[]": Kind(("'{a,b}'", "'{}'", "array['a', null]")),
    "bytea": Kind((r"'\x00ff'", r"'\x'", r"'\x0a'"), construct="bytea"),
    "uuid": Kind(("'00000000-0000-0000-0000-000000000001'", "'00000000-0000-0000-0000-000000000002'")),
    "inet": Kind(("'10.0.0.1'", "'10.0.0.1/32'", "'10.0.0.0/8'")),
    "bit(3)": Kind(("'101'", "'000'"), ("'1'",)),
    "int4range": Kind(("'[1,3)'", "'[1,2]'", "'empty'", "'(,5)'"), ("'[3,1]'",)),
    "tsvector": Kind(("'a b'", "'b:1A a:2'"), construct="tsvector"),
    "point": Kind(("'(1,2)'", "'(0,0)'"), equal=False, ordered=False, construct="point"),
    "mood": Kind(("'sad'", "'ok'", "'happy'"), ("'furious'",), prelude=_MOOD),
    "mood[]": Kind(("'{sad}'", "'{}'", "'{ok,NULL}'"), prelude=_MOOD),
    "score": Kind(("1", "2", "5"), ("-1",), prelude=_SCORE),
    "pair": Kind(("'(1,a)'", "'(1,b)'", "'(,)'", "row(2, 'x y')"), construct="composite type", prelude=_PAIR),
    "pair[]": Kind((r"""'{"(1,a)"}'""", "'{}'"), construct="array of composite type", prelude=_PAIR),
    "tags": Kind(("'{a}'", "'{a,b}'", "'{}'"), ("'{1,2,3,4}'",), construct="domain over an array", prelude=_TAGS),
    "grade": Kind(("1", "2", "5"), ("-1", "9"), construct="domain over a domain", prelude=_GRADE),
    "calm": Kind(
        ("'sad'", "'ok'"), ("'happy'",), equal=False, ordered=False, construct="domain over an enum", prelude=_CALM
    ),
    "word": Kind(("'a'", "'b'", "'Ab'"), ("'no'", "null"), construct="domain that is NOT NULL", prelude=_WORD),
    "whole": Kind(("'(1,a)'", "'(,)'"), ("'(7,a)'",), construct="domain over a composite type", prelude=_WHOLE),
    "box_of": Kind(
        (r"""'("(1,a)",{1})'""", "'(,)'", "row(row(1, 'a'), array[2])"),
        construct="composite type in a composite type",
        prelude=_BOX,
    ),
    "int4multirange": Kind(("'{[1,3),[5,7)}'", "'{}'"), ("'{[3,1]}'",), construct="multirange"),
    "time": Kind(("'09:00'", "'23:59:59.5'")),
    "span": Kind(("'[1,2]'", "'empty'", "'[1.0,2]'"), exact=False, construct="range type of its own", prelude=_SPAN),
}
NUMBERS = ("int", "bigint", "smallint", "numeric(6,2)", "numeric")

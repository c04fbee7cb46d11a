"""A PostgreSQL value as JSON has it, exactly; what JSON has no form for becomes text.

Python's own types are too narrow: its years end at 9999, its intervals have no months, its JSON numbers no infinity.
So times are read from the wire as numbers and written in ISO 8601 (the years before 1 and after 9999 too), and `jsonb`
passes as the JSON that it is.
"""

import math
from datetime import date, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

_EPOCH = date(2000, 1, 1)
_CYCLE = 146_097
"""Days of 400 years: the calendar repeats after them."""
_DAY = 86_400_000_000
_FOREVER = {2**63 - 1: "infinity", -(2**63): "-infinity"}
_FOREVER_DAYS = {2**31 - 1: "infinity", -(2**31): "-infinity"}


def plain(value: Any) -> Any:
    """A column's value in types that `msgspec` writes as JSON. Numbers keep their digits."""
    match value:
        case None | bool() | int() | str() | UUID() | msgspec.Raw():
            return value
        case float():
            return value if math.isfinite(value) else _words(value)
        case Decimal():
            return value if value.is_finite() else _words(float(value))
        case asyncpg.Record():
            return [plain(item) for item in value.values()]
        case list() | tuple():
            return [plain(item) for item in value]
        case bytes():
            return "\\x" + value.hex()
        case asyncpg.Path():
            return [plain(point) for point in value.points]
        case asyncpg.BitString():
            return value.as_string().replace(" ", "")
        case asyncpg.Range():
            return _range(value)
    return str(value)


def _words(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _range(value: asyncpg.Range) -> str:
    if value.isempty:
        return "empty"
    lower, upper = ("" if bound is None else str(plain(bound)) for bound in (value.lower, value.upper))
    return f"{'[' if value.lower_inc else '('}{lower},{upper}{']' if value.upper_inc else ')'}"


async def read_exactly(connection: asyncpg.Connection) -> None:
    """Prepare a connection whose rows are going to be made `plain`."""
    for name, decoder in (
        ("timestamptz", lambda wire: _moment(wire[0], "Z")),
        ("timestamp", lambda wire: _moment(wire[0], "")),
        ("date", lambda wire: _FOREVER_DAYS.get(wire[0]) or _day(wire[0])),
        ("interval", lambda wire: _interval(*wire)),
    ):
        await connection.set_type_codec(name, schema="pg_catalog", encoder=_never, decoder=decoder, format="tuple")
    for name, prefix in (("json", 0), ("jsonb", 1)):  # jsonb's wire form begins with a version byte
        await connection.set_type_codec(
            name,
            schema="pg_catalog",
            encoder=_never,
            decoder=lambda wire, prefix=prefix: msgspec.Raw(wire[prefix:]),
            format="binary",
        )


def _never(value: Any) -> Any:
    raise TypeError("these connections send no parameters")


def _moment(microseconds: int, zone: str) -> str:
    """From microseconds since 2000."""
    if microseconds in _FOREVER:
        return _FOREVER[microseconds]
    days, rest = divmod(microseconds, _DAY)
    return f"{_day(days)}T{_clock(rest)}{zone}"


def _day(days: int) -> str:
    """From days since 2000-01-01."""
    cycles, rest = divmod(days, _CYCLE)
    found = _EPOCH + timedelta(days=rest)
    year = found.year + 400 * cycles
    written = f"{year:04d}" if 0 <= year <= 9999 else f"{year:+07d}"  # ISO 8601: expanded years have a sign
    return f"{written}-{found:%m-%d}"


def _clock(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    whole = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{whole}.{fraction:06d}" if fraction else whole


def _interval(months: int, days: int, microseconds: int) -> str:
    """An ISO 8601 duration; months, days and seconds stay apart, since none is made of the others."""
    if microseconds in _FOREVER and days in _FOREVER_DAYS:
        return _FOREVER[microseconds]
    seconds, fraction = divmod(abs(microseconds), 1_000_000)
    sign = "-" if microseconds < 0 else ""
    text = f"{months}M" * bool(months) + f"{days}D" * bool(days)
    if microseconds or not text:
        text += f"T{sign}{seconds}" + f".{fraction:06d}" * bool(fraction) + "S"
    return f"P{text}"

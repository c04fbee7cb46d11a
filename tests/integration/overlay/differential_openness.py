"""What PostgreSQL itself leaves open, in one place: the classes of differences that are no mismatch.

Each has its reason, is asked for by the statement or shown by the outcomes, and is counted whenever it is
used; the report prints the counts. Everything else that differs is a mismatch.
"""

import re
from dataclasses import dataclass, field
from enum import Enum


class Openness(Enum):
    """What a statement's result depends on beside the rows."""

    EXACT = "exact"
    """One result only."""
    FIRST_FAILURE = "first failure"
    """Several rows are written: which of several broken constraints is told depends on their order."""
    EVENT_ORDER = "event order"
    """Several rows leave while rows that refer to them leave, change or come: PostgreSQL fires its foreign keys'
    events row by row, so whether a cascade comes before a check depends on the order of rows."""
    KEY_SHIFT = "key shift"
    """Several unique keys move at once: whether they clash on the way depends on the order of rows."""


@dataclass(frozen=True, slots=True)
class Statement:
    sql: str
    openness: Openness = Openness.EXACT
    construct: str = "by hand"
    """What the report counts it as."""
    on_plain: str = ""
    """What plain tables are asked instead, where the environment promises more: `now()` for the keyword forms."""
    arguments: tuple[object, ...] = ()

    @property
    def ordered(self) -> bool:
        """Its rows have one order: that of ORDER BY or of a cursor, and for INSERT that of its source."""
        sorted_ = " order by " in self.sql
        if self.sql.startswith("insert into"):
            return sorted_ or " values (" in self.sql
        return self.sql.startswith("fetch") or (sorted_ and self.sql.startswith("select"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client sees of one statement: count, rows in the order they came, or the error's identity."""

    count: int = -1
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    """Names and types of the result."""
    sqlstate: str = ""
    broken: str = ""
    """The constraint, or the column for NOT NULL."""
    told: str = ""
    """Message, detail and hint where a row is at fault."""
    message: str = field(default="", compare=False)


UNREADABLE = "client"
"""Stands for an SQLSTATE where the statement ran and the driver can't read its result."""


class Allowed(Enum):
    """Why a difference is none."""

    ANOTHER_ROW_FAILED_FIRST = (
        "both sides fail, each on a rule that some row breaks; which row comes first is the heap's"
    )
    KEYS_CLASHED_ON_THE_WAY = "keys that move at once clash or don't, by the order of rows"
    EVENTS_IN_ANOTHER_ORDER = "a cascade came before or after a check, by the order of rows"
    NO_FULL_JOIN = "MERGE without an equality to join by: PostgreSQL plans it only where NOT NULL decides the condition"
    REFUSED_WHEN_RUN = "the overlay refuses with 0A000, the construct and the way out"
    EVENTS_STILL_WAIT = (
        "TRUNCATE while deferred checks of its table wait: PostgreSQL refuses (55006), the overlay has no need to"
    )
    ANOTHER_MISTAKE_TOLD = "an ON CONFLICT clause and a literal are both wrong: PostgreSQL reads the literal first"
    UNREAD = "the driver knows the types of one side's result and not those of the other's"
    DRAWN_IN_VAIN = "currval() and lastval() after a statement that failed: the overlay gives its numbers back"


REFUSALS = re.compile(r"two parts of one command write table")
"""Messages of the refusals at run time, so that no other 0A000 passes for one."""

_OF_A_ROW = ("22", "23", "21000", "P0001")
_EVENT_CODES = {"23505", "23503", "23001"}


def allowed(expected: Outcome, found: Outcome, statement: Statement, failed_before: bool) -> Allowed | None:
    """Why these outcomes of one statement may differ, or None when they may not."""
    if found.sqlstate == "0A000" and "FULL JOIN" in found.message:
        return Allowed.NO_FULL_JOIN
    if found.sqlstate == "0A000" and REFUSALS.search(found.message):
        return Allowed.REFUSED_WHEN_RUN
    if "on conflict" in statement.sql and expected.sqlstate.startswith("22") and found.sqlstate.startswith("42"):
        return Allowed.ANOTHER_MISTAKE_TOLD
    if expected.sqlstate == "55006" and statement.sql.startswith("truncate"):
        return Allowed.EVENTS_STILL_WAIT
    if {expected.sqlstate, found.sqlstate} == {"", UNREADABLE}:
        return Allowed.UNREAD
    if failed_before and re.search(r"\b(currval|lastval)\b", statement.sql):
        return Allowed.DRAWN_IN_VAIN
    if statement.openness is Openness.EXACT:
        return None
    if expected.sqlstate and found.sqlstate:
        if statement.sql.startswith("delete") and expected.broken == found.broken != "":
            return Allowed.ANOTHER_ROW_FAILED_FIRST if expected.sqlstate == found.sqlstate else None
        both = expected.sqlstate.startswith(_OF_A_ROW) and found.sqlstate.startswith(_OF_A_ROW)
        return Allowed.ANOTHER_ROW_FAILED_FIRST if both else None
    if not expected.sqlstate and not found.sqlstate:
        return None
    code = expected.sqlstate or found.sqlstate
    if statement.openness is Openness.KEY_SHIFT and code == "23505":
        return Allowed.KEYS_CLASHED_ON_THE_WAY
    if statement.openness is Openness.EVENT_ORDER and code in _EVENT_CODES:
        return Allowed.EVENTS_IN_ANOTHER_ORDER
    return None

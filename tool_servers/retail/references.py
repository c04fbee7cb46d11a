"""Ids and amounts as people write them: W100001 is order 100001, 12.5 is 1,250 cents.

In the database ids are integers and money is cents; everything a tool takes or gives goes through here. The
letter before the number tells an agent, and the error message, which kind of thing an id names.
"""

import re
from datetime import date
from enum import StrEnum

from megamcp.sdk import ToolError

_FORM = re.compile(r"#?\s*([A-Z]{1,2})-?([0-9]{1,9})")


class Ref(StrEnum):
    """Kinds of ids; the value is the letter(s) in front of the number."""

    ORDER = "W"
    CUSTOMER = "C"
    ADDRESS = "A"
    PAYMENT_METHOD = "PM"
    PRODUCT = "P"
    RETURN = "R"
    TICKET = "T"

    def show(self, number: int) -> str:
        return f"{self.value}{number}"

    def parse(self, text: str) -> int:
        """The number in an id such as `W100001` or `#w100001`; ToolError when it is none, or another "
        "kind's."""
        found = _FORM.fullmatch(text.strip().upper())
        if found and found[1] == self.value and int(found[2]) < 2**31:
            return int(found[2])
        what = self.name.lower().replace("_", " ")
        raise ToolError(
            f"invalid_{self.name.lower()}_id",
            f"{text!r} is not an id of a {what}: such an id looks like {_EXAMPLES[self]}. {_SOURCES[self]}",
        )


_EXAMPLES = {
    Ref.ORDER: "W100001",
    Ref.CUSTOMER: "C1001",
    Ref.ADDRESS: "A7001",
    Ref.PAYMENT_METHOD: "PM3001",
    Ref.PRODUCT: "P5001",
    Ref.RETURN: "R40001",
    Ref.TICKET: "T9001",
}
_SOURCES = {
    Ref.ORDER: "Use list_orders to see a customer's orders.",
    Ref.CUSTOMER: "Use find_customer to look one up.",
    Ref.ADDRESS: "Use get_customer to see a customer's addresses, or add_address for a new one.",
    Ref.PAYMENT_METHOD: "Use get_customer to see a customer's payment methods.",
    Ref.PRODUCT: "Use search_products to find one.",
    Ref.RETURN: "Use get_order: it lists the order's returns.",
    Ref.TICKET: "Use list_tickets to see a customer's tickets.",
}


def dollars(cents: int) -> float:
    """For results: 1250 → 12.5 (exact to the cent; JSON prints the shortest form)."""
    return cents / 100


def price(cents: int) -> str:
    """For messages: 1250 → $12.50."""
    return f"${cents / 100:,.2f}"


def day(value: date) -> str:
    """For messages: 2026-01-15, of a date or a time (UTC)."""
    return f"{value:%Y-%m-%d}"


def to_cents(amount: float) -> int:
    """An amount of dollars an agent gave; ToolError unless it is positive, whole cents and below a "
    "million."""
    cents = round(amount * 100) if 0 < amount < 1_000_000 else 0
    if cents <= 0 or abs(amount * 100 - cents) > 1e-6:
        raise ToolError(
            "invalid_amount",
            f"{amount} is not an amount: give US dollars above 0 with at most two decimals, for example 12.50.",
        )
    return cents

"""Rows of the seed in memory, and their rendering as SQL. It knows tables and literals, nothing about a
store.

Rows come out as multi-row INSERTs in an order that satisfies the foreign keys, and the identity sequences are
set to the last id in use, so that the first new row continues the numbering.
"""

from collections.abc import Iterator
from datetime import UTC, date, datetime

Value = str | int | bool | date | datetime | None

# table → (first id, columns as they are inserted). No first id: the key is natural.
TABLES: dict[str, tuple[int | None, str]] = {
    "categories": (101, "id parent_id name"),
    "products": (5001, "id category_id name brand description status final_sale created_at"),
    "variants": (20001, "id product_id sku options price_cents on_hand reserved restock_on"),
    "customers": (1001, "id email first_name last_name phone tier created_at"),
    "addresses": (
        7001,
        "id customer_id label recipient line1 line2 city region postal_code country created_at",
    ),
    "payment_methods": (
        3001,
        "id customer_id kind label last4 expires_on loaded_cents balance_cents created_at",
    ),
    "identity_checks": (601, "id customer_id proof passed checked_at"),
    "coupons": (
        None,
        "code description percent_off amount_off_cents min_subtotal_cents category_id starts_at ends_at active",
    ),
    "orders": (
        100001,
        "id customer_id status address_id payment_method_id speed subtotal_cents discount_cents "
        "shipping_cents"
        " placed_at cancelled_at cancel_reason",
    ),
    "order_items": (200001, "id order_id variant_id quantity unit_price_cents"),
    "coupon_redemptions": (801, "id coupon_code customer_id order_id discount_cents redeemed_at"),
    "payments": (300001, "id order_id payment_method_id reason amount_cents created_at"),
    "returns": (
        40001,
        "id order_id kind status reason refund_method_id label_fee_cents requested_at received_at closed_at",
    ),
    "return_items": (None, "return_id order_item_id quantity value_cents replacement_variant_id"),
    "shipments": (
        60001,
        "id order_id return_id carrier tracking_number status shipped_at estimated_on delivered_at",
    ),
    "shipment_events": (None, "shipment_id position status place happened_at"),
    "refunds": (400001, "id order_id return_id payment_method_id reason amount_cents note created_at"),
    "tickets": (
        9001,
        "id customer_id order_id category priority status team subject created_at updated_at",
    ),
    "ticket_messages": (500001, "id ticket_id author internal body created_at"),
}
ROWS_PER_INSERT = 500


class Rows:
    """Tables as lists of tuples; `add` numbers a row, `put` places one whose id was taken before with "
    "`next_id`."""

    def __init__(self) -> None:
        self.tables: dict[str, list[tuple[Value, ...]]] = {name: [] for name in TABLES}
        self._next = {name: first for name, (first, _) in TABLES.items() if first is not None}

    def next_id(self, table: str, *, peek: bool = False) -> int:
        identity = self._next[table]
        if not peek:
            self._next[table] += 1
        return identity

    def add(self, table: str, *values: Value) -> int:
        identity = self.next_id(table)
        self.tables[table].append((identity, *values))
        return identity

    def put(self, table: str, identity: int, *values: Value) -> None:
        self.tables[table].append((identity, *values))

    def add_keyed(self, table: str, *values: Value) -> None:
        self.tables[table].append(values)

    def replace(self, table: str, identity: int, column: str, value: Value) -> None:
        first, columns = TABLES[table]
        position = identity - (first or 0)
        row = list(self.tables[table][position])
        row[columns.split().index(column)] = value
        self.tables[table][position] = tuple(row)

    def last_id(self, table: str) -> int | None:
        return self._next[table] - 1 if table in self._next else None


def literal(value: Value) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case datetime():
            return f"'{value.astimezone(UTC):%Y-%m-%d %H:%M}+00'"
        case date():
            return f"'{value:%Y-%m-%d}'"
        case str():
            return "'" + value.replace("'", "''") + "'"


def render(rows: Rows) -> str:
    return "\n".join(_statements(rows)) + "\n"


def _statements(rows: Rows) -> Iterator[str]:
    yield "-- Written by generate_seed.py; a test compares the two. Do not edit."
    for table, (_, columns) in TABLES.items():
        found = rows.tables[table]
        for start in range(0, len(found), ROWS_PER_INSERT):
            chunk = found[start : start + ROWS_PER_INSERT]
            yield f"insert into {table} ({', '.join(columns.split())}) values"
            yield ",\n".join("(" + ",".join(literal(value) for value in row) + ")" for row in chunk) + ";"
    for table in TABLES:
        last = rows.last_id(table)
        if last is not None:
            yield f"select setval(pg_get_serial_sequence('{table}', 'id'), {last});"

"""The books balance: in the seed, and after whatever sequence of tool calls."""

import random
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import text

from megamcp.sdk import ToolError
from tests.integration.retail.books import broken
from tests.integration.retail.desk import READ_ONLY, TOOLS, Desk

REASONS = ("no_longer_needed", "wrong_size", "defective", "damaged_in_transit")
AFTER_DELIVERY = ("return_items", "exchange_item", "issue_goodwill_credit")
PROMISED_SIZES = {"customers": 500, "orders": 2000, "products": 300}


async def test_the_seed_has_the_promised_size_and_its_books_balance(desk: Desk) -> None:
    for table, size in PROMISED_SIZES.items():
        assert await desk.value(f"select count(*) from {table}") == size
    assert await broken(desk.db) == {}


async def test_new_rows_continue_the_seeds_numbering(desk: Desk) -> None:
    customer = "C1044"
    await desk.verify(customer)
    order = await desk.call(
        "place_order",
        customer_id=customer,
        items=[{"sku": "JKT-04-BLK-M", "quantity": 1}],
        address_id=await desk.value("select 'A' || min(id) from addresses where customer_id = 1044"),
        payment_method_id=await desk.value("select 'PM' || min(id) from payment_methods where customer_id = 1044"),
    )
    assert order.order_id == "W102001"


class Chaos:
    """Calls tools with plausible arguments drawn from the database; refusals are fine, crashes are not."""

    def __init__(self, desk: Desk, seed: int) -> None:
        self.desk = desk
        self.chance = random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def pick(self, sql: str, **values: Any) -> Any:
        rows = (await self.desk.db.execute(text(sql), values)).all()
        row = self.chance.choice(rows) if rows else None
        return row[0] if row is not None and len(row) == 1 else row

    async def some_order(self, tool: str) -> tuple[int, int]:
        likely = "delivered" if tool in AFTER_DELIVERY else "pending"
        status = likely if self.chance.random() < 0.85 else self.chance.choice(("shipped", "processing", "cancelled"))
        found = await self.pick(
            "select o.id, o.customer_id from orders o where o.status::text = :status and o.id > 101450 order by o.id",
            status=status,
        )
        return found[0], found[1]

    async def arguments(self, tool: str) -> dict[str, Any]:
        order, customer = await self.some_order(tool)
        chance = self.chance
        sku = await self.pick(
            "select v.sku from order_items i join variants v on v.id = i.variant_id"
            " where i.order_id = :o order by i.id",
            o=order,
        )
        sibling = await self.pick(
            "select b.sku from variants a join variants b using (product_id) where a.sku = :sku order by 1", sku=sku
        )
        method = await self.pick("select id from payment_methods where customer_id = :c order by id", c=customer)
        address = await self.pick("select id from addresses where customer_id = :c order by id", c=customer)
        code = await self.pick("select code from coupons order by code")
        back = await self.pick(
            "select r.id, o.customer_id from returns r join orders o on o.id = r.order_id where r.id > "
            "40100 order by r.id"
        )
        ticket = await self.pick("select id from tickets where status <> 'resolved' order by id")
        reason = chance.choice(REASONS)
        to = chance.choice((f"PM{method}", "store_credit", f"PM{method}"))
        both = {"customer_id": f"C{customer}", "order_id": f"W{order}"}
        made: dict[str, dict[str, Any]] = {
            "cancel_order": {**both, "reason": "other"},
            "modify_order_items": {**both, "changes": [self.change(sku, sibling)]},
            "change_shipping_address": {**both, "address_id": f"A{address}"},
            "change_payment_method": {**both, "payment_method_id": f"PM{method}"},
            "apply_coupon": {**both, "code": code},
            "remove_coupon": both,
            "return_items": {
                **both, "items": [{"sku": sku, "quantity": 1}], "reason": reason, "refund_to": to,
            },
            "exchange_item": {**both, "sku": sku, "new_sku": sibling, "reason": reason},
            "issue_goodwill_credit": {
                **both, "amount": chance.randint(1, 3000) / 100, "refund_to": to, "note": "sorry",
            },
            "issue_refund": {"customer_id": f"C{back[1]}", "return_id": f"R{back[0]}"},
            "cancel_return": {"customer_id": f"C{back[1]}", "return_id": f"R{back[0]}"},
            "place_order": {
                "customer_id": f"C{customer}",
                "items": [{"sku": sibling, "quantity": chance.randint(1, 3)}],
                "address_id": f"A{address}",
                "payment_method_id": f"PM{method}",
                "coupon_code": chance.choice((None, code)),
            },
            "add_payment_method": {
                "customer_id": f"C{customer}", "brand": "Visa", "expires": "2028-05",
                "last4": f"{chance.randint(0, 9999):04}",
            },
            "open_ticket": {**both, "category": "order", "subject": "Question", "message": "Hello"},
            "escalate_ticket": {"ticket_id": f"T{ticket}", "team": "billing", "reason": "please"},
        }  # fmt: skip
        return made[tool]

    def change(self, sku: str, sibling: str) -> dict[str, Any]:
        return self.chance.choice(
            (
                {"sku": sku, "quantity": 0},
                {"sku": sku, "quantity": self.chance.randint(1, 5)},
                {"sku": sku, "new_sku": sibling},
                {"sku": sku, "new_sku": sibling, "quantity": 2},
            )
        )

    async def receive_some_returns(self) -> None:
        """The warehouse's part, which no tool plays."""
        await self.desk.db.execute(
            text(
                "update returns set status = 'received', received_at = now()"
                " where status in ('requested', 'in_transit') and kind = 'refund' and id % 2 = 0"
            )
        )

    async def step(self, tool: str) -> None:
        arguments = await self.arguments(tool)
        if self.chance.random() < 0.9:
            await self.desk.db.execute(
                text(
                    "insert into identity_checks (customer_id, proof, passed, checked_at)"
                    " values (:c, 'phone_last4', true, now())"
                ),
                {"c": int(arguments["customer_id"][1:]) if "customer_id" in arguments else 1001},
            )
        try:
            await self.desk.call(tool, **arguments)
        except ToolError as refusal:
            self.outcomes[f"{tool}: {refusal.code}"] += 1
        else:
            self.outcomes[f"{tool}: done"] += 1


MONEY_TOOLS = (
    "cancel_order", "modify_order_items", "modify_order_items", "change_shipping_address", "change_payment_method",
    "apply_coupon", "remove_coupon", "return_items", "return_items", "exchange_item", "exchange_item", "issue_refund",
    "issue_goodwill_credit", "cancel_return", "place_order", "add_payment_method", "open_ticket", "escalate_ticket",
)  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_books_balance_after_random_calls(desk: Desk, seed: int) -> None:
    chaos = Chaos(desk, seed)
    for round_ in range(5):
        for _ in range(60):
            await chaos.step(chaos.chance.choice(MONEY_TOOLS))
        await chaos.receive_some_returns()
        assert await broken(desk.db) == {}, f"in round {round_}"
    done = {name.partition(":")[0] for name in chaos.outcomes if name.endswith("done")}
    assert len(done) >= 12, "chance must reach most tools, not only refusals"


def test_reading_and_writing_tools_are_told_apart() -> None:
    assert len(TOOLS) == 33
    assert set(MONEY_TOOLS) <= set(TOOLS) - READ_ONLY

"""Money and stock: the only module that writes payments, refunds, balances and reservations.

Invariants it keeps (checked over the whole database by tests/integration/test_retail_invariants.py):
- a wallet's balance = loaded - payments + refunds, never negative;
- refunds of an order never exceed its payments, and a method gets back at most what it paid (store credit may
get more);
- `reserved` of a variant = what unshipped orders and open exchanges hold, and never exceeds what is on hand.

It decides nothing about whether a customer may have something; that is up to the tools.
"""

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, ToolError
from tool_servers.retail.lookups import (
    fetch_all,
    fetch_one,
    fetch_value,
    options_text,
    require_payment_method,
    write,
)
from tool_servers.retail.references import Ref, day, price

WALLETS = ("gift_card", "store_credit")


async def net_by_method(db: AsyncConnection, order: int) -> dict[int, int]:
    """Payment method → cents that it still has in the order (payments minus refunds, below 0 for store "
    "credit)."""
    moved = await fetch_all(
        db,
        "select payment_method_id as method, sum(cents) as cents from ("
        " select payment_method_id, amount_cents as cents from payments where order_id = :order"
        " union all select payment_method_id, -amount_cents from refunds where order_id = :order"
        ") as moves group by payment_method_id order by payment_method_id",
        order=order,
    )
    return {row["method"]: int(row["cents"]) for row in moved}


async def net_paid(db: AsyncConnection, order: int) -> int:
    return sum((await net_by_method(db, order)).values())


async def charge(db: AsyncConnection, clock: Clock, order: int, method: RowMapping, reason: str, cents: int) -> None:
    """Takes money; ToolError for an expired card or a wallet without enough in it."""
    if method["expires_on"] is not None and method["expires_on"] < clock.now().date():
        raise ToolError(
            "card_expired",
            f"{method['label']} expired on {day(method['expires_on'])}. Ask for another payment method "
            "(get_customer "
            "lists them) or add one with add_payment_method.",
        )
    if method["kind"] in WALLETS:
        balance = await fetch_value(db, "select balance_cents from payment_methods where id = :id", id=method["id"])
        if balance < cents:
            raise ToolError(
                "insufficient_balance",
                f"{method['label']} holds {price(balance)}, but {price(cents)} is needed. A payment can't "
                "be split: "
                "ask for another payment method.",
                balance=balance / 100,
                needed=cents / 100,
            )
        await write(
            db,
            "update payment_methods set balance_cents = balance_cents - :cents where id = :id",
            cents=cents,
            id=method["id"],
        )
    await write(
        db,
        "insert into payments (order_id, payment_method_id, reason, amount_cents, created_at)"
        " values (:order, :method, :reason, :cents, :now)",
        order=order,
        method=method["id"],
        reason=reason,
        cents=cents,
        now=clock.now(),
    )


async def refund(
    db: AsyncConnection,
    clock: Clock,
    order: int,
    method: int,
    reason: str,
    cents: int,
    *,
    return_id: int | None = None,
    note: str | None = None,
) -> None:
    """Gives money back; ToolError when it would be more than was paid, in all or by this method."""
    net = await net_by_method(db, order)
    kind = await fetch_value(db, "select kind from payment_methods where id = :id", id=method)
    most = sum(net.values()) if kind == "store_credit" else min(sum(net.values()), net.get(method, 0))
    if cents > most:
        raise ToolError(
            "refund_exceeds_payment",
            f"{price(cents)} is more than the {price(max(most, 0))} that can still be refunded to "
            f"{Ref.PAYMENT_METHOD.show(method)} on order {Ref.ORDER.show(order)}. Refund at most that, or "
            "use "
            "'store_credit' if more was paid by another method.",
            refundable=max(most, 0) / 100,
        )
    await write(
        db,
        "insert into refunds (order_id, return_id, payment_method_id, reason, amount_cents, note, created_at)"
        " values (:order, :return_id, :method, :reason, :cents, :note, :now)",
        order=order,
        return_id=return_id,
        method=method,
        reason=reason,
        cents=cents,
        note=note,
        now=clock.now(),
    )
    if kind in WALLETS:
        await write(
            db,
            "update payment_methods set balance_cents = balance_cents + :cents where id = :id",
            cents=cents,
            id=method,
        )


async def settle(
    db: AsyncConnection, clock: Clock, order: int, method: RowMapping, reason: str, difference: int
) -> None:
    """Charges a positive difference to the method, refunds a negative one to it."""
    if difference > 0:
        await charge(db, clock, order, method, reason, difference)
    elif difference < 0:
        await refund(db, clock, order, method["id"], reason, -difference)


async def refund_destination(db: AsyncConnection, clock: Clock, order: RowMapping, wanted: str) -> RowMapping:
    """The payment method a refund may go to: one that paid for the order, or the customer's store credit."""
    if wanted.strip().lower() == "store_credit":
        return await store_credit(db, clock, order["customer_id"])
    method = await require_payment_method(db, wanted, order["customer_id"])
    if method["kind"] == "store_credit":
        return method
    paid = await fetch_value(
        db,
        "select count(*) from payments where order_id = :order and payment_method_id = :method",
        order=order["id"],
        method=method["id"],
    )
    if not paid:
        raise ToolError(
            "refund_method_not_allowed",
            f"{method['label']} did not pay for order {Ref.ORDER.show(order['id'])}. A refund goes to the "
            "original "
            f"payment method ({Ref.PAYMENT_METHOD.show(order['payment_method_id'])}) or to 'store_credit'.",
        )
    return method


async def store_credit(db: AsyncConnection, clock: Clock, customer: int) -> RowMapping:
    """The customer's store credit, opened with nothing in it at its first use."""
    find = "select * from payment_methods where customer_id = :customer and kind = 'store_credit'"
    found = await fetch_one(db, find, customer=customer)
    if found is None:
        await write(
            db,
            "insert into payment_methods (customer_id, kind, label, created_at)"
            " values (:customer, 'store_credit', 'Store credit', :now)",
            customer=customer,
            now=clock.now(),
        )
        found = await fetch_one(db, find, customer=customer)
    if found is None:
        raise ToolError("store_credit_failed", "Store credit could not be opened. Escalate to billing.")
    return found


async def reserve(db: AsyncConnection, variant: RowMapping, quantity: int) -> None:
    """Holds units of a variant (of `require_variant`); ToolError when too few are left or it isn't sold "
    "any more."""
    name = f"{variant['name']} ({options_text(variant['options'])}, {variant['sku']})"
    if variant["status"] != "active":
        raise ToolError(
            "product_discontinued",
            f"{name} is discontinued and can't be ordered any more. Offer something else from search_products.",
        )
    available = await fetch_value(db, "select available from variants where id = :id", id=variant["id"])
    if available < quantity:
        soon = f" It is expected back on {day(variant['restock_on'])}." if variant["restock_on"] else ""
        raise ToolError(
            "out_of_stock",
            f"{name}: {available} left, {quantity} wanted.{soon} get_product shows the variants in stock.",
            available=available,
        )
    await write(
        db,
        "update variants set reserved = reserved + :quantity where id = :id",
        quantity=quantity,
        id=variant["id"],
    )


async def release(db: AsyncConnection, variant: int, quantity: int) -> None:
    """Gives back what `reserve` held."""
    await write(
        db,
        "update variants set reserved = reserved - :quantity where id = :id",
        quantity=quantity,
        id=variant,
    )

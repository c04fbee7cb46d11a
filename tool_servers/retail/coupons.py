"""Coupons: which discount a code gives on an order, and putting it on or taking it off.

A coupon works once per customer, inside its dates, from its minimum on; one with a category counts and
discounts only lines of that category. Cancelling an order gives its coupon back (see orders.py).
"""

from collections.abc import Sequence

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, ToolError
from tool_servers.retail.ledger import settle
from tool_servers.retail.lookups import (
    fetch_all,
    fetch_one,
    fetch_value,
    require_order,
    require_payment_method,
    write,
)
from tool_servers.retail.models import CouponCheck, Order
from tool_servers.retail.order_views import load_order
from tool_servers.retail.references import Ref, day, dollars, price


async def priced_lines(db: AsyncConnection, order: int) -> Sequence[RowMapping]:
    """(category_id, cents) of each line of an order."""
    return await fetch_all(
        db,
        "select p.category_id, i.line_total_cents as cents from order_items i"
        " join variants v on v.id = i.variant_id join products p on p.id = v.product_id where i.order_id ="
        " :order",
        order=order,
    )


async def discount_for(
    db: AsyncConnection,
    clock: Clock,
    code: str,
    customer: int,
    lines: Sequence[RowMapping],
    *,
    on_order: int | None = None,
) -> tuple[RowMapping, int]:
    """(the coupon, discount in cents); ToolError with the reason when it gives none.

    `on_order`: the order that already carries this coupon, so that its own redemption does not count.
    """
    coupon = await fetch_one(
        db,
        "select c.*, k.name as category from coupons c left join categories k on k.id = c.category_id"
        " where c.code = :code",
        code=code.strip().upper(),
    )
    if coupon is None or not coupon["active"]:
        raise ToolError(
            "coupon_invalid",
            f"Coupon {code!r} is not valid. Do not guess other codes; go on without one.",
        )
    now = clock.now()
    if on_order is None and not coupon["starts_at"] <= now <= coupon["ends_at"]:
        raise ToolError(
            "coupon_not_current",
            f"Coupon {coupon['code']} is valid from {day(coupon['starts_at'])} to "
            f"{day(coupon['ends_at'])}; today is "
            f"{day(now)}. Go on without it.",
        )
    used = await fetch_value(
        db,
        "select order_id from coupon_redemptions where coupon_code = :code and customer_id = :customer",
        code=coupon["code"],
        customer=customer,
    )
    if used is not None and used != on_order:
        raise ToolError(
            "coupon_already_used",
            f"This customer used coupon {coupon['code']} on order {Ref.ORDER.show(used)}; it works once per customer.",
        )
    eligible = sum(line["cents"] for line in lines if coupon["category_id"] in (None, line["category_id"]))
    where = f" of {coupon['category']}" if coupon["category"] else ""
    if eligible == 0 or eligible < coupon["min_subtotal_cents"]:
        raise ToolError(
            "coupon_minimum_not_met",
            f"Coupon {coupon['code']} needs items{where} for at least "
            f"{price(max(coupon['min_subtotal_cents'], 1))}; "
            f"this order has {price(eligible)} of them.",
        )
    if coupon["percent_off"] is not None:
        return coupon, eligible * int(coupon["percent_off"]) // 100
    return coupon, min(int(coupon["amount_off_cents"]), eligible)


async def _open_for_coupon(db: AsyncConnection, order: RowMapping) -> None:
    if order["status"] != "pending":
        raise ToolError(
            "order_not_pending",
            f"Order {Ref.ORDER.show(order['id'])} is {order['status']}; coupons can only be changed while "
            "it is pending.",
        )


async def check_coupon(db: AsyncConnection, clock: Clock, order_id: str, code: str) -> CouponCheck:
    """Tell what a coupon would save on an order, without applying it.

    Fails with the reason when the coupon does not work for this order or customer.

    Args:
        order_id: The order, for example W100001.
        code: The coupon code as the customer gave it.
    """
    order = await require_order(db, order_id)
    coupon, discount = await discount_for(db, clock, code, order["customer_id"], await priced_lines(db, order["id"]))
    return CouponCheck(
        code=coupon["code"],
        description=coupon["description"],
        order_id=Ref.ORDER.show(order["id"]),
        discount=dollars(discount),
        new_total=dollars(order["subtotal_cents"] - discount + order["shipping_cents"]),
    )


async def apply_coupon(db: AsyncConnection, clock: Clock, customer_id: str, order_id: str, code: str) -> Order:
    """Apply a coupon to a pending order and refund the saving to the order's payment method.

    An order takes one coupon; each customer can use a coupon once. Returns the order with its new total.

    Args:
        customer_id: The customer who owns the order, for example C1001.
        order_id: A pending order, for example W100001.
        code: The coupon code as the customer gave it. Never invent one.
    """
    order = await require_order(db, order_id, customer_id)
    await _open_for_coupon(db, order)
    present = await fetch_value(
        db, "select coupon_code from coupon_redemptions where order_id = :order", order=order["id"]
    )
    if present is not None:
        raise ToolError(
            "coupon_already_applied",
            f"Order {order_id} already carries coupon {present}; an order takes one. To use another, call "
            "remove_coupon first.",
        )
    coupon, discount = await discount_for(db, clock, code, order["customer_id"], await priced_lines(db, order["id"]))
    await write(
        db,
        "insert into coupon_redemptions (coupon_code, customer_id, order_id, discount_cents, redeemed_at)"
        " values (:code, :customer, :order, :discount, :now)",
        code=coupon["code"],
        customer=order["customer_id"],
        order=order["id"],
        discount=discount,
        now=clock.now(),
    )
    await _set_discount(db, clock, order, discount)
    return await load_order(db, order["id"])


async def remove_coupon(db: AsyncConnection, clock: Clock, customer_id: str, order_id: str) -> Order:
    """Take the coupon off a pending order and charge the difference to the order's payment method.

    The customer can use the coupon again afterwards. Returns the order with its new total.

    Args:
        customer_id: The customer who owns the order, for example C1001.
        order_id: A pending order that carries a coupon.
    """
    order = await require_order(db, order_id, customer_id)
    await _open_for_coupon(db, order)
    found = await fetch_value(db, "select id from coupon_redemptions where order_id = :order", order=order["id"])
    if found is None:
        raise ToolError("no_coupon", f"Order {order_id} carries no coupon, so there is nothing to remove.")
    await write(db, "delete from coupon_redemptions where id = :id", id=found)
    await _set_discount(db, clock, order, 0)
    return await load_order(db, order["id"])


async def _set_discount(db: AsyncConnection, clock: Clock, order: RowMapping, discount: int) -> None:
    await write(
        db,
        "update orders set discount_cents = :discount where id = :id",
        discount=discount,
        id=order["id"],
    )
    method = await require_payment_method(db, Ref.PAYMENT_METHOD.show(order["payment_method_id"]), order["customer_id"])
    await settle(db, clock, order["id"], method, "modification", order["discount_cents"] - discount)

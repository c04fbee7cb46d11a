"""Placing, changing and cancelling orders. Only a pending order changes; from `processing` on the warehouse
has it.

Every change keeps `total = payments - refunds` for the order: differences are charged or refunded at once, to
the order's payment method.
"""

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, ToolError
from tool_servers.retail.coupons import discount_for, priced_lines
from tool_servers.retail.ledger import charge, net_by_method, refund, release, reserve, settle
from tool_servers.retail.lookups import (
    fetch_one,
    fetch_value,
    require_address,
    require_customer,
    require_order,
    require_payment_method,
    require_variant,
    require_verified,
    write,
)
from tool_servers.retail.models import CancelReason, ItemChange, ItemQuantity, Order, ShippingSpeed
from tool_servers.retail.order_views import load_lines, load_order
from tool_servers.retail.references import Ref

EXPRESS_CENTS, STANDARD_CENTS, FREE_FROM_CENTS = 1495, 595, 7500


def require_pending(order: RowMapping, wish: str) -> None:
    """ToolError that says what to do with an order in its status instead of `wish`."""
    if order["status"] == "pending":
        return
    instead = {
        "processing": "The warehouse is packing it; it can be returned once it is delivered.",
        "shipped": "It is on its way; it can be returned once it is delivered (see track_shipment).",
        "delivered": "Use return_items or exchange_item within 30 days of delivery.",
        "cancelled": "It was cancelled and can't be brought back; place_order makes a new one.",
    }[order["status"]]
    raise ToolError(
        "order_not_pending",
        f"Order {Ref.ORDER.show(order['id'])} is {order['status']}, and only a pending order can be {wish}. {instead}",
        status=order["status"],
    )


async def place_order(
    db: AsyncConnection,
    clock: Clock,
    customer_id: str,
    items: list[ItemQuantity],
    address_id: str,
    payment_method_id: str,
    shipping_speed: ShippingSpeed = "standard",
    coupon_code: str | None = None,
) -> Order:
    """Place a new order for a verified customer and charge it at once.

    Standard shipping costs $5.95 and is free from $75 of goods; express costs $14.95. Confirm items, address,
    payment method and total with the customer first.

    Args:
        customer_id: The customer, for example C1001.
        items: What to order: SKU (from get_product) and quantity; each SKU once.
        address_id: One of the customer's addresses (from get_customer).
        payment_method_id: One of the customer's payment methods; it pays the whole order.
        shipping_speed: standard or express.
        coupon_code: A coupon the customer gave. Never invent one.
    """
    customer = await require_verified(db, clock, customer_id)
    address = await require_address(db, address_id, customer["id"])
    method = await require_payment_method(db, payment_method_id, customer["id"])
    variants = [await require_variant(db, item.sku) for item in items]
    if not items or len({variant["id"] for variant in variants}) < len(items):
        raise ToolError("invalid_items", "Give at least one item, and each SKU only once with its quantity.")
    subtotal = sum(v["price_cents"] * item.quantity for v, item in zip(variants, items, strict=True))
    slow = 0 if subtotal >= FREE_FROM_CENTS else STANDARD_CENTS
    shipping = EXPRESS_CENTS if shipping_speed == "express" else slow
    order = await fetch_value(
        db,
        "insert into orders (customer_id, address_id, payment_method_id, speed, subtotal_cents, "
        "shipping_cents, placed_at)"
        " values (:customer, :address, :method, :speed, :subtotal, :shipping, :now) returning id",
        customer=customer["id"],
        address=address["id"],
        method=method["id"],
        speed=shipping_speed,
        subtotal=subtotal,
        shipping=shipping,
        now=clock.now(),
    )
    for variant, item in zip(variants, items, strict=True):
        await reserve(db, variant, item.quantity)
        await write(
            db,
            "insert into order_items (order_id, variant_id, quantity, unit_price_cents)"
            " values (:order, :variant, :quantity, :price)",
            order=order,
            variant=variant["id"],
            quantity=item.quantity,
            price=variant["price_cents"],
        )
    discount = 0
    if coupon_code is not None:
        coupon, discount = await discount_for(db, clock, coupon_code, customer["id"], await priced_lines(db, order))
        await write(
            db,
            "insert into coupon_redemptions (coupon_code, customer_id, order_id, discount_cents, redeemed_at)"
            " values (:code, :customer, :order, :discount, :now)",
            code=coupon["code"],
            customer=customer["id"],
            order=order,
            discount=discount,
            now=clock.now(),
        )
        await write(db, "update orders set discount_cents = :discount where id = :id", discount=discount, id=order)
    await charge(db, clock, order, method, "order", subtotal - discount + shipping)
    return await load_order(db, order)


async def cancel_order(
    db: AsyncConnection, clock: Clock, customer_id: str, order_id: str, reason: CancelReason
) -> Order:
    """Cancel a whole pending order and refund everything to how it was paid.

    Can't be undone. Single items are removed with modify_order_items instead. A coupon on the order becomes
    usable again.

    Args:
        customer_id: The customer who owns the order, for example C1001.
        order_id: The order to cancel, for example W100001.
        reason: What the customer says.
    """
    await require_customer(db, customer_id)
    order = await require_order(db, order_id, customer_id)
    require_pending(order, "cancelled")
    await write(
        db,
        "update orders set status = 'cancelled', cancelled_at = :now, cancel_reason = :reason where id = :id",
        now=clock.now(),
        reason=reason,
        id=order["id"],
    )
    for line in await load_lines(db, order["id"]):
        await release(db, line["variant_id"], line["quantity"])
    await write(db, "delete from coupon_redemptions where order_id = :order", order=order["id"])
    for method, cents in (await net_by_method(db, order["id"])).items():
        if cents > 0:
            await refund(db, clock, order["id"], method, "cancellation", cents)
    return await load_order(db, order["id"])


async def modify_order_items(
    db: AsyncConnection, clock: Clock, customer_id: str, order_id: str, changes: list[ItemChange]
) -> Order:
    """Change a pending order: quantities, another variant of the same product, or remove items.

    All changes happen, or none. The price difference is charged or refunded to the order's payment method at
    once. A line keeps its price; a swapped variant has today's. A different product can't be added: place a
    new order. To remove everything, use cancel_order.

    Args:
        customer_id: The customer who owns the order, for example C1001.
        order_id: A pending order, for example W100001.
        changes: What to change, one entry per SKU that is in the order.
    """
    order = await require_order(db, order_id, customer_id)
    require_pending(order, "modified")
    lines = {line["sku"]: line for line in await load_lines(db, order["id"])}
    wanted = [change.sku.strip().upper() for change in changes]
    if not changes or len(set(wanted)) < len(wanted):
        raise ToolError("invalid_changes", "Give at least one change, and each SKU of the order only once.")
    for sku, change in zip(wanted, changes, strict=True):
        if sku not in lines:
            raise ToolError(
                "sku_not_in_order",
                f"Order {order_id} has no item {change.sku}; it has {', '.join(sorted(lines))}.",
            )
        await _change_line(db, order, lines[sku], change)
    subtotal = await fetch_value(
        db, "select sum(line_total_cents) from order_items where order_id = :order", order=order["id"]
    )
    if subtotal is None:
        raise ToolError(
            "order_would_be_empty",
            f"These changes would leave order {order_id} empty. Use cancel_order if that is what the customer wants.",
        )
    await _reprice(db, clock, order, int(subtotal))
    return await load_order(db, order["id"])


async def _change_line(db: AsyncConnection, order: RowMapping, line: RowMapping, change: ItemChange) -> None:
    quantity = line["quantity"] if change.quantity is None else change.quantity
    swap = change.new_sku is not None and change.new_sku.strip().upper() != line["sku"]
    if quantity == line["quantity"] and not swap:
        raise ToolError("nothing_to_change", f"{line['sku']} already has that quantity and variant.")
    if quantity == 0:
        await release(db, line["variant_id"], line["quantity"])
        await write(db, "delete from order_items where id = :id", id=line["id"])
        return
    variant = await require_variant(db, change.new_sku if swap and change.new_sku else line["sku"])
    if variant["product_id"] != line["product_id"]:
        raise ToolError(
            "different_product",
            f"{variant['sku']} is {variant['name']}, but {line['sku']} is {line['name']}. Only another "
            "variant of the same "
            "product can be swapped in; place_order makes an order for another product.",
        )
    present = await fetch_one(
        db,
        "select id from order_items where order_id = :order and variant_id = :variant and id <> :id",
        order=order["id"],
        variant=variant["id"],
        id=line["id"],
    )
    if present is not None:
        raise ToolError(
            "sku_already_in_order",
            f"{variant['sku']} is already an item of this order. Remove {line['sku']} (quantity 0) and "
            "change the quantity "
            f"of {variant['sku']} instead.",
        )
    if swap:
        await release(db, line["variant_id"], line["quantity"])
        await reserve(db, variant, quantity)
    elif quantity > line["quantity"]:
        await reserve(db, variant, quantity - line["quantity"])
    else:
        await release(db, line["variant_id"], line["quantity"] - quantity)
    await write(
        db,
        "update order_items set variant_id = :variant, quantity = :quantity, unit_price_cents = :price where id = :id",
        variant=variant["id"],
        quantity=quantity,
        price=variant["price_cents"] if swap else line["unit_price_cents"],
        id=line["id"],
    )


async def _reprice(db: AsyncConnection, clock: Clock, order: RowMapping, subtotal: int) -> None:
    redemption = await fetch_one(db, "select * from coupon_redemptions where order_id = :order", order=order["id"])
    discount = 0
    if redemption is not None:
        _, discount = await discount_for(
            db,
            clock,
            redemption["coupon_code"],
            order["customer_id"],
            await priced_lines(db, order["id"]),
            on_order=order["id"],
        )
        await write(
            db,
            "update coupon_redemptions set discount_cents = :discount where id = :id",
            discount=discount,
            id=redemption["id"],
        )
    await write(
        db,
        "update orders set subtotal_cents = :subtotal, discount_cents = :discount where id = :id",
        subtotal=subtotal,
        discount=discount,
        id=order["id"],
    )
    method = await require_payment_method(db, Ref.PAYMENT_METHOD.show(order["payment_method_id"]), order["customer_id"])
    difference = subtotal - discount + order["shipping_cents"] - order["total_cents"]
    await settle(db, clock, order["id"], method, "modification", difference)


async def change_shipping_address(
    db: AsyncConnection, clock: Clock, customer_id: str, order_id: str, address_id: str
) -> Order:
    """Send a pending order to another address of the verified customer.

    Args:
        customer_id: The customer who owns the order, for example C1001.
        order_id: A pending order, for example W100001.
        address_id: One of the customer's addresses (get_customer); a new one is made with add_address.
    """
    customer = await require_verified(db, clock, customer_id)
    order = await require_order(db, order_id, customer_id)
    require_pending(order, "redirected")
    address = await require_address(db, address_id, customer["id"])
    if address["id"] == order["address_id"]:
        raise ToolError("nothing_to_change", f"Order {order_id} already goes to {address_id}.")
    country = await fetch_value(db, "select country from addresses where id = :id", id=order["address_id"])
    if country != address["country"]:
        raise ToolError(
            "other_country",
            f"Order {order_id} is bound for {country} and can't be redirected to {address['country']}, "
            "since duties "
            "differ. Cancel it and place a new order to that address.",
        )
    await write(db, "update orders set address_id = :address where id = :id", address=address["id"], id=order["id"])
    return await load_order(db, order["id"])


async def change_payment_method(
    db: AsyncConnection, clock: Clock, customer_id: str, order_id: str, payment_method_id: str
) -> Order:
    """Pay a pending order with another method: refunds the old one and charges the whole total to the new
    one.

    Args:
        customer_id: The verified customer who owns the order, for example C1001.
        order_id: A pending order, for example W100001.
        payment_method_id: One of the customer's payment methods (get_customer). A gift card or store credit
            must hold the whole total.
    """
    customer = await require_verified(db, clock, customer_id)
    order = await require_order(db, order_id, customer_id)
    require_pending(order, "paid differently")
    method = await require_payment_method(db, payment_method_id, customer["id"])
    if method["id"] == order["payment_method_id"]:
        raise ToolError("nothing_to_change", f"Order {order_id} is already paid by {payment_method_id}.")
    await charge(db, clock, order["id"], method, "payment_change", order["total_cents"])
    for other, cents in (await net_by_method(db, order["id"])).items():
        if other != method["id"] and cents > 0:
            await refund(db, clock, order["id"], other, "payment_change", cents)
    await write(
        db,
        "update orders set payment_method_id = :method where id = :id",
        method=method["id"],
        id=order["id"],
    )
    return await load_order(db, order["id"])

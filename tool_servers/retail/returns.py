"""After delivery: returns, exchanges and refunds.

A return is agreed here, travels, is received by the warehouse (outside the tools) and is then refunded.
Everything is within 30 days of delivery, each unit once, and what is paid back is what was paid for the
units: their share of the order's discount is taken off, rounded down, so that parts never add up to more than
the whole.
"""

from datetime import timedelta

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, ToolError
from tool_servers.retail.ledger import net_paid, refund, refund_destination, release, reserve, settle
from tool_servers.retail.lookups import (
    fetch_all,
    fetch_one,
    fetch_value,
    require_order,
    require_payment_method,
    require_variant,
    require_verified,
    write,
)
from tool_servers.retail.models import ItemQuantity, Refund, Return, ReturnLine, ReturnReason
from tool_servers.retail.order_views import load_lines
from tool_servers.retail.references import Ref, day, dollars, price, to_cents

RETURN_WINDOW = timedelta(days=30)
LABEL_CENTS = 695
GOODWILL_LIMIT_CENTS = 5000
OUR_FAULT = ("defective", "damaged_in_transit", "wrong_item_sent")


async def get_return(db: AsyncConnection, return_id: str) -> Return:
    """Show a return or exchange: its items, status, the refund that is due and what happens next.

    Args:
        return_id: For example R40001 (get_order lists an order's returns).
    """
    row = await _require_return(db, return_id)
    return await load_return(db, row["id"])


async def return_items(
    db: AsyncConnection,
    clock: Clock,
    customer_id: str,
    order_id: str,
    items: list[ItemQuantity],
    reason: ReturnReason,
    refund_to: str,
) -> Return:
    """Agree the return of delivered items of a verified customer, within 30 days of delivery.

    No money moves yet: the refund is issued with issue_refund once the warehouse has received the parcel. The
    return label costs $6.95, taken from the refund; it is free for gold customers and when the item is
    defective, damaged or wrong. Final-sale items come back only for these three reasons.

    Args:
        customer_id: The customer who owns the order, for example C1001.
        order_id: A delivered order, for example W100001.
        items: SKUs of the order with the number of units to send back.
        reason: What the customer says; one reason per return.
        refund_to: The payment method that paid for the order (for example PM3001), or store_credit.
    """
    customer = await require_verified(db, clock, customer_id)
    order = await require_order(db, order_id, customer_id)
    await _require_returnable(db, clock, order)
    lines = {line["sku"]: line for line in await load_lines(db, order["id"])}
    if not items or len({item.sku.strip().upper() for item in items}) < len(items):
        raise ToolError("invalid_items", "Give at least one item, and each SKU only once with its quantity.")
    chosen = [(_require_line(lines, order_id, item.sku, item.quantity, reason), item.quantity) for item in items]
    method = await refund_destination(db, clock, order, refund_to)
    value = sum(_paid_for(order, line, quantity) for line, quantity in chosen)
    fee = 0 if customer["tier"] == "gold" or reason in OUR_FAULT else LABEL_CENTS
    if value <= fee:
        raise ToolError(
            "return_not_worthwhile",
            f"{price(value)} was paid for these items and the return label costs {price(fee)}, so nothing "
            "would be refunded. "
            "Tell the customer; they may add items to the return or keep them.",
        )
    back = await _open_return(db, clock, order["id"], kind="refund", reason=reason, refund_to=method["id"], fee=fee)
    for line, quantity in chosen:
        await _add_item(db, back, line, quantity, _paid_for(order, line, quantity), None)
    return await load_return(db, back)


async def exchange_item(
    db: AsyncConnection,
    clock: Clock,
    customer_id: str,
    order_id: str,
    sku: str,
    new_sku: str,
    reason: ReturnReason,
    quantity: int = 1,
    payment_method_id: str | None = None,
) -> Return:
    """Exchange a delivered item for another variant of the same product, within 30 days of delivery.

    The new item is held at once and is sent when the old one arrives. A price difference is charged or
    refunded now. Exchanges are free of label costs. For a different product: return_items and place_order.

    Args:
        customer_id: The verified customer who owns the order, for example C1001.
        order_id: A delivered order, for example W100001.
        sku: The item in the order that comes back.
        new_sku: The variant of the same product the customer wants; it must be in stock.
        reason: What the customer says.
        quantity: How many units to exchange.
        payment_method_id: Pays a price difference; the order's own method if left out. A difference in the
            customer's favour goes to the order's method.
    """
    customer = await require_verified(db, clock, customer_id)
    order = await require_order(db, order_id, customer_id)
    await _require_returnable(db, clock, order)
    if quantity < 1:
        raise ToolError("invalid_quantity", "Exchange at least one unit.")
    lines = {line["sku"]: line for line in await load_lines(db, order["id"])}
    line = _require_line(lines, order_id, sku, quantity, reason)
    variant = await require_variant(db, new_sku)
    if variant["product_id"] != line["product_id"]:
        raise ToolError(
            "different_product",
            f"{variant['sku']} is {variant['name']}, not {line['name']}. Only variants of the same product "
            "can be exchanged; "
            "otherwise use return_items and place_order.",
        )
    if variant["id"] == line["variant_id"] and reason not in OUR_FAULT:
        raise ToolError(
            "nothing_to_change",
            f"The customer already has {line['sku']}. The same variant is only sent again when it is "
            "defective, damaged "
            "or wrong.",
        )
    await reserve(db, variant, quantity)
    difference = (variant["price_cents"] - line["unit_price_cents"]) * quantity
    if reason in OUR_FAULT and variant["id"] == line["variant_id"]:
        difference = 0  # a replacement for our mistake costs nothing, whatever the price is today
    own = Ref.PAYMENT_METHOD.show(order["payment_method_id"])
    method = await require_payment_method(
        db, own if payment_method_id is None or difference < 0 else payment_method_id, customer["id"]
    )
    paid_back = min(-difference, await net_paid(db, order["id"])) if difference < 0 else 0
    await settle(db, clock, order["id"], method, "exchange", difference if difference > 0 else -paid_back)
    back = await _open_return(db, clock, order["id"], kind="exchange", reason=reason, refund_to=None, fee=0)
    await _add_item(db, back, line, quantity, _paid_for(order, line, quantity), variant["id"])
    return await load_return(db, back)


async def cancel_return(db: AsyncConnection, clock: Clock, customer_id: str, return_id: str) -> Return:
    """Call off a return whose parcel is not on its way yet; the customer keeps the items.

    An exchange with a price difference can't be called off here: open a ticket for billing.

    Args:
        customer_id: The customer who owns the order, for example C1001.
        return_id: A return in status requested, for example R40001.
    """
    row = await _require_return(db, return_id)
    order = await require_order(db, Ref.ORDER.show(row["order_id"]), customer_id)
    if row["status"] != "requested":
        raise ToolError(
            "return_not_open",
            f"Return {return_id} is {row['status']}; only a requested one can be called off.",
        )
    items = await fetch_all(db, "select * from return_items where return_id = :id", id=row["id"])
    for item in items:
        if item["replacement_variant_id"] is None:
            continue
        old, new = await _exchange_prices(db, item)
        if old != new:
            raise ToolError(
                "exchange_was_settled",
                f"The price difference of exchange {return_id} on order {Ref.ORDER.show(order['id'])} was "
                "settled "
                "already. Open a ticket and escalate it to billing.",
            )
        await release(db, item["replacement_variant_id"], item["quantity"])
    await write(
        db,
        "update returns set status = 'cancelled', closed_at = :now where id = :id",
        now=clock.now(),
        id=row["id"],
    )
    return await load_return(db, row["id"])


async def issue_refund(
    db: AsyncConnection, clock: Clock, customer_id: str, return_id: str, refund_to: str | None = None
) -> Refund:
    """Pay out a return that the warehouse has received (status received). Can't be undone.

    The amount is fixed: the value of the items minus the label fee, at most what is still paid on the order.
    Other amounts are goodwill: issue_goodwill_credit.

    Args:
        customer_id: The verified customer who owns the order, for example C1001.
        return_id: A received return, for example R40001.
        refund_to: Only to pay out otherwise than agreed: the payment method that paid, or store_credit.
    """
    row = await _require_return(db, return_id)
    await require_verified(db, clock, customer_id)
    order = await require_order(db, Ref.ORDER.show(row["order_id"]), customer_id)
    if row["kind"] == "exchange":
        raise ToolError(
            "return_is_exchange",
            f"{return_id} is an exchange: its price difference was settled when it was agreed.",
        )
    if row["status"] != "received":
        already = " It has been paid out already." if row["status"] == "refunded" else ""
        raise ToolError(
            "return_not_received",
            f"Return {return_id} is {row['status']}; a refund is issued once the warehouse has received "
            f"it.{already} "
            "See get_return for the next step.",
            status=row["status"],
        )
    agreed = row["refund_method_id"] or order["payment_method_id"]
    wanted = refund_to if refund_to is not None else Ref.PAYMENT_METHOD.show(agreed)
    method = await refund_destination(db, clock, order, wanted)
    due = await _refund_due(db, row)
    cents = min(due, await net_paid(db, order["id"]))
    if cents <= 0:
        raise ToolError(
            "nothing_to_refund",
            f"Nothing is left to refund on order {Ref.ORDER.show(order['id'])}: all that was paid was refunded before.",
        )
    await refund(db, clock, order["id"], method["id"], "return", cents, return_id=row["id"])
    await write(
        db,
        "update returns set status = 'refunded', closed_at = :now, refund_method_id = :method where id = :id",
        now=clock.now(),
        method=method["id"],
        id=row["id"],
    )
    return await _receipt(db, order["id"], row["id"], method, cents)


async def issue_goodwill_credit(
    db: AsyncConnection,
    clock: Clock,
    customer_id: str,
    order_id: str,
    amount: float,
    refund_to: str,
    note: str,
) -> Refund:
    """Give money back on a shipped or delivered order to make up for a problem, without a return.

    You may give at most $50.00 per order in all, and never more than is still paid on it. For more, escalate
    a ticket to billing.

    Args:
        customer_id: The verified customer who owns the order, for example C1001.
        order_id: A shipped or delivered order, for example W100001.
        amount: US dollars, for example 12.50.
        refund_to: The payment method that paid for the order (for example PM3001), or store_credit.
        note: Why, for the books.
    """
    await require_verified(db, clock, customer_id)
    order = await require_order(db, order_id, customer_id)
    cents = to_cents(amount)
    if order["status"] not in ("shipped", "delivered"):
        raise ToolError(
            "order_not_shipped",
            f"Order {order_id} is {order['status']}; goodwill is for shipped or delivered orders.",
        )
    given = await fetch_value(
        db,
        "select coalesce(sum(amount_cents), 0) from refunds where order_id = :order and reason = 'goodwill'",
        order=order["id"],
    )
    if given + cents > GOODWILL_LIMIT_CENTS:
        raise ToolError(
            "goodwill_limit",
            f"At most {price(GOODWILL_LIMIT_CENTS)} of goodwill per order is yours to give, and "
            f"{price(given)} was given on "
            f"{order_id}. Open a ticket and escalate it to billing instead.",
        )
    if not note.strip():
        raise ToolError("note_needed", "Say in the note why the customer gets this.")
    method = await refund_destination(db, clock, order, refund_to)
    await refund(db, clock, order["id"], method["id"], "goodwill", cents, note=note.strip())
    return await _receipt(db, order["id"], None, method, cents)


async def _require_return(db: AsyncConnection, return_id: str) -> RowMapping:
    row = await fetch_one(db, "select * from returns where id = :id", id=Ref.RETURN.parse(return_id))
    if row is None:
        raise ToolError("return_not_found", f"There is no return {return_id}. get_order lists an order's returns.")
    return row


async def _require_returnable(db: AsyncConnection, clock: Clock, order: RowMapping) -> None:
    shown = Ref.ORDER.show(order["id"])
    if order["status"] != "delivered":
        instead = (
            "Use cancel_order or modify_order_items."
            if order["status"] == "pending"
            else "Wait until it is delivered; see track_shipment."
        )
        raise ToolError(
            "order_not_delivered",
            f"Order {shown} is {order['status']}; only delivered items can be returned or exchanged. {instead}",
            status=order["status"],
        )
    delivered = await fetch_value(
        db,
        "select max(delivered_at) from shipments where order_id = :order and return_id is null",
        order=order["id"],
    )
    if delivered is None or clock.now() - delivered > RETURN_WINDOW:
        since = f" on {day(delivered)}; the last day was {day(delivered + RETURN_WINDOW)}" if delivered else ""
        raise ToolError(
            "return_window_over",
            f"Order {shown} was delivered{since}. Returns and exchanges end 30 days after delivery; you "
            "can't make an "
            "exception. If the item is defective, open a ticket and escalate it to a supervisor.",
        )


def _require_line(lines: dict[str, RowMapping], order_id: str, sku: str, quantity: int, reason: str) -> RowMapping:
    line = lines.get(sku.strip().upper())
    if line is None:
        raise ToolError("sku_not_in_order", f"Order {order_id} has no item {sku}; it has {', '.join(sorted(lines))}.")
    left = line["quantity"] - line["returned"]
    if quantity > left:
        raise ToolError(
            "already_returned" if left == 0 else "too_many_units",
            f"{line['quantity']} of {line['sku']} were ordered and {line['returned']} are in returns or "
            "exchanges already, "
            f"so {left} can still come back. get_order shows the order's returns.",
            returnable=left,
        )
    if line["final_sale"] and reason not in OUR_FAULT:
        raise ToolError(
            "final_sale",
            f"{line['name']} is a final-sale item: it can only come back when it is defective, damaged or wrong.",
        )
    return line


def _paid_for(order: RowMapping, line: RowMapping, quantity: int) -> int:
    """Cents paid for these units: their share of the discount is off, rounded down."""
    subtotal = order["subtotal_cents"]
    full: int = line["unit_price_cents"] * quantity
    return full * (subtotal - order["discount_cents"]) // subtotal if subtotal else 0


async def _open_return(
    db: AsyncConnection, clock: Clock, order: int, *, kind: str, reason: str, refund_to: int | None, fee: int
) -> int:
    opened = await fetch_value(
        db,
        "insert into returns (order_id, kind, reason, refund_method_id, label_fee_cents, requested_at)"
        " values (:order, :kind, :reason, :refund_to, :fee, :now) returning id",
        order=order,
        kind=kind,
        reason=reason,
        refund_to=refund_to,
        fee=fee,
        now=clock.now(),
    )
    return int(opened)


async def _add_item(
    db: AsyncConnection, back: int, line: RowMapping, quantity: int, value: int, replacement: int | None
) -> None:
    await write(
        db,
        "insert into return_items (return_id, order_item_id, quantity, value_cents, replacement_variant_id)"
        " values (:back, :line, :quantity, :value, :replacement)",
        back=back,
        line=line["id"],
        quantity=quantity,
        value=value,
        replacement=replacement,
    )


async def _exchange_prices(db: AsyncConnection, item: RowMapping) -> tuple[int, int]:
    prices = await fetch_one(
        db,
        "select i.unit_price_cents as old, v.price_cents as new from order_items i, variants v"
        " where i.id = :line and v.id = :variant",
        line=item["order_item_id"],
        variant=item["replacement_variant_id"],
    )
    assert prices is not None, "foreign keys"
    return prices["old"], prices["new"]


async def _refund_due(db: AsyncConnection, row: RowMapping) -> int:
    if row["kind"] == "exchange":
        return 0
    value = await fetch_value(
        db,
        "select coalesce(sum(value_cents), 0) from return_items where return_id = :id",
        id=row["id"],
    )
    return max(0, int(value) - int(row["label_fee_cents"]))


async def _receipt(db: AsyncConnection, order: int, back: int | None, method: RowMapping, cents: int) -> Refund:
    return Refund(
        order_id=Ref.ORDER.show(order),
        return_id=Ref.RETURN.show(back) if back is not None else None,
        amount=dollars(cents),
        payment_method_id=Ref.PAYMENT_METHOD.show(method["id"]),
        label=method["label"],
        order_net_paid=dollars(await net_paid(db, order)),
    )


_NEXT_STEP = {
    "requested": "The customer sends the items with the label that was mailed to them.",
    "in_transit": "The parcel is on its way to the warehouse; nothing to do until it is received.",
    "received": "The warehouse has checked the items in: pay it out with issue_refund.",
    "refunded": "Done, the money was paid out.",
    "exchanged": "Done, the replacement was sent (see track_shipment).",
    "rejected": "The warehouse refused the items (worn or incomplete); if the customer disagrees, open a ticket.",
    "cancelled": "Called off; the customer keeps the items.",
}


async def load_return(db: AsyncConnection, back: int) -> Return:
    row = await _require_return(db, Ref.RETURN.show(back))
    items = await fetch_all(
        db,
        "select ri.quantity, ri.value_cents, v.sku, p.name, n.sku as replacement_sku from return_items ri"
        " join order_items i on i.id = ri.order_item_id join variants v on v.id = i.variant_id"
        " join products p on p.id = v.product_id left join variants n on n.id = ri.replacement_variant_id"
        " where ri.return_id = :id order by i.id",
        id=back,
    )
    refunded = await fetch_value(
        db, "select coalesce(sum(amount_cents), 0) from refunds where return_id = :id", id=back
    )
    method = row["refund_method_id"]
    return Return(
        return_id=Ref.RETURN.show(back),
        order_id=Ref.ORDER.show(row["order_id"]),
        kind=row["kind"],
        status=row["status"],
        reason=row["reason"],
        items=[
            ReturnLine(
                sku=item["sku"],
                name=item["name"],
                quantity=item["quantity"],
                value=dollars(item["value_cents"]),
                replacement_sku=item["replacement_sku"],
            )
            for item in items
        ],
        label_fee=dollars(row["label_fee_cents"]),
        refund_due=dollars(await _refund_due(db, row)),
        refunded=dollars(int(refunded)),
        refund_to=Ref.PAYMENT_METHOD.show(method) if method is not None else None,
        requested_at=row["requested_at"],
        received_at=row["received_at"],
        closed_at=row["closed_at"],
        next_step=_NEXT_STEP[row["status"]],
    )

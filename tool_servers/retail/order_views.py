"""Reading orders and parcels. Writes nothing; every order-changing tool returns `load_order`."""

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, ToolError
from tool_servers.retail.lookups import (
    fetch_all,
    fetch_one,
    fetch_value,
    options_of,
    require_customer,
    require_order,
    show_address,
    show_payment_method,
)
from tool_servers.retail.models import (
    MoneyMove,
    Order,
    OrderLine,
    OrderStatus,
    OrderSummary,
    Parcel,
    Tracking,
    TrackingEvent,
)
from tool_servers.retail.references import Ref, dollars


async def list_orders(
    db: AsyncConnection, customer_id: str, status: OrderStatus | None = None, limit: int = 20
) -> list[OrderSummary]:
    """List a customer's orders, newest first.

    Args:
        customer_id: The customer, for example C1001 (from find_customer).
        status: Only orders in this status.
        limit: How many at most, 1 to 100.
    """
    customer = await require_customer(db, customer_id)
    found = await fetch_all(
        db,
        "select o.id, o.status, o.placed_at, o.total_cents,"
        " (select coalesce(sum(i.quantity), 0) from order_items i where i.order_id = o.id) as items"
        " from orders o where o.customer_id = :customer order by o.placed_at desc, o.id desc",
        customer=customer["id"],
    )
    return [
        OrderSummary(
            order_id=Ref.ORDER.show(row["id"]),
            status=row["status"],
            placed_at=row["placed_at"],
            items=row["items"],
            total=dollars(row["total_cents"]),
        )
        for row in found
        if status is None or row["status"] == status
    ][: max(1, min(limit, 100))]


async def get_order(db: AsyncConnection, order_id: str) -> Order:
    """Show everything about an order: items, address, payment method, totals, payments, refunds, parcels,
    returns.

    Args:
        order_id: The order number, for example W100001.
    """
    order = await require_order(db, order_id)
    return await load_order(db, order["id"])


async def track_shipment(
    db: AsyncConnection, clock: Clock, order_id: str | None = None, tracking_number: str | None = None
) -> list[Tracking]:
    """Show the parcels of an order, or one parcel by its tracking number, with the carrier's events.

    An order that has not shipped yet has no parcels. Give exactly one of the two arguments.

    Args:
        order_id: The order number, for example W100001.
        tracking_number: A carrier's number, for example PW1234567800001.
    """
    if (order_id is None) == (tracking_number is None):
        raise ToolError("one_argument_needed", "Give either order_id or tracking_number, not both.")
    if order_id is not None:
        order = await require_order(db, order_id)
        found = await fetch_all(db, "select * from shipments where order_id = :order order by id", order=order["id"])
    else:
        found = await fetch_all(
            db,
            "select * from shipments where tracking_number = :number",
            number=str(tracking_number).strip().upper(),
        )
        if not found:
            raise ToolError(
                "parcel_not_found",
                f"There is no parcel {tracking_number}. Use track_shipment with the order_id instead.",
            )
    return [await _tracking(db, clock, row) for row in found]


async def _tracking(db: AsyncConnection, clock: Clock, row: RowMapping) -> Tracking:
    events = await fetch_all(
        db,
        "select happened_at, status, place from shipment_events where shipment_id = :id order by position",
        id=row["id"],
    )
    arrived = row["delivered_at"] or clock.now()
    return Tracking(
        order_id=Ref.ORDER.show(row["order_id"]),
        parcel=_parcel(row),
        late=arrived.date() > row["estimated_on"],
        events=[
            TrackingEvent(at=event["happened_at"], status=event["status"], place=event["place"]) for event in events
        ],
    )


def _parcel(row: RowMapping) -> Parcel:
    return Parcel(
        tracking_number=row["tracking_number"],
        carrier=row["carrier"],
        status=row["status"],
        shipped_at=row["shipped_at"],
        estimated_on=row["estimated_on"],
        delivered_at=row["delivered_at"],
        replacement_for_return=Ref.RETURN.show(row["return_id"]) if row["return_id"] else None,
    )


async def load_lines(db: AsyncConnection, order: int) -> list[RowMapping]:
    """Lines with their variant and product, and `returned`: units in returns that were not rejected or "
    "cancelled."""
    return list(
        await fetch_all(
            db,
            "select i.id, i.variant_id, i.quantity, i.unit_price_cents, i.line_total_cents, v.sku, v.options,"
            " v.product_id, p.name, p.final_sale, p.category_id,"
            " (select coalesce(sum(ri.quantity), 0) from return_items ri join returns r on r.id ="
            " ri.return_id"
            "   where ri.order_item_id = i.id and r.status not in ('rejected', 'cancelled')) as returned"
            " from order_items i join variants v on v.id = i.variant_id join products p on p.id ="
            " v.product_id"
            " where i.order_id = :order order by i.id",
            order=order,
        )
    )


async def load_order(db: AsyncConnection, order: int) -> Order:
    row = await fetch_one(db, "select * from orders where id = :id", id=order)
    if row is None:
        raise ToolError("order_not_found", f"There is no order {Ref.ORDER.show(order)}.")
    address = await fetch_one(db, "select * from addresses where id = :id", id=row["address_id"])
    method = await fetch_one(db, "select * from payment_methods where id = :id", id=row["payment_method_id"])
    assert address is not None, "foreign key"
    assert method is not None, "foreign key"
    coupon = await fetch_value(db, "select coupon_code from coupon_redemptions where order_id = :order", order=order)
    parcels = await fetch_all(db, "select * from shipments where order_id = :order order by id", order=order)
    returns = await fetch_all(db, "select id from returns where order_id = :order order by id", order=order)
    money = await _money(db, order)
    signed = (move.amount if move.kind == "payment" else -move.amount for move in money)
    return Order(
        order_id=Ref.ORDER.show(order),
        customer_id=Ref.CUSTOMER.show(row["customer_id"]),
        status=row["status"],
        placed_at=row["placed_at"],
        cancelled_at=row["cancelled_at"],
        cancel_reason=row["cancel_reason"],
        items=[
            OrderLine(
                sku=line["sku"],
                product_id=Ref.PRODUCT.show(line["product_id"]),
                name=line["name"],
                options=options_of(line["options"]),
                quantity=line["quantity"],
                unit_price=dollars(line["unit_price_cents"]),
                line_total=dollars(line["line_total_cents"]),
                returned=line["returned"],
            )
            for line in await load_lines(db, order)
        ],
        shipping_address=show_address(address),
        shipping_speed=row["speed"],
        payment_method=show_payment_method(method),
        subtotal=dollars(row["subtotal_cents"]),
        coupon_code=coupon,
        discount=dollars(row["discount_cents"]),
        shipping=dollars(row["shipping_cents"]),
        total=dollars(row["total_cents"]),
        money=money,
        net_paid=round(sum(signed), 2),
        shipments=[_parcel(parcel) for parcel in parcels],
        return_ids=[Ref.RETURN.show(back["id"]) for back in returns],
    )


async def _money(db: AsyncConnection, order: int) -> list[MoneyMove]:
    paid = await fetch_all(
        db,
        "select 'payment' as kind, reason, amount_cents, payment_method_id, created_at, id from payments"
        " where order_id = :order",
        order=order,
    )
    returned = await fetch_all(
        db,
        "select 'refund' as kind, reason, amount_cents, payment_method_id, created_at, id from refunds"
        " where order_id = :order",
        order=order,
    )
    # At one moment, payments come first: a refund can't be older than what it refunds.
    moves = sorted([*paid, *returned], key=lambda row: (row["created_at"], row["kind"], row["id"]))
    return [
        MoneyMove(
            kind=row["kind"],
            reason=row["reason"],
            amount=dollars(row["amount_cents"]),
            payment_method_id=Ref.PAYMENT_METHOD.show(row["payment_method_id"]),
            at=row["created_at"],
        )
        for row in moves
    ]

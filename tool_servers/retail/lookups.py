"""Rows that several subjects need, each fetched with the refusal for when it is missing or someone else's.

Also the small SQL shorthands. Statements never name a type, a schema or a time keyword, and lock nothing:
calls that may write run one after another per rollout.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, ToolError
from tool_servers.retail.models import Address, PaymentMethod
from tool_servers.retail.references import Ref, dollars

VERIFIED_FOR = timedelta(minutes=30)


async def fetch_all(db: AsyncConnection, sql: str, **values: Any) -> Sequence[RowMapping]:
    return (await db.execute(text(sql), values)).mappings().all()


async def fetch_one(db: AsyncConnection, sql: str, **values: Any) -> RowMapping | None:
    return (await db.execute(text(sql), values)).mappings().first()


async def fetch_value(db: AsyncConnection, sql: str, **values: Any) -> Any:
    return (await db.execute(text(sql), values)).scalar()


async def write(db: AsyncConnection, sql: str, **values: Any) -> None:
    await db.execute(text(sql), values)


def options_of(value: Any) -> dict[str, str]:
    """jsonb as the driver gives it: text, unless a codec was set on the connection."""
    parsed: dict[str, str] = json.loads(value) if isinstance(value, str) else value
    return parsed


def options_text(value: Any) -> str:
    return ", ".join(options_of(value).values())


async def require_customer(db: AsyncConnection, customer_id: str) -> RowMapping:
    found = await fetch_one(db, "select * from customers where id = :id", id=Ref.CUSTOMER.parse(customer_id))
    if found is None:
        raise ToolError(
            "customer_not_found",
            f"There is no customer {customer_id}. Look the customer up with find_customer.",
        )
    return found


async def require_order(db: AsyncConnection, order_id: str, customer_id: str | None = None) -> RowMapping:
    """The order; with a customer, only if it is theirs."""
    owner = Ref.CUSTOMER.parse(customer_id) if customer_id is not None else None
    found = await fetch_one(db, "select * from orders where id = :id", id=Ref.ORDER.parse(order_id))
    if found is None:
        raise ToolError(
            "order_not_found",
            f"There is no order {order_id}. Check the number with the customer, or use list_orders.",
        )
    if owner is not None and found["customer_id"] != owner:
        raise ToolError(
            "order_not_owned",
            f"Order {order_id} does not belong to customer {customer_id}. Check both ids with list_orders, "
            "and do not disclose anything about this order to them.",
        )
    return found


async def is_verified(db: AsyncConnection, clock: Clock, customer: int) -> bool:
    passed = await fetch_value(
        db,
        "select count(*) from identity_checks where customer_id = :customer and passed and checked_at > :since",
        customer=customer,
        since=clock.now() - VERIFIED_FOR,
    )
    return bool(passed)


async def require_verified(db: AsyncConnection, clock: Clock, customer_id: str) -> RowMapping:
    """The customer, if verify_customer passed for them lately."""
    found = await require_customer(db, customer_id)
    if not await is_verified(db, clock, found["id"]):
        raise ToolError(
            "identity_not_verified",
            f"This needs proof that you speak with customer {customer_id}. Ask for the postal code of one "
            "of their "
            "addresses, or the last four digits of a card or of the phone, and call verify_customer first.",
        )
    return found


async def require_address(db: AsyncConnection, address_id: str, customer: int) -> RowMapping:
    found = await fetch_one(db, "select * from addresses where id = :id", id=Ref.ADDRESS.parse(address_id))
    if found is None or found["customer_id"] != customer:
        raise ToolError(
            "address_not_owned",
            f"Customer {Ref.CUSTOMER.show(customer)} has no address {address_id}. get_customer lists the "
            "addresses; "
            "add a new one with add_address.",
        )
    return found


async def require_payment_method(db: AsyncConnection, payment_method_id: str, customer: int) -> RowMapping:
    found = await fetch_one(
        db,
        "select * from payment_methods where id = :id",
        id=Ref.PAYMENT_METHOD.parse(payment_method_id),
    )
    if found is None or found["customer_id"] != customer:
        raise ToolError(
            "payment_method_not_owned",
            f"Customer {Ref.CUSTOMER.show(customer)} has no payment method {payment_method_id}. "
            "get_customer lists "
            "them; add a card with add_payment_method.",
        )
    return found


async def require_variant(db: AsyncConnection, sku: str) -> RowMapping:
    """A variant with its product: id, sku, options, price_cents, available, restock_on, product_id, name, "
    "status, …"""
    found = await fetch_one(
        db,
        "select v.id, v.sku, v.options, v.price_cents, v.available, v.restock_on, v.product_id, p.name, "
        "p.status,"
        " p.final_sale, p.category_id from variants v join products p on p.id = v.product_id where v.sku ="
        " :sku",
        sku=sku.strip().upper(),
    )
    if found is None:
        raise ToolError(
            "sku_not_found",
            f"There is no SKU {sku!r}. Use get_product to see the SKUs of a product, or search_products to find it.",
        )
    return found


def show_address(row: RowMapping) -> Address:
    return Address(
        address_id=Ref.ADDRESS.show(row["id"]),
        label=row["label"],
        recipient=row["recipient"],
        line1=row["line1"],
        line2=row["line2"],
        city=row["city"],
        region=row["region"],
        postal_code=row["postal_code"],
        country=row["country"],
    )


def show_payment_method(row: RowMapping) -> PaymentMethod:
    wallet = row["kind"] in ("gift_card", "store_credit")
    return PaymentMethod(
        payment_method_id=Ref.PAYMENT_METHOD.show(row["id"]),
        kind=row["kind"],
        label=row["label"],
        expires_on=row["expires_on"],
        balance=dollars(row["balance_cents"]) if wallet else None,
    )

"""What must hold in the store's database at any time: each query returns the offenders, so nothing.

Column constraints are PostgreSQL's to keep; these are the sums and states that span rows and tables.
"""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_PAID = "(select coalesce(sum(amount_cents), 0) from payments p where p.order_id = o.id{})"
_REFUNDED = "(select coalesce(sum(amount_cents), 0) from refunds r where r.order_id = o.id{})"
_PRICE = _PAID.format(" and p.reason in ('order', 'modification', 'payment_change')")
_CORRECTED = _REFUNDED.format(" and r.reason in ('modification', 'payment_change')")

INVARIANTS = {
    "subtotal is the sum of the lines": (
        "select o.id from orders o where subtotal_cents <>"
        " (select sum(line_total_cents) from order_items i where i.order_id = o.id)"
    ),
    "payments and corrections add up to the total": (
        f"select o.id from orders o where status <> 'cancelled' and total_cents <> {_PRICE} - {_CORRECTED}"
    ),
    "a cancelled order is paid back in full": (
        f"select o.id from orders o where status = 'cancelled' and {_PAID.format('')} <> {_REFUNDED.format('')}"
    ),
    "refunds never exceed payments": (f"select o.id from orders o where {_REFUNDED.format('')} > {_PAID.format('')}"),
    "no method but store credit gets back more than it paid": (
        "select r.order_id from refunds r join payment_methods m on m.id = r.payment_method_id"
        " where m.kind <> 'store_credit' group by r.order_id, r.payment_method_id having sum(r.amount_cents) >"
        " (select coalesce(sum(p.amount_cents), 0) from payments p"
        "  where p.order_id = r.order_id and p.payment_method_id = r.payment_method_id)"
    ),
    "a wallet holds what was loaded and refunded minus what was spent": (
        "select m.id from payment_methods m where kind in ('gift_card', 'store_credit') and balance_cents <>"
        " loaded_cents - (select coalesce(sum(amount_cents), 0) from payments p where p.payment_method_id = m.id)"
        " + (select coalesce(sum(amount_cents), 0) from refunds r where r.payment_method_id = m.id)"
    ),
    "a customer has at most one store credit": (
        "select customer_id from payment_methods where kind = 'store_credit' group by customer_id having count(*) > 1"
    ),
    "reserved is what unshipped orders and open exchanges hold": (
        "select v.id from variants v where reserved <>"
        " (select coalesce(sum(i.quantity), 0) from order_items i join orders o on o.id = i.order_id"
        "  where i.variant_id = v.id and o.status in ('pending', 'processing'))"
        " + (select coalesce(sum(ri.quantity), 0) from return_items ri join returns r on r.id = ri.return_id"
        "  where ri.replacement_variant_id = v.id and r.status in ('requested', 'in_transit'))"
    ),
    "the discount is the redeemed coupon's": (
        "select o.id from orders o left join coupon_redemptions c on c.order_id = o.id"
        " where o.status <> 'cancelled' and o.discount_cents <> coalesce(c.discount_cents, 0)"
    ),
    "a cancelled order holds no coupon": (
        "select o.id from orders o join coupon_redemptions c on c.order_id = o.id where o.status = 'cancelled'"
    ),
    "no unit comes back twice": (
        "select i.id from order_items i where quantity <"
        " (select coalesce(sum(ri.quantity), 0) from return_items ri join returns r on r.id = ri.return_id"
        "  where ri.order_item_id = i.id and r.status not in ('rejected', 'cancelled'))"
    ),
    "a return is of its order's items, delivered at most 30 days before": (
        "select r.id from returns r join return_items ri on ri.return_id = r.id"
        " join order_items i on i.id = ri.order_item_id where i.order_id <> r.order_id or r.requested_at >"
        " (select max(s.delivered_at) from shipments s where s.order_id = r.order_id and s.return_id is null)"
        " + interval '30 days'"
    ),
    "a refunded return paid at most what was due, and only once": (
        "select r.id from returns r where r.status = 'refunded' and"
        " (select count(*) from refunds f where f.return_id = r.id and f.amount_cents <="
        "  (select sum(value_cents) from return_items ri where ri.return_id = r.id) - r.label_fee_cents) <> 1"
    ),
    "a return that is not refunded paid nothing": (
        "select r.id from returns r join refunds f on f.return_id = r.id where r.status <> 'refunded'"
    ),
    "an exchange is for a variant of the same product": (
        "select ri.return_id from return_items ri join returns r on r.id = ri.return_id"
        " join order_items i on i.id = ri.order_item_id join variants a on a.id = i.variant_id"
        " left join variants b on b.id = ri.replacement_variant_id"
        " where (r.kind = 'exchange') <> (b.id is not null) or a.product_id <> b.product_id"
    ),
    "address and payment method of an order are its customer's": (
        "select o.id from orders o join addresses a on a.id = o.address_id"
        " join payment_methods m on m.id = o.payment_method_id"
        " where a.customer_id <> o.customer_id or m.customer_id <> o.customer_id"
    ),
    "money moves over methods of the order's customer": (
        "select o.id from orders o join payments p on p.order_id = o.id"
        " join payment_methods m on m.id = p.payment_method_id where m.customer_id <> o.customer_id"
        " union select o.id from orders o join refunds r on r.order_id = o.id"
        " join payment_methods m on m.id = r.payment_method_id where m.customer_id <> o.customer_id"
    ),
    "no card was charged after it expired": (
        "select p.id from payments p join payment_methods m on m.id = p.payment_method_id"
        " where m.expires_on < p.created_at - interval '1 day'"
    ),
    "goodwill stays within 50 dollars an order": (
        "select order_id from refunds where reason = 'goodwill' group by order_id having sum(amount_cents) > 5000"
    ),
    "shipped and delivered orders have their parcels, others have none": (
        "select o.id from orders o where (status in ('shipped', 'delivered')) <>"
        " exists (select 1 from shipments s where s.order_id = o.id and s.return_id is null)"
        " or (status = 'delivered') <>"
        " exists (select 1 from shipments s where s.order_id = o.id and s.return_id is null and s.status = 'delivered')"
    ),
    "nothing happened after the clock or before it could": (
        "select o.id from orders o join customers c on c.id = o.customer_id"
        " where o.placed_at > now() or o.placed_at < c.created_at or o.cancelled_at < o.placed_at"
        " union select s.id from shipments s join orders o on o.id = s.order_id"
        " where s.shipped_at > now() or s.delivered_at > now() or s.shipped_at < o.placed_at"
        " union select r.id from returns r where requested_at > now() or received_at > now() or closed_at > now()"
        " union select i.order_id from order_items i join orders o on o.id = i.order_id"
        " join variants v on v.id = i.variant_id join products p on p.id = v.product_id where p.created_at"
        " > o.placed_at"
        " union select t.id from tickets t where created_at > updated_at or updated_at > now()"
    ),
}


async def broken(db: AsyncConnection) -> dict[str, list[int]]:
    """Invariant → up to five offenders."""
    found = {}
    for name, query in INVARIANTS.items():
        offenders = (await db.execute(text(query))).scalars().all()
        if offenders:
            found[name] = list(offenders[:5])
    return found

"""The tool server `retail`: its tools, in the order in which an agent sees them.

The functions live in the module of their subject and can be called directly with a connection (that is how
they are tested); here they are only named. What an agent must know about the store's policy is in
`INSTRUCTIONS`.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from megamcp.sdk import Server
from tool_servers.retail import catalogue, coupons, customers, order_views, orders, returns, tickets

Tool = Callable[..., Awaitable[Any]]

INSTRUCTIONS = """\
You work at the service desk of an online store. Amounts are US dollars, times are UTC.
- Find the customer first. Verify them (verify_customer) before you change addresses or payment methods, place
  orders, agree returns or exchanges, or give money back. Never reveal one customer's data to another.
- Only pending orders can be cancelled or changed. Delivered items can be returned or exchanged for 30 days.
- Refunds go to the original payment method or to store credit. You may give up to $50 of goodwill per order.
- What you may not or can't do: say so, open a ticket, and escalate it to the right team. Don't promise an
outcome.
- Confirm with the customer before anything that moves money or can't be undone."""

server = Server("retail", instructions=INSTRUCTIONS)

READING: tuple[Tool, ...] = (
    catalogue.search_products,
    catalogue.list_categories,
    catalogue.get_product,
    catalogue.check_stock,
    customers.find_customer,
    customers.get_customer,
    order_views.list_orders,
    order_views.get_order,
    order_views.track_shipment,
    returns.get_return,
    coupons.check_coupon,
    tickets.list_tickets,
    tickets.get_ticket,
)
WRITING: tuple[Tool, ...] = (
    customers.verify_customer,
    customers.update_contact,
    customers.add_address,
    customers.add_payment_method,
    orders.place_order,
    orders.modify_order_items,
    orders.change_shipping_address,
    orders.change_payment_method,
    coupons.apply_coupon,
    coupons.remove_coupon,
    returns.return_items,
    returns.exchange_item,
    tickets.open_ticket,
    tickets.add_ticket_note,
    tickets.escalate_ticket,
    tickets.resolve_ticket,
)
FINAL: tuple[Tool, ...] = (
    orders.cancel_order,
    returns.cancel_return,
    returns.issue_refund,
    returns.issue_goodwill_credit,
)

for tool in READING:
    server.tool(read_only=True)(tool)
for tool in WRITING:
    server.tool(destructive=False)(tool)
for tool in FINAL:
    server.tool(destructive=True)(tool)

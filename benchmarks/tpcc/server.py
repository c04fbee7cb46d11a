"""Two transactions and a report of TPC-C, as tools. The same code serves both kinds of state."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Server, ToolError

server = Server("tpcc")

_NEXT = text(
    "update district set d_next_o_id = d_next_o_id + 1 where d_w_id = 1 and d_id = :district"
    " returning d_next_o_id - 1 as number, d_tax"
)
_ORDER = text(
    "insert into orders (o_w_id, o_d_id, o_id, o_c_id, o_lines) values (1, :district, :number, :customer, :lines)"
)
_STOCK = text(
    "update stock set s_quantity = case when s_quantity >= 15 then s_quantity - 5 else s_quantity + 86 end,"
    " s_ytd = s_ytd + 5, s_orders = s_orders + 1 where s_w_id = 1 and s_i_id = any(:items)"
)
_LINES = text(
    "insert into order_line select 1, :district, :number, row_number() over (order by i.i_id), i.i_id, 5, 5 * i.i_price"
    " from item i where i.i_id = any(:items)"
)
_TOTAL = text("select sum(ol_amount) from order_line where ol_w_id = 1 and ol_d_id = :district and ol_o_id = :number")
_REPORT = text(
    "select count(distinct s.s_i_id) as low, sum(l.ol_amount) as amount"
    "  from district d"
    "  join order_line l on l.ol_w_id = d.d_w_id and l.ol_d_id = d.d_id"
    "   and l.ol_o_id between d.d_next_o_id - 20 and d.d_next_o_id - 1"
    "  join stock s on s.s_w_id = l.ol_w_id and s.s_i_id = l.ol_i_id and s.s_quantity < 40"
    " where d.d_w_id = 1 and d.d_id = :district"
)


@server.tool
async def new_order(db: AsyncConnection, district: int, customer: int, items: list[int]) -> dict[str, float]:
    """Order five of each item for a customer."""
    row = (await db.execute(_NEXT, {"district": district})).first()
    if row is None:
        raise ToolError("no_such_district", f"There is no district {district}.")
    order = {"district": district, "number": row.number}
    await db.execute(_ORDER, {**order, "customer": customer, "lines": len(items)})
    await db.execute(_STOCK, {"items": items})
    await db.execute(_LINES, {**order, "items": items})
    total = (await db.execute(_TOTAL, order)).scalar_one()
    return {"order": row.number, "total": float(total * (1 + row.d_tax))}


@server.tool
async def payment(db: AsyncConnection, district: int, customer: int, amount: float) -> dict[str, float]:
    """Take a payment from a customer."""
    paid = {"district": district, "customer": customer, "amount": amount}
    await db.execute(
        text("update warehouse set w_ytd = w_ytd + cast(:amount as numeric) where w_id = 1"), {"amount": amount}
    )
    await db.execute(
        text("update district set d_ytd = d_ytd + cast(:amount as numeric) where d_w_id = 1 and d_id = :district"),
        {"district": district, "amount": amount},
    )
    balance = await db.execute(
        text(
            "update customer set c_balance = c_balance - cast(:amount as numeric), c_payments = c_payments + 1"
            " where c_w_id = 1 and c_d_id = :district and c_id = :customer returning c_balance"
        ),
        paid,
    )
    return {"balance": float(balance.scalar_one())}


@server.tool(read_only=True)
async def stock_level(db: AsyncConnection, district: int) -> dict[str, float]:
    """Count the items of a district's latest orders that run low, and sum what those orders were worth."""
    row = (await db.execute(_REPORT, {"district": district})).one()
    return {"low": row.low, "amount": float(row.amount or 0)}

"""Tickets: what a customer wants that is not done yet, its messages, and handing it to the team that may "
"do more."""

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, ToolError
from tool_servers.retail.lookups import (
    fetch_all,
    fetch_one,
    fetch_value,
    require_customer,
    require_order,
    write,
)
from tool_servers.retail.models import (
    Team,
    Ticket,
    TicketCategory,
    TicketMessage,
    TicketPriority,
    TicketStatus,
    TicketSummary,
)
from tool_servers.retail.references import Ref


async def list_tickets(
    db: AsyncConnection, customer_id: str, status: TicketStatus | None = None
) -> list[TicketSummary]:
    """List a customer's tickets, latest change first.

    Args:
        customer_id: The customer, for example C1001.
        status: Only tickets in this status.
    """
    customer = await require_customer(db, customer_id)
    found = await fetch_all(
        db,
        "select * from tickets where customer_id = :customer order by updated_at desc, id desc",
        customer=customer["id"],
    )
    return [
        TicketSummary(
            ticket_id=Ref.TICKET.show(row["id"]),
            subject=row["subject"],
            category=row["category"],
            priority=row["priority"],
            status=row["status"],
            order_id=_order(row),
            updated_at=row["updated_at"],
        )
        for row in found
        if status is None or row["status"] == status
    ]


async def get_ticket(db: AsyncConnection, ticket_id: str) -> Ticket:
    """Show a ticket with all its messages.

    Args:
        ticket_id: For example T9001 (from list_tickets).
    """
    row = await _require_ticket(db, ticket_id)
    return await _load_ticket(db, row["id"])


async def open_ticket(
    db: AsyncConnection,
    clock: Clock,
    customer_id: str,
    category: TicketCategory,
    subject: str,
    message: str,
    order_id: str | None = None,
    priority: TicketPriority = "normal",
) -> Ticket:
    """Open a ticket for something that can't be done now. A customer has one open ticket per order and
    category.

    Args:
        customer_id: The customer it is about, for example C1001.
        category: What it is about.
        subject: One line, 3 to 200 characters.
        message: What the customer wants, in their words, and what was tried.
        order_id: The order it is about, if any; it must be the customer's.
        priority: high only for safety, fraud, or a deadline within two days.
    """
    customer = await require_customer(db, customer_id)
    order = await require_order(db, order_id, customer_id) if order_id is not None else None
    if not 3 <= len(subject.strip()) <= 200 or not message.strip():
        raise ToolError("incomplete_ticket", "Give a subject of 3 to 200 characters and a message.")
    mine = await fetch_all(
        db,
        "select id, order_id, category from tickets where customer_id = :customer and status <> 'resolved' order by id",
        customer=customer["id"],
    )
    for row in mine:
        if row["category"] == category and row["order_id"] == (order["id"] if order else None):
            raise ToolError(
                "ticket_exists",
                f"Ticket {Ref.TICKET.show(row['id'])} about this is open already. Use get_ticket and add_ticket_note.",
                ticket_id=Ref.TICKET.show(row["id"]),
            )
    ticket = await fetch_value(
        db,
        "insert into tickets (customer_id, order_id, category, priority, subject, created_at, updated_at)"
        " values (:customer, :order, :category, :priority, :subject, :now, :now) returning id",
        customer=customer["id"],
        order=order["id"] if order else None,
        category=category,
        priority=priority,
        subject=subject.strip(),
        now=clock.now(),
    )
    await _say(db, clock, ticket, "customer", message)
    return await _load_ticket(db, ticket)


async def add_ticket_note(
    db: AsyncConnection, clock: Clock, ticket_id: str, note: str, internal: bool = False
) -> Ticket:
    """Add your message to a ticket that is not resolved.

    Args:
        ticket_id: The ticket, for example T9001.
        note: The text.
        internal: True if only staff may see it; otherwise the customer gets it and the ticket waits for their
        answer.
    """
    row = await _require_ticket(db, ticket_id)
    _require_unresolved(row)
    if not note.strip():
        raise ToolError("note_needed", "The note is empty.")
    await _say(db, clock, row["id"], "agent", note, internal=internal)
    waits = row["status"] == "open" and not internal
    await _change(db, clock, row, status="waiting_for_customer" if waits else row["status"], team=row["team"])
    return await _load_ticket(db, row["id"])


async def escalate_ticket(db: AsyncConnection, clock: Clock, ticket_id: str, team: Team, reason: str) -> Ticket:
    """Hand a ticket to a team that may do more than you. Tell the customer that they will hear from that
    team.

    billing: goodwill above $50, disputed charges. logistics: lost or stuck parcels. fraud: failed identity
    checks, suspected misuse. supervisor: exceptions to the rules, complaints.

    Args:
        ticket_id: The ticket, for example T9001 (open_ticket makes one).
        team: Who gets it.
        reason: What they should decide or do, with the facts.
    """
    row = await _require_ticket(db, ticket_id)
    _require_unresolved(row)
    if row["status"] == "escalated" and row["team"] == team:
        raise ToolError(
            "already_escalated", f"Ticket {ticket_id} is with {team} already. Add news with add_ticket_note."
        )
    if not reason.strip():
        raise ToolError("reason_needed", "Say what the team should decide or do.")
    await _say(db, clock, row["id"], "agent", f"Escalated to {team}: {reason.strip()}", internal=True)
    await _change(db, clock, row, status="escalated", team=team)
    return await _load_ticket(db, row["id"])


async def resolve_ticket(db: AsyncConnection, clock: Clock, ticket_id: str, resolution: str) -> Ticket:
    """Close a ticket whose matter is done. An escalated one is closed by its team only.

    Args:
        ticket_id: The ticket, for example T9001.
        resolution: What was done; the customer gets it.
    """
    row = await _require_ticket(db, ticket_id)
    _require_unresolved(row)
    if row["status"] == "escalated":
        raise ToolError(
            "ticket_escalated",
            f"Ticket {ticket_id} is with {row['team']}; only they close it. Use add_ticket_note.",
        )
    if not resolution.strip():
        raise ToolError("resolution_needed", "Say what was done.")
    await _say(db, clock, row["id"], "agent", resolution)
    await _change(db, clock, row, status="resolved", team=row["team"])
    return await _load_ticket(db, row["id"])


async def _require_ticket(db: AsyncConnection, ticket_id: str) -> RowMapping:
    row = await fetch_one(db, "select * from tickets where id = :id", id=Ref.TICKET.parse(ticket_id))
    if row is None:
        raise ToolError("ticket_not_found", f"There is no ticket {ticket_id}. Use list_tickets with the customer's id.")
    return row


def _require_unresolved(row: RowMapping) -> None:
    if row["status"] == "resolved":
        raise ToolError(
            "ticket_resolved",
            f"Ticket {Ref.TICKET.show(row['id'])} is resolved and stays so. Open a new one with "
            "open_ticket if it came up "
            "again.",
        )


async def _change(db: AsyncConnection, clock: Clock, row: RowMapping, *, status: str, team: str) -> None:
    await write(
        db,
        "update tickets set status = :status, team = :team, updated_at = :now where id = :id",
        status=status,
        team=team,
        now=clock.now(),
        id=row["id"],
    )


async def _say(
    db: AsyncConnection, clock: Clock, ticket: int, author: str, body: str, *, internal: bool = False
) -> None:
    await write(
        db,
        "insert into ticket_messages (ticket_id, author, internal, body, created_at)"
        " values (:ticket, :author, :internal, :body, :now)",
        ticket=ticket,
        author=author,
        internal=internal,
        body=body.strip(),
        now=clock.now(),
    )


def _order(row: RowMapping) -> str | None:
    return Ref.ORDER.show(row["order_id"]) if row["order_id"] is not None else None


async def _load_ticket(db: AsyncConnection, ticket: int) -> Ticket:
    row = await _require_ticket(db, Ref.TICKET.show(ticket))
    messages = await fetch_all(
        db,
        "select author, internal, body, created_at from ticket_messages where ticket_id = :id order by id",
        id=ticket,
    )
    return Ticket(
        ticket_id=Ref.TICKET.show(row["id"]),
        customer_id=Ref.CUSTOMER.show(row["customer_id"]),
        order_id=_order(row),
        subject=row["subject"],
        category=row["category"],
        priority=row["priority"],
        status=row["status"],
        team=row["team"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        messages=[
            TicketMessage(
                author=message["author"],
                internal=message["internal"],
                body=message["body"],
                at=message["created_at"],
            )
            for message in messages
        ],
    )

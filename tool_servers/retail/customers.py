"""Customers: finding them, proving who they are, and their contact data, addresses and payment methods."""

import re
from datetime import date, timedelta

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, ToolError
from tool_servers.retail.lookups import (
    fetch_all,
    fetch_value,
    is_verified,
    require_customer,
    require_verified,
    show_address,
    show_payment_method,
    write,
)
from tool_servers.retail.models import (
    Address,
    Customer,
    CustomerSummary,
    IdentityCheck,
    PaymentMethod,
    Proof,
)
from tool_servers.retail.references import Ref, day

ATTEMPTS = 3
LOCKED_FOR = timedelta(hours=24)
_EMAIL = re.compile(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)+")


async def find_customer(
    db: AsyncConnection,
    email: str | None = None,
    phone: str | None = None,
    last_name: str | None = None,
    first_name: str | None = None,
    postal_code: str | None = None,
) -> list[CustomerSummary]:
    """Find customers by email, phone or last name; all given arguments must match. At most 20 are returned.

    Several customers can share a name: then ask for more, never guess. An empty list means that nobody
    matches.

    Args:
        email: Full email address.
        phone: Full phone number, or its last digits (at least 4).
        last_name: Whole last name.
        first_name: Whole first name; narrows a search by last name.
        postal_code: Postal code of one of the customer's addresses; narrows a search.
    """
    if not (email or phone or last_name):
        raise ToolError("too_vague", "Give an email, a phone number or a last name to search by.")
    digits = re.sub(r"\D", "", phone or "")
    if phone and len(digits) < 4:
        raise ToolError("too_vague", "Give at least the last four digits of the phone number.")
    found = await fetch_all(
        db,
        "select c.id, c.email, c.first_name, c.last_name, c.phone,"
        " (select a.city from addresses a where a.customer_id = c.id order by a.id limit 1) as city,"
        " (select count(*) from orders o where o.customer_id = c.id) as orders"
        f" from customers c{' where c.email = :email' if email else ''} order by c.id",
        **({"email": email.strip().lower()} if email else {}),
    )
    homes: set[int] = set()
    if postal_code:
        rows = await fetch_all(
            db,
            "select customer_id from addresses where replace(upper(postal_code), ' ', '') = :code",
            code=_squeeze(postal_code),
        )
        homes = {row["customer_id"] for row in rows}

    def matches(row: RowMapping) -> bool:
        return (
            (not digits or re.sub(r"\D", "", row["phone"]).endswith(digits))
            and (not last_name or row["last_name"].casefold() == last_name.strip().casefold())
            and (not first_name or row["first_name"].casefold() == first_name.strip().casefold())
            and (not postal_code or row["id"] in homes)
        )

    return [
        CustomerSummary(
            customer_id=Ref.CUSTOMER.show(row["id"]),
            name=f"{row['first_name']} {row['last_name']}",
            email=row["email"],
            city=row["city"],
            orders=row["orders"],
        )
        for row in filter(matches, found)
    ][:20]


async def get_customer(db: AsyncConnection, clock: Clock, customer_id: str) -> Customer:
    """Show a customer's contact data, tier, addresses and payment methods, and whether they are verified.

    Do not read addresses or payment methods out to somebody who is not verified.

    Args:
        customer_id: For example C1001 (from find_customer or an order).
    """
    row = await require_customer(db, customer_id)
    return await _load_customer(db, clock, row["id"])


async def verify_customer(
    db: AsyncConnection, clock: Clock, customer_id: str, proof: Proof, value: str
) -> IdentityCheck:
    """Check that the person is this customer, by something they tell you. Look at `verified` in the answer.

    A passed check lasts 30 minutes and opens the tools that need it (addresses, payment methods, returns,
    refunds, new orders). Three failed checks within 24 hours lock the customer out. Never take the value from
    get_customer: ask.

    Args:
        customer_id: The customer they claim to be, for example C1001.
        proof: What they tell you: the postal code of an address, or the last four digits of a card or of the
        phone.
        value: The postal code or the four digits, as they said it.
    """
    row = await require_customer(db, customer_id)
    failed = await fetch_value(
        db,
        "select count(*) from identity_checks where customer_id = :customer and not passed and checked_at > :since",
        customer=row["id"],
        since=clock.now() - LOCKED_FOR,
    )
    if failed >= ATTEMPTS:
        raise ToolError(
            "identity_locked",
            f"{ATTEMPTS} checks of customer {customer_id} failed within 24 hours, so they are locked out. "
            "Open a ticket and "
            "escalate it to fraud; do nothing else for this person.",
        )
    passed = await _proves(db, row, proof, value)
    # A failed check is a result, not an error: an error would undo its record.
    await write(
        db,
        "insert into identity_checks (customer_id, proof, passed, checked_at) values (:customer, :proof, "
        ":passed, :now)",
        customer=row["id"],
        proof=proof,
        passed=passed,
        now=clock.now(),
    )
    left = ATTEMPTS - failed - (not passed)
    return IdentityCheck(
        customer_id=Ref.CUSTOMER.show(row["id"]),
        verified=passed,
        attempts_left=left,
        message="Verified for 30 minutes." if passed else f"This does not match. {left} attempts are left today.",
    )


async def _proves(db: AsyncConnection, row: RowMapping, proof: Proof, value: str) -> bool:
    said = _squeeze(value)
    if not said:
        return False
    if proof == "phone_last4":
        return len(said) == 4 and re.sub(r"\D", "", row["phone"]).endswith(said)
    if proof == "card_last4":
        cards = await fetch_all(
            db,
            "select last4 from payment_methods where customer_id = :customer and kind = 'card'",
            customer=row["id"],
        )
        return any(card["last4"] == said for card in cards)
    addresses = await fetch_all(
        db, "select postal_code from addresses where customer_id = :customer", customer=row["id"]
    )
    return any(_squeeze(address["postal_code"]) == said for address in addresses)


async def update_contact(
    db: AsyncConnection, clock: Clock, customer_id: str, email: str | None = None, phone: str | None = None
) -> Customer:
    """Change the email address or phone number of a verified customer.

    Args:
        customer_id: The customer, for example C1001.
        email: The new email address; no other customer may use it.
        phone: The new phone number with country code, for example +1-206-555-0142.
    """
    row = await require_verified(db, clock, customer_id)
    if email is None and phone is None:
        raise ToolError("nothing_to_change", "Give a new email, a new phone number, or both.")
    if email is not None:
        email = email.strip().lower()
        if not _EMAIL.fullmatch(email):
            raise ToolError("invalid_email", f"{email!r} is not an email address. Ask the customer to spell it.")
        owner = await fetch_value(db, "select id from customers where email = :email", email=email)
        if owner not in (None, row["id"]):
            raise ToolError(
                "email_in_use",
                f"{email} belongs to another account. Ask for another address; do not say whose it is.",
            )
        await write(db, "update customers set email = :email where id = :id", email=email, id=row["id"])
    if phone is not None:
        if not re.fullmatch(r"\+\d[\d\- ]{7,18}", phone.strip()):
            raise ToolError("invalid_phone", f"{phone!r} is not a phone number like +1-206-555-0142.")
        await write(db, "update customers set phone = :phone where id = :id", phone=phone.strip(), id=row["id"])
    return await _load_customer(db, clock, row["id"])


async def add_address(
    db: AsyncConnection,
    clock: Clock,
    customer_id: str,
    label: str,
    line1: str,
    city: str,
    region: str,
    postal_code: str,
    country: str = "US",
    line2: str | None = None,
    recipient: str | None = None,
) -> Address:
    """Add an address to a verified customer. Orders keep theirs: use change_shipping_address afterwards.

    Args:
        customer_id: The customer, for example C1001.
        label: A short name the customer has not used yet, for example Home or Office.
        line1: House number and street.
        city: City.
        region: State or province code, for example OR.
        postal_code: Postal code.
        country: US or CA; the store ships nowhere else.
        line2: Apartment, floor or company.
        recipient: Name on the parcel; the customer's own if left out.
    """
    row = await require_verified(db, clock, customer_id)
    country = country.strip().upper()
    if country not in ("US", "CA"):
        raise ToolError("country_not_served", f"The store ships to US and CA only, not to {country}.")
    if not all(part.strip() for part in (label, line1, city, region, postal_code)):
        raise ToolError("incomplete_address", "label, line1, city, region and postal_code must not be empty.")
    taken = await fetch_value(
        db,
        "select id from addresses where customer_id = :customer and lower(label) = :label",
        customer=row["id"],
        label=label.strip().lower(),
    )
    if taken is not None:
        raise ToolError(
            "label_in_use",
            f"The customer has an address {label!r} already ({Ref.ADDRESS.show(taken)}). Use it, or choose "
            "another label.",
        )
    new = await fetch_all(
        db,
        "insert into addresses (customer_id, label, recipient, line1, line2, city, region, postal_code, "
        "country,"
        " created_at) values (:customer, :label, :recipient, :line1, :line2, :city, :region, :postal_code,"
        " :country, :now)"
        " returning *",
        customer=row["id"],
        label=label.strip(),
        recipient=recipient or f"{row['first_name']} {row['last_name']}",
        line1=line1.strip(),
        line2=line2,
        city=city.strip(),
        region=region.strip().upper(),
        postal_code=postal_code.strip().upper(),
        country=country,
        now=clock.now(),
    )
    return show_address(new[0])


async def add_payment_method(
    db: AsyncConnection, clock: Clock, customer_id: str, brand: str, last4: str, expires: str
) -> PaymentMethod:
    """Store a card of a verified customer, by its tokenised details. Never ask for the whole card number.

    Args:
        customer_id: The customer, for example C1001.
        brand: For example Visa, Mastercard or Amex.
        last4: The last four digits.
        expires: Month of expiry as YYYY-MM, for example 2028-05.
    """
    row = await require_verified(db, clock, customer_id)
    month = re.fullmatch(r"(20\d\d)-(0[1-9]|1[0-2])", expires.strip())
    if not re.fullmatch(r"[0-9]{4}", last4.strip()) or month is None or not brand.strip():
        raise ToolError("invalid_card", "Give brand, the last four digits, and the expiry as YYYY-MM.")
    year, number = int(month[1]), int(month[2])
    expires_on = (date(year + number // 12, number % 12 + 1, 1)) - timedelta(days=1)
    if expires_on < clock.now().date():
        raise ToolError("card_expired", f"This card expired on {day(expires_on)}. Ask for another one.")
    label = f"{brand.strip()} ending {last4.strip()}"
    taken = await fetch_value(
        db,
        "select id from payment_methods where customer_id = :customer and lower(label) = :label",
        customer=row["id"],
        label=label.lower(),
    )
    if taken is not None:
        raise ToolError(
            "payment_method_exists",
            f"{label} is stored already as {Ref.PAYMENT_METHOD.show(taken)}; use that.",
        )
    new = await fetch_all(
        db,
        "insert into payment_methods (customer_id, kind, label, last4, expires_on, created_at)"
        " values (:customer, 'card', :label, :last4, :expires, :now) returning *",
        customer=row["id"],
        label=label,
        last4=last4.strip(),
        expires=expires_on,
        now=clock.now(),
    )
    return show_payment_method(new[0])


def _squeeze(text: str) -> str:
    return re.sub(r"[\s-]", "", text).upper()


async def _load_customer(db: AsyncConnection, clock: Clock, customer: int) -> Customer:
    row = await require_customer(db, Ref.CUSTOMER.show(customer))
    addresses = await fetch_all(db, "select * from addresses where customer_id = :id order by id", id=customer)
    methods = await fetch_all(db, "select * from payment_methods where customer_id = :id order by id", id=customer)
    return Customer(
        customer_id=Ref.CUSTOMER.show(customer),
        first_name=row["first_name"],
        last_name=row["last_name"],
        email=row["email"],
        phone=row["phone"],
        tier=row["tier"],
        member_since=row["created_at"],
        identity_verified=await is_verified(db, clock, customer),
        addresses=[show_address(address) for address in addresses],
        payment_methods=[show_payment_method(method) for method in methods],
    )

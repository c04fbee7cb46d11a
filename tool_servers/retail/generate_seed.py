"""Writes seed.sql: `python -m tool_servers.retail.generate_seed`.

It plays the store's eighteen months before the environment's clock: customers register, order, cancel,
receive, return and complain, so that the books balance by construction
(tests/integration/test_retail_invariants.py checks it). The same bytes come out on every Python and machine:
all chance comes from `Dice`, which only uses `random.Random.random`, and nothing reads the time. It does not
write the schema.
"""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from tool_servers.retail import vocabulary as words
from tool_servers.retail.dice import Dice, minutes
from tool_servers.retail.seed_rows import Rows, render

CLOCK = datetime(2026, 1, 15, 9, 0, tzinfo=UTC)
OPENED = datetime(2024, 7, 1, 8, 0, tzinfo=UTC)
CUSTOMERS, ORDERS, PRODUCTS_PER_CATEGORY, TICKETS, RECENT_TICKETS = 500, 2000, 12, 180, 36
SEED_FILE = Path(__file__).parent / "seed.sql"


@dataclass(slots=True)
class Variant:
    id: int
    product: int
    category: int
    price: int
    sold_from: datetime
    sellable: bool


@dataclass(slots=True)
class Line:
    id: int
    variant: Variant
    quantity: int
    price: int


@dataclass(slots=True)
class Customer:
    id: int
    since: datetime
    tier: str
    addresses: list[int] = field(default_factory=list)
    methods: list[int] = field(default_factory=list)
    store_credit: int | None = None
    coupons: set[str] = field(default_factory=set)


class Store:
    def __init__(self, seed: int = 20260115) -> None:
        self.dice = Dice(seed)
        self.rows = Rows()
        self.variants: list[Variant] = []
        self.siblings: dict[int, list[Variant]] = defaultdict(list)
        self.customers: list[Customer] = []
        self.reserved: Counter[int] = Counter()
        self.loaded: Counter[int] = Counter()
        self.balance: Counter[int] = Counter()
        self.expiry: dict[int, date] = {}
        self.variant_rows: dict[int, tuple[int, str, str, int]] = {}
        self.method_rows: list[tuple[int, int, str, str, str | None, date | None, datetime]] = []
        self.orders_by_status: dict[str, list[tuple[int, Customer, datetime]]] = defaultdict(list)

    def build(self) -> Rows:
        self.stock_shelves()
        self.invite_customers()
        self.print_coupons()
        for placed in self.order_times():
            self.place_order(placed)
        self.answer_tickets()
        self.count_stock()
        self.write_methods()
        return self.rows

    def stock_shelves(self) -> None:
        dice, rows = self.dice, self.rows
        departments = {name: rows.add("categories", None, name) for name in words.DEPARTMENTS}
        self.categories = {
            shelf.name: rows.add("categories", departments[shelf.department], shelf.name) for shelf in words.CATEGORIES
        }
        for shelf in words.CATEGORIES:
            names = [f"{line} {noun}" for line in words.LINES for noun in shelf.nouns]
            for number, name in enumerate(dice.some(names, PRODUCTS_PER_CATEGORY), start=1):
                self.add_product(shelf, number, name)

    def add_product(self, shelf: words.Category, number: int, name: str) -> None:
        dice = self.dice
        retired, final_sale = dice.chance(0.05), dice.chance(0.06)
        base = dice.between(*shelf.dollars) * 100 + dice.pick((0, 50, 95, 99))
        category = self.categories[shelf.name]
        since = OPENED + timedelta(days=-20 if number <= 8 else dice.between(-20, 500))
        product = self.rows.add(
            "products", category, name, dice.pick(words.BRANDS), f"{name}: {shelf.pitch}.",
            "discontinued" if retired else "active", final_sale,
            since,
        )  # fmt: skip
        combinations: list[tuple[dict[str, str], str, int]] = [({}, f"{shelf.code}-{number:02}", base)]
        for axis, values in shelf.axes:
            few = [value for value in values if dice.chance(0.55)] or [dice.pick(values)]
            few = few[:4] if axis in ("color", "scent") else few
            combinations = [
                (
                    {**options, axis: label},
                    f"{sku}-{code}",
                    price + (step * base // 5 if axis == shelf.dearer else 0),
                )
                for options, sku, price in combinations
                for step, (label, code) in enumerate(few)
            ]
        for options, sku, price in combinations[:9]:
            identity = self.rows.next_id("variants")
            self.variant_rows[identity] = (product, sku, json.dumps(options, separators=(",", ":")), price)
            variant = Variant(identity, product, category, price, since, sellable=not retired)
            self.variants.append(variant)
            self.siblings[product].append(variant)

    def invite_customers(self) -> None:
        dice, rows = self.dice, self.rows
        emails: Counter[str] = Counter()
        span = CLOCK - OPENED
        for number in range(CUSTOMERS):
            first, last = dice.pick(words.FIRST_NAMES), dice.pick(words.LAST_NAMES)
            plain = f"{first}.{last}".lower().translate(str.maketrans("öó'", "oo_")).replace("_", "")
            emails[plain] += 1
            nth = str(emails[plain]) if emails[plain] > 1 else ""
            email = f"{plain}{nth}@example.{dice.pick(('com', 'org', 'net'))}"
            since = OPENED - timedelta(days=30) + span * number / CUSTOMERS + minutes(dice, 0, 20)
            since = since.replace(second=0, microsecond=0)
            tier = dice.weighted({"standard": 70.0, "silver": 21.0, "gold": 9.0})
            phone = f"+1-{dice.between(201, 989)}-555-{dice.between(100, 199):04}"
            customer = Customer(rows.add("customers", email, first, last, phone, tier, since), since, tier)
            self.customers.append(customer)
            for label in ("Home", "Work", "Parents")[: dice.weighted({1: 68.0, 2: 26.0, 3: 6.0})]:
                city, region, prefix, country = dice.pick(words.CITIES)
                code = (
                    f"{prefix}{dice.between(1, 99):02}"
                    if country == "US"
                    else f"{prefix} {dice.between(1, 9)}K{dice.between(1, 9)}"
                )
                unit = f"Apt {dice.between(1, 48)}" if dice.chance(0.3) else None
                street = f"{dice.between(3, 4200)} {dice.pick(words.STREETS)}"
                customer.addresses.append(
                    rows.add(
                        "addresses",
                        customer.id,
                        label,
                        f"{first} {last}",
                        street,
                        unit,
                        city,
                        region,
                        code,
                        country,
                        since,
                    )
                )
            for kind in dice.some(("card", "paypal", "card", "gift_card"), dice.weighted({1: 40.0, 2: 40.0, 3: 20.0})):
                customer.methods.append(self.add_method(customer, kind, since))

    def add_method(self, customer: Customer, kind: str, since: datetime) -> int:
        dice = self.dice
        last4, expires = None, None
        if kind in ("card", "gift_card"):
            last4 = f"{dice.between(0, 9999):04}"
        if kind == "card":
            expires = date(dice.between(max(2025, since.year + 1), 2029), dice.between(1, 12), 28)
        brand = dice.pick(("Visa", "Mastercard", "Amex")) if kind == "card" else ""
        label = {
            "card": f"{brand} ending {last4}",
            "paypal": "PayPal",
            "gift_card": f"Gift card ending {last4}",
            "store_credit": "Store credit",
        }[kind]
        identity = self.rows.next_id("payment_methods")
        self.method_rows.append((identity, customer.id, kind, label, last4, expires, since))
        if expires:
            self.expiry[identity] = expires
        if kind == "gift_card":
            self.loaded[identity] = self.balance[identity] = dice.pick((2500, 5000, 5000, 10000, 20000))
        return identity

    def credit_of(self, customer: Customer, at: datetime) -> int:
        if customer.store_credit is None:
            customer.store_credit = self.add_method(customer, "store_credit", at)
            self.balance[customer.store_credit] = 0
        return customer.store_credit

    def print_coupons(self) -> None:
        for code, text, percent, cents, minimum, shelf, first, last, active in words.COUPONS:
            category = self.categories[shelf] if shelf else None
            self.rows.add_keyed(
                "coupons", code, text, percent, cents, minimum, category,
                datetime.fromisoformat(f"{first}T00:00:00+00:00"),
                datetime.fromisoformat(f"{last}T23:59:00+00:00"), active,
            )  # fmt: skip

    def order_times(self) -> list[datetime]:
        """Growing demand, a strong December, and a sale that is on when the clock stops."""
        december, sale = datetime(2025, 12, 1, tzinfo=UTC), datetime(2026, 1, 10, tzinfo=UTC)
        stretches = (
            (OPENED, december, 1370, 0.7),
            (december, sale, 390, 1.0),
            (sale, CLOCK, ORDERS - 1760, 0.8),
        )
        times = []
        for start, end, count, power in stretches:
            span = int((end - start).total_seconds() // 60) - 20
            times += [start + timedelta(minutes=self.dice.skewed(span, power)) for _ in range(count)]
        return sorted(times)

    def place_order(self, placed: datetime) -> None:
        dice, rows = self.dice, self.rows
        known = bisect_right([c.since for c in self.customers], placed)
        customer = self.customers[dice.skewed(known, 1.15)]
        wanted = dice.weighted({1: 46.0, 2: 30.0, 3: 16.0, 4: 8.0})
        choice = {
            v.product: v for v in dice.some([v for v in self.variants if v.sellable and v.sold_from < placed], wanted)
        }
        basket = [(v, dice.weighted({1: 86.0, 2: 11.0, 3: 3.0})) for v in choice.values()]
        subtotal = sum(v.price * quantity for v, quantity in basket)
        coupon = self.coupon_for(customer, basket, placed)
        discount = coupon[1] if coupon else 0
        speed = "express" if dice.chance(0.18) else "standard"
        shipping = 1495 if speed == "express" else 0 if subtotal >= 7500 else 595
        total = subtotal - discount + shipping
        method = self.method_for(customer, total, placed)
        if method in self.loaded and self.balance[method] < total:
            # A gift card that is too small was topped up when it was bought.
            self.loaded[method] += total
            self.balance[method] += total
        status = self.status_at_clock(placed)
        cancelled_at = min(placed + minutes(dice, 0.3, 20), CLOCK) if status == "cancelled" else None
        order = rows.add(
            "orders", customer.id, status, dice.pick(customer.addresses), method, speed, subtotal, discount,
            shipping, placed, cancelled_at, dice.pick(words.CANCEL_REASONS) if cancelled_at else None,
        )  # fmt: skip
        lines = [Line(rows.add("order_items", order, v.id, n, v.price), v, n, v.price) for v, n in basket]
        rows.add("payments", order, method, "order", total, placed)
        self.balance[method] -= total if method in self.loaded else 0
        if cancelled_at:
            self.refund(order, None, method, "cancellation", total, cancelled_at)
        elif coupon:
            customer.coupons.add(coupon[0])
            rows.add("coupon_redemptions", coupon[0], customer.id, order, discount, placed)
        if status in ("pending", "processing"):
            for line in lines:
                self.reserved[line.variant.id] += line.quantity
        self.orders_by_status[status].append((order, customer, placed))
        if status in ("shipped", "delivered"):
            self.ship(order, customer, method, lines, subtotal, discount, speed, placed)

    def method_for(self, customer: Customer, total: int, at: datetime) -> int:
        """One that was good at the time; a customer without one enters a new card."""
        usable = [
            m
            for m in customer.methods
            if self.expiry.get(m, at.date()) >= at.date() and (m not in self.loaded or total < 25_000)
        ]
        if not usable:
            usable = [self.add_method(customer, "card", at)]
            customer.methods += usable
        return self.dice.pick(usable)

    def coupon_for(self, customer: Customer, basket: list[tuple[Variant, int]], at: datetime) -> tuple[str, int] | None:
        if not self.dice.chance(0.28):
            return None
        found = []
        for code, _, percent, cents, minimum, shelf, first, last, active in words.COUPONS:
            eligible = sum(v.price * n for v, n in basket if not shelf or v.category == self.categories[shelf])
            valid = active and first <= f"{at:%Y-%m-%d}" < last and code not in customer.coupons
            if valid and eligible and eligible >= minimum:
                found.append((code, eligible * percent // 100 if percent else min(cents or 0, eligible)))
        return self.dice.pick(found) if found else None

    def status_at_clock(self, placed: datetime) -> str:
        hours = (CLOCK - placed).total_seconds() / 3600
        if hours > 12 and self.dice.chance(0.05):
            return "cancelled"
        if hours < 34:
            return "pending" if self.dice.chance(0.9) else "processing"
        if hours < 80:
            return "processing" if self.dice.chance(0.75) else "shipped"
        return "delivered"  # ship() may find that it is still on the road

    def refund(self, order: int, back: int | None, method: int, reason: str, cents: int, at: datetime) -> None:
        self.rows.add("refunds", order, back, method, reason, cents, None, at)
        if method in self.balance:
            self.balance[method] += cents

    def ship(
        self, order: int, customer: Customer, method: int, lines: list[Line], subtotal: int, discount: int,
        speed: str, placed: datetime,
    ) -> None:  # fmt: skip
        dice = self.dice
        shipped = min(placed + minutes(dice, 24, 66), CLOCK - minutes(dice, 1, 10))
        days = dice.between(1, 2) if speed == "express" else dice.between(3, 7)
        arrives = shipped + timedelta(days=days) + minutes(dice, -4, 6)
        trouble = ""
        if arrives > CLOCK - timedelta(days=25):
            overdue = CLOCK - arrives > timedelta(days=2)
            trouble = dice.weighted({"": 95.0, "lost": 2.0 if overdue else 0.0, "exception": 3.0})
        delivered = arrives if arrives < CLOCK and not trouble else None
        if delivered is None:
            self.rows.replace("orders", order, "status", "shipped")
            self.orders_by_status["shipped"].append((order, customer, placed))
        self.parcel(order, None, shipped, days, delivered, trouble)
        fresh = delivered and delivered > CLOCK - timedelta(days=16)
        if delivered and dice.chance(0.3 if fresh else 0.11):
            self.send_back(order, customer, method, lines, subtotal, discount, delivered)

    def parcel(
        self,
        order: int,
        back: int | None,
        shipped: datetime,
        days: int,
        delivered: datetime | None,
        trouble: str,
    ) -> None:
        dice = self.dice
        carrier, prefix = dice.pick(words.CARRIERS)
        number = f"{prefix}{dice.between(10_000_000, 99_999_999)}{self.rows.next_id('shipments', peek=True):05}"
        age = CLOCK - shipped
        status = "delivered" if delivered else trouble or (
            "label_created" if age < timedelta(hours=9)
            else "out_for_delivery" if age > timedelta(days=days - 0.4)
            else "in_transit"
        )  # fmt: skip
        due = (shipped + timedelta(days=days)).date()
        shipment = self.rows.add("shipments", order, back, carrier, number, status, shipped, due, delivered)
        if age > timedelta(days=45):
            return  # carriers drop the history of old parcels
        events = [("label_created", "Warehouse, Reno, NV", shipped)]
        if status != "label_created":
            events.append(("in_transit", dice.pick(words.HUBS), shipped + minutes(dice, 6, 9)))
        if status in ("exception", "lost"):
            events.append(
                (
                    status,
                    dice.pick(words.HUBS),
                    min(shipped + timedelta(days=days), CLOCK) - minutes(dice, 1, 3),
                )
            )
        elif status in ("out_for_delivery", "delivered"):
            last = delivered or CLOCK - timedelta(minutes=30)
            events.append(("out_for_delivery", "Local depot", last - minutes(dice, 2, 4)))
        if delivered:
            events.append(("delivered", "Front door", delivered))
        for position, event in enumerate(events, start=1):
            self.rows.add_keyed("shipment_events", shipment, position, *event)

    def send_back(
        self, order: int, customer: Customer, method: int, lines: list[Line], subtotal: int, discount: int,
        delivered: datetime,
    ) -> None:  # fmt: skip
        dice, rows = self.dice, self.rows
        requested = delivered + minutes(dice, 6, 24 * dice.pick((2, 4, 9, 22)))
        if requested > CLOCK:
            return
        age = (CLOCK - requested).days
        reason = dice.weighted(words.RETURN_REASONS)
        line = dice.pick(lines)
        swaps = [v for v in self.siblings[line.variant.product] if v is not line.variant and v.price == line.price]
        exchange = bool(swaps) and dice.chance(0.25)
        if age < 4:
            status = "requested"
        elif age < 7:
            status = "in_transit"
        elif exchange:
            status = "exchanged"
        elif age < 10:
            status = "received"
        else:
            status = dice.weighted({"refunded": 93.0, "rejected": 4.0, "cancelled": 3.0})
        value = line.price * line.quantity * (subtotal - discount) // subtotal
        free = exchange or customer.tier == "gold" or reason in ("defective", "damaged_in_transit", "wrong_item_sent")
        fee = 0 if free else 695
        if value <= fee:
            return
        refund_to = method if not dice.chance(0.2) else self.credit_of(customer, requested)
        received = (
            requested + minutes(dice, 24 * 6, 24 * 7)
            if status in ("received", "refunded", "exchanged", "rejected")
            else None
        )
        closed = received + minutes(dice, 2, 40) if received and status != "received" else None
        if status == "cancelled":
            closed = requested + minutes(dice, 5, 30)
        back = rows.add(
            "returns", order, "exchange" if exchange else "refund", status, reason, None if exchange else
            refund_to, fee, requested, received, closed,
        )  # fmt: skip
        swap = dice.pick(swaps) if exchange else None
        rows.add_keyed("return_items", back, line.id, line.quantity, value, swap.id if swap else None)
        if status == "refunded" and closed:
            self.refund(order, back, refund_to, "return", value - fee, closed)
        elif swap and status == "exchanged" and closed:
            arrived = closed + timedelta(days=3)
            self.parcel(order, back, closed, 3, arrived if arrived < CLOCK else None, "")
        elif swap:
            self.reserved[swap.id] += line.quantity

    def answer_tickets(self) -> None:
        dice, rows = self.dice, self.rows
        about = {
            "delivery": "shipped",
            "return": "delivered",
            "order": "pending",
            "payment": "pending",
            "product": "delivered",
        }
        history, week = 550 * 24 * 60, 6 * 24 * 60
        opened = [OPENED + timedelta(minutes=dice.skewed(history, 0.6)) for _ in range(TICKETS - RECENT_TICKETS)]
        opened += [CLOCK - timedelta(minutes=dice.between(60, week)) for _ in range(RECENT_TICKETS)]
        opened.sort()
        for at in opened:
            category = dice.pick(tuple(words.TICKETS))
            subject, question, answer = dice.pick(words.TICKETS[category])
            # Old tickets speak of delivered orders, whatever they were about at the time.
            pool = self.orders_by_status[about.get(category, "delivered")] if at > CLOCK - timedelta(days=2) else ()
            earlier = [o for o in (pool or self.orders_by_status["delivered"]) if o[2] < at]
            if not earlier:
                continue
            order, customer, _ = earlier[dice.between(max(0, len(earlier) - 60), len(earlier) - 1)]
            recent = CLOCK - at < timedelta(days=6)
            status = (
                dice.weighted({"open": 6.0, "waiting_for_customer": 3.0, "escalated": 1.0}) if recent else "resolved"
            )
            team = dice.pick(("billing", "logistics", "supervisor")) if status == "escalated" else "front_desk"
            replied = min(at + minutes(dice, 0.5, 20), CLOCK)
            priority = dice.weighted({"low": 2.0, "normal": 7.0, "high": 1.0})
            ticket = rows.add(
                "tickets", customer.id, None if category == "account" else order, category, priority, status,
                team, subject, at, at if status == "open" else replied,
            )  # fmt: skip
            rows.add("ticket_messages", ticket, "customer", False, question, at)
            if status != "open":
                rows.add("ticket_messages", ticket, "agent", False, answer, replied)
            if status == "resolved" and dice.chance(0.3):
                rows.add("identity_checks", customer.id, dice.pick(("postal_code", "phone_last4")), True, at)

    def count_stock(self) -> None:
        dice = self.dice
        for identity, (product, sku, options, price) in self.variant_rows.items():
            free = 0 if dice.chance(0.11) else dice.between(1, 45)
            held = self.reserved[identity]
            restock = (CLOCK + timedelta(days=dice.between(4, 60))).date() if not free and dice.chance(0.7) else None
            self.rows.put("variants", identity, product, sku, options, price, held + free, held, restock)

    def write_methods(self) -> None:
        for identity, customer, kind, label, last4, expires, since in self.method_rows:
            wallet = kind in ("gift_card", "store_credit")
            money = (self.loaded[identity], self.balance[identity]) if wallet else (0, 0)
            self.rows.put("payment_methods", identity, customer, kind, label, last4, expires, *money, since)


def main() -> None:
    SEED_FILE.write_text(render(Store().build()), encoding="utf-8")


if __name__ == "__main__":
    main()

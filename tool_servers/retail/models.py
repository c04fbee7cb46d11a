"""What the tools take and give, as an agent sees it: ids with letters, dollars, UTC times.

Only shapes; how they are filled is in the module of each subject.
"""

from datetime import date, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field

OrderStatus = Literal["pending", "processing", "shipped", "delivered", "cancelled"]
ShippingSpeed = Literal["standard", "express"]
ReturnReason = Literal[
    "no_longer_needed", "wrong_size", "not_as_described", "defective", "damaged_in_transit", "wrong_item_sent"
]
CancelReason = Literal["no_longer_needed", "ordered_by_mistake", "found_cheaper", "arrives_too_late", "other"]
TicketCategory = Literal["order", "delivery", "return", "payment", "product", "account", "other"]
TicketPriority = Literal["low", "normal", "high"]
TicketStatus = Literal["open", "waiting_for_customer", "escalated", "resolved"]
Team = Literal["billing", "logistics", "fraud", "supervisor"]
Proof = Literal["postal_code", "card_last4", "phone_last4"]

Dollars = Annotated[float, Field(description="US dollars")]


class Variant(BaseModel):
    """One buyable version of a product."""

    sku: str
    options: dict[str, str] = Field(description="For example color and size")
    price: Dollars
    available: int = Field(description="Units that can be sold now")
    restock_on: date | None = Field(default=None, description="Expected restock day, when it is sold out")


class ProductSummary(BaseModel):
    product_id: str
    name: str
    brand: str
    category: str
    price_from: Dollars
    price_to: Dollars
    available: int = Field(description="Units over all variants")


class Product(BaseModel):
    product_id: str
    name: str
    brand: str
    category: str
    description: str
    status: Literal["active", "discontinued"]
    final_sale: bool = Field(description="Returnable only if defective, damaged or wrong")
    variants: list[Variant]


class Category(BaseModel):
    name: str
    department: str
    products: int = Field(description="Active products in it")


class Stock(BaseModel):
    sku: str
    product_id: str
    name: str
    options: dict[str, str]
    price: Dollars
    status: Literal["active", "discontinued"]
    available: int
    restock_on: date | None = None


class CustomerSummary(BaseModel):
    customer_id: str
    name: str
    email: str
    city: str | None = Field(description="City of the first address")
    orders: int


class Address(BaseModel):
    address_id: str
    label: str
    recipient: str
    line1: str
    line2: str | None = None
    city: str
    region: str
    postal_code: str
    country: str


class PaymentMethod(BaseModel):
    payment_method_id: str
    kind: Literal["card", "paypal", "gift_card", "store_credit"]
    label: str
    expires_on: date | None = None
    balance: Dollars | None = Field(default=None, description="Of a gift card or of store credit")


class Customer(BaseModel):
    customer_id: str
    first_name: str
    last_name: str
    email: str
    phone: str
    tier: Literal["standard", "silver", "gold"]
    member_since: datetime
    identity_verified: bool = Field(description="Whether verify_customer passed in the last 30 minutes")
    addresses: list[Address]
    payment_methods: list[PaymentMethod]


class IdentityCheck(BaseModel):
    customer_id: str
    verified: bool
    attempts_left: int = Field(description="Failed attempts left before the account is locked for the day")
    message: str


class OrderSummary(BaseModel):
    order_id: str
    status: OrderStatus
    placed_at: datetime
    items: int = Field(description="Number of units")
    total: Dollars


class OrderLine(BaseModel):
    sku: str
    product_id: str
    name: str
    options: dict[str, str]
    quantity: int
    unit_price: Dollars
    line_total: Dollars
    returned: int = Field(description="Units in returns or exchanges, open or done")


class Parcel(BaseModel):
    tracking_number: str
    carrier: str
    status: Literal["label_created", "in_transit", "out_for_delivery", "delivered", "exception", "lost"]
    shipped_at: datetime
    estimated_on: date
    delivered_at: datetime | None = None
    replacement_for_return: str | None = Field(default=None, description="The exchange it belongs to, if any")


class MoneyMove(BaseModel):
    kind: Literal["payment", "refund"]
    reason: str
    amount: Dollars
    payment_method_id: str
    at: datetime


class Order(BaseModel):
    order_id: str
    customer_id: str
    status: OrderStatus
    placed_at: datetime
    cancelled_at: datetime | None = None
    cancel_reason: str | None = None
    items: list[OrderLine]
    shipping_address: Address
    shipping_speed: ShippingSpeed
    payment_method: PaymentMethod
    subtotal: Dollars
    coupon_code: str | None = None
    discount: Dollars
    shipping: Dollars
    total: Dollars
    money: list[MoneyMove] = Field(description="Every payment and refund, oldest first")
    net_paid: Dollars = Field(description="Payments minus refunds: the most that can still be refunded")
    shipments: list[Parcel]
    return_ids: list[str]


class TrackingEvent(BaseModel):
    at: datetime
    status: str
    place: str


class Tracking(BaseModel):
    order_id: str
    parcel: Parcel
    late: bool = Field(description="Not delivered, or was delivered after the estimated day")
    events: list[TrackingEvent] = Field(description="Empty when the carrier dropped the history (45 days)")


class CouponCheck(BaseModel):
    code: str
    description: str
    order_id: str
    discount: Dollars
    new_total: Dollars


class ReturnLine(BaseModel):
    sku: str
    name: str
    quantity: int
    value: Dollars = Field(description="What was paid for these units after discounts")
    replacement_sku: str | None = None


class Return(BaseModel):
    return_id: str
    order_id: str
    kind: Literal["refund", "exchange"]
    status: Literal["requested", "in_transit", "received", "refunded", "exchanged", "rejected", "cancelled"]
    reason: str
    items: list[ReturnLine]
    label_fee: Dollars
    refund_due: Dollars = Field(description="Value minus the label fee; 0 for an exchange")
    refunded: Dollars
    refund_to: str | None = Field(description="Payment method that gets the refund")
    requested_at: datetime
    received_at: datetime | None = None
    closed_at: datetime | None = None
    next_step: str


class Refund(BaseModel):
    order_id: str
    return_id: str | None = None
    amount: Dollars
    payment_method_id: str
    label: str
    order_net_paid: Dollars = Field(description="What remains paid on the order after it")


class TicketSummary(BaseModel):
    ticket_id: str
    subject: str
    category: TicketCategory
    priority: TicketPriority
    status: TicketStatus
    order_id: str | None = None
    updated_at: datetime


class TicketMessage(BaseModel):
    author: Literal["customer", "agent", "system"]
    internal: bool = Field(description="Only staff sees it")
    body: str
    at: datetime


class Ticket(BaseModel):
    ticket_id: str
    customer_id: str
    order_id: str | None = None
    subject: str
    category: TicketCategory
    priority: TicketPriority
    status: TicketStatus
    team: Literal["front_desk", "billing", "logistics", "fraud", "supervisor"]
    created_at: datetime
    updated_at: datetime
    messages: list[TicketMessage]


class ItemChange(BaseModel):
    """A change of one line of an order. Give `quantity`, `new_sku` or both."""

    sku: str = Field(description="SKU of a line that is in the order")
    quantity: int | None = Field(default=None, ge=0, le=99, description="New quantity; 0 removes the line")
    new_sku: str | None = Field(default=None, description="Another variant of the same product to swap to")


class ItemQuantity(BaseModel):
    sku: str = Field(description="SKU of the variant")
    quantity: int = Field(ge=1, le=99, description="Number of units")

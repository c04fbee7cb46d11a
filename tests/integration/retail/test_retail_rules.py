"""What the store refuses, and what it does exactly. Orders and customers are the seed's."""

from datetime import timedelta

from megamcp.sdk import Clock
from tests.integration.retail.desk import NOW, Desk

PENDING = {"customer_id": "C1044", "order_id": "W102000"}  # one kettle, paid by card
SHIPPED = {"customer_id": "C1076", "order_id": "W101700"}
DELIVERED = {"customer_id": "C1241", "order_id": "W101494"}  # boots 181.50, slippers 49.95, on 2025-12-21
LATE = {"customer_id": "C1319", "order_id": "W101360"}  # delivered on 2025-12-05
BOOTS, SLIPPERS = "BOT-08-SND-12", "SLP-07-CHR-11"


async def test_an_order_of_someone_else_is_refused_by_every_tool(desk: Desk) -> None:
    foreign = {"customer_id": "C1241", "order_id": "W102000"}
    await desk.verify("C1241")
    calls = {
        "cancel_order": {"reason": "other"},
        "modify_order_items": {"changes": [{"sku": "CMP-11-RST", "quantity": 2}]},
        "change_shipping_address": {"address_id": "A7313"},
        "change_payment_method": {"payment_method_id": "PM3433"},
        "apply_coupon": {"code": "JANUARY20"},
        "remove_coupon": {},
        "return_items": {
            "items": [{"sku": BOOTS, "quantity": 1}], "reason": "defective", "refund_to": "store_credit",
        },
        "exchange_item": {"sku": BOOTS, "new_sku": BOOTS, "reason": "defective"},
        "issue_goodwill_credit": {"amount": 1, "refund_to": "store_credit", "note": "x"},
        "open_ticket": {"category": "order", "subject": "Hello", "message": "Hello"},
    }  # fmt: skip
    for tool, arguments in calls.items():
        assert await desk.refused(tool, **foreign, **arguments) == "order_not_owned", tool


async def test_what_needs_proof_of_identity_is_refused_without_it(desk: Desk) -> None:
    calls = {
        "update_contact": {"phone": "+1-206-555-0142"},
        "add_address": {
            "label": "New", "line1": "1 Elm Street", "city": "Reno", "region": "NV", "postal_code": "89501",
        },
        "add_payment_method": {"brand": "Visa", "last4": "1234", "expires": "2028-05"},
        "place_order": {
            "items": [{"sku": BOOTS, "quantity": 1}], "address_id": "A7313", "payment_method_id": "PM3433",
        },
        "change_shipping_address": {"order_id": "W101494", "address_id": "A7314"},
        "change_payment_method": {"order_id": "W101494", "payment_method_id": "PM3434"},
        "return_items": {
            "order_id": "W101494", "items": [{"sku": BOOTS, "quantity": 1}], "reason": "wrong_size",
            "refund_to": "PM3433",
        },
        "exchange_item": {"order_id": "W101494", "sku": BOOTS, "new_sku": BOOTS, "reason": "defective"},
        "issue_goodwill_credit": {"order_id": "W101494", "amount": 5, "refund_to": "PM3433", "note": "x"},
    }  # fmt: skip
    for tool, arguments in calls.items():
        assert await desk.refused(tool, customer_id="C1241", **arguments) == "identity_not_verified", tool


async def test_a_passed_check_lasts_half_an_hour(desk: Desk) -> None:
    await desk.verify("C1241")
    desk.clock = Clock(NOW + timedelta(minutes=29))
    assert (await desk.call("get_customer", customer_id="C1241")).identity_verified
    desk.clock = Clock(NOW + timedelta(minutes=31))
    assert not (await desk.call("get_customer", customer_id="C1241")).identity_verified


async def test_three_failed_checks_lock_the_customer_until_the_next_day(desk: Desk) -> None:
    wrong = {"customer_id": "C1241", "proof": "postal_code", "value": "00000"}
    right = {"customer_id": "C1241", "proof": "postal_code", "value": "98199"}
    assert [(await desk.call("verify_customer", **wrong)).attempts_left for _ in range(3)] == [2, 1, 0]
    assert await desk.refused("verify_customer", **right) == "identity_locked"
    desk.clock = Clock(NOW + timedelta(hours=25))
    assert (await desk.call("verify_customer", **right)).verified


async def test_an_order_in_the_warehouse_or_later_is_not_cancelled(desk: Desk) -> None:
    for status in ("processing", "shipped", "delivered", "cancelled"):
        order, customer = (
            await desk.value("select max(id) from orders where status::text = :s", s=status),
            await desk.value(
                "select customer_id from orders where id = (select max(id) from orders where status::text = :s)",
                s=status,
            ),
        )
        code = await desk.refused("cancel_order", customer_id=f"C{customer}", order_id=f"W{order}", reason="other")
        assert code == "order_not_pending"


async def test_cancelling_gives_back_money_stock_and_coupon(desk: Desk) -> None:
    reserved = await desk.value("select reserved from variants where sku = 'JKT-07-CHR-M'")
    order = await desk.call("cancel_order", customer_id="C1049", order_id="W101931", reason="other")
    assert (order.status, order.net_paid, order.coupon_code) == ("cancelled", 0, None)
    assert await desk.value("select reserved from variants where sku = 'JKT-07-CHR-M'") == reserved - 1
    used = "select count(*) from coupon_redemptions where customer_id = 1049 and coupon_code = 'JANUARY20'"
    assert await desk.value(used) == 0


async def test_stock_never_goes_below_zero(desk: Desk) -> None:
    available = await desk.value("select available from variants where sku = 'CMP-11-RST'")
    too_many = [{"sku": "CMP-11-RST", "quantity": available + 2}]
    assert await desk.refused("modify_order_items", **PENDING, changes=too_many) == "out_of_stock"
    all_of_it = [{"sku": "CMP-11-RST", "quantity": min(available + 1, 99)}]
    order = await desk.call("modify_order_items", **PENDING, changes=all_of_it)
    assert order.total == order.net_paid
    assert await desk.value("select available from variants where sku = 'CMP-11-RST'") == 0


async def test_a_change_happens_as_a_whole_or_not_at_all(desk: Desk) -> None:
    changes = [{"sku": "SHT-01-SND-XL", "quantity": 0}, {"sku": "COK-05-NVY-MD", "quantity": 99}]
    both = {"customer_id": "C1240", "order_id": "W101971"}
    assert await desk.refused("modify_order_items", **both, changes=changes) == "out_of_stock"
    assert len((await desk.call("get_order", order_id="W101971")).items) == 3


async def test_items_are_swapped_only_within_their_product_and_not_all_removed(desk: Desk) -> None:
    other = [{"sku": "CMP-11-RST", "new_sku": BOOTS}]
    assert await desk.refused("modify_order_items", **PENDING, changes=other) == "different_product"
    nothing_left = [{"sku": "CMP-11-RST", "quantity": 0}]
    assert await desk.refused("modify_order_items", **PENDING, changes=nothing_left) == "order_would_be_empty"
    unknown = [{"sku": BOOTS, "quantity": 2}]
    assert await desk.refused("modify_order_items", **PENDING, changes=unknown) == "sku_not_in_order"


async def test_a_discounted_order_can_not_shrink_below_its_coupons_minimum(desk: Desk) -> None:
    only_the_notebook = [{"sku": "BOT-03-WHT-07", "quantity": 0}]  # 27.99 left, JANUARY20 needs 80
    code = await desk.refused("modify_order_items", customer_id="C1386", order_id="W101961", changes=only_the_notebook)
    assert code == "coupon_minimum_not_met"


async def test_coupons_are_refused_for_their_reason(desk: Desk) -> None:
    refusals = {
        "NOPE": "coupon_invalid",
        "VIP40": "coupon_invalid",  # withdrawn
        "FRIDAY25": "coupon_not_current",
        "SPRING26": "coupon_not_current",
        "BIG50": "coupon_minimum_not_met",
        "COZYHOME": "coupon_minimum_not_met",  # bedding only
    }
    for code, refusal in refusals.items():
        assert await desk.refused("apply_coupon", **PENDING, code=code) == refusal
    order = await desk.call("apply_coupon", **PENDING, code="january20")
    assert (order.discount, order.total, order.net_paid) == (26.79, 107.2, 107.2)
    assert await desk.refused("apply_coupon", **PENDING, code="TAKE15") == "coupon_already_applied"
    order = await desk.call("remove_coupon", **PENDING)
    assert (order.discount, order.total, order.net_paid) == (0, 133.99, 133.99)
    await desk.call("apply_coupon", **PENDING, code="JANUARY20")
    await desk.verify("C1044")
    again = await desk.refused(
        "place_order",
        customer_id="C1044",
        items=[{"sku": BOOTS, "quantity": 1}],
        address_id=(await desk.call("get_customer", customer_id="C1044")).addresses[0].address_id,
        payment_method_id=(await desk.call("get_customer", customer_id="C1044")).payment_methods[0].payment_method_id,
        coupon_code="JANUARY20",
    )
    assert again == "coupon_already_used"


async def test_an_address_or_payment_method_of_someone_else_is_refused(desk: Desk) -> None:
    await desk.verify("C1044")
    assert await desk.refused("change_shipping_address", **PENDING, address_id="A7313") == "address_not_owned"
    assert (
        await desk.refused("change_payment_method", **PENDING, payment_method_id="PM3433") == "payment_method_not_owned"
    )


async def test_a_parcel_is_not_redirected_to_another_country(desk: Desk) -> None:
    customer, order = "C1433", "W101947"
    await desk.verify(customer)
    address = await desk.call(
        "add_address", customer_id=customer, label="Cabin", line1="1 Vine Street", city="Banff", region="AB",
        postal_code="T1L 1A1", country="CA",
    )  # fmt: skip
    code = await desk.refused(
        "change_shipping_address", customer_id=customer, order_id=order, address_id=address.address_id
    )
    assert code == "other_country"


async def test_a_gift_card_must_hold_the_whole_total(desk: Desk) -> None:
    await desk.verify("C1436")  # the card holds 9.10, the order costs 339.97
    code = await desk.refused(
        "change_payment_method", customer_id="C1436", order_id="W101985", payment_method_id="PM3780"
    )
    assert code == "insufficient_balance"
    assert await desk.value("select balance_cents from payment_methods where id = 3780") == 910


async def test_an_expired_card_is_not_charged(desk: Desk) -> None:
    await desk.verify("C1241")
    desk.clock = Clock(NOW.replace(year=2027, month=6))
    await desk.verify("C1241")
    code = await desk.refused(
        "place_order",
        customer_id="C1241",
        items=[{"sku": BOOTS, "quantity": 1}],
        address_id="A7313",
        payment_method_id="PM3433",
    )
    assert code == "card_expired"


async def test_a_return_needs_a_delivered_order_and_thirty_days(desk: Desk) -> None:
    one = {"reason": "wrong_size", "refund_to": "store_credit"}
    for both, sku, refusal in (
        (PENDING, "CMP-11-RST", "order_not_delivered"),
        (SHIPPED, "CMP-11-RST", "order_not_delivered"),
        (LATE, "SMH-02-WHT", "return_window_over"),
    ):
        await desk.verify(both["customer_id"])
        assert await desk.refused("return_items", **both, items=[{"sku": sku, "quantity": 1}], **one) == refusal


async def test_the_last_day_of_the_window_is_inside_it(desk: Desk) -> None:
    delivered = await desk.value("select max(delivered_at) from shipments where order_id = 101494")
    one = {"items": [{"sku": BOOTS, "quantity": 1}], "reason": "wrong_size", "refund_to": "PM3433"}
    desk.clock = Clock(delivered + timedelta(days=30, seconds=1))
    await desk.verify("C1241")
    assert await desk.refused("return_items", **DELIVERED, **one) == "return_window_over"
    desk.clock = Clock(delivered + timedelta(days=30))
    assert (await desk.call("return_items", **DELIVERED, **one)).status == "requested"


async def test_a_unit_comes_back_once(desk: Desk) -> None:
    await desk.verify("C1241")
    one = {"items": [{"sku": BOOTS, "quantity": 1}], "reason": "wrong_size", "refund_to": "PM3433"}
    back = await desk.call("return_items", **DELIVERED, **one)
    assert (back.label_fee, back.refund_due) == (6.95, 174.55)
    assert await desk.refused("return_items", **DELIVERED, **one) == "already_returned"
    assert await desk.refused("exchange_item", **DELIVERED, sku=BOOTS, new_sku=BOOTS, reason="defective") == (
        "already_returned"
    )
    await desk.call("cancel_return", customer_id="C1241", return_id=back.return_id)
    assert (await desk.call("return_items", **DELIVERED, **one)).status == "requested"


async def test_a_final_sale_item_comes_back_only_for_our_fault(desk: Desk) -> None:
    both = {"customer_id": "C1296", "order_id": "W101512"}
    await desk.verify("C1296")
    one = {"items": [{"sku": "JKT-11-CHR-XL", "quantity": 1}], "refund_to": "PM3534"}
    assert await desk.refused("return_items", **both, **one, reason="wrong_size") == "final_sale"
    assert (await desk.call("return_items", **both, **one, reason="defective")).label_fee == 0


async def test_a_refund_goes_only_to_what_paid_or_to_store_credit(desk: Desk) -> None:
    await desk.verify("C1241")
    one = {"items": [{"sku": BOOTS, "quantity": 1}], "reason": "wrong_size"}
    assert await desk.refused("return_items", **DELIVERED, **one, refund_to="PM3434") == "refund_method_not_allowed"
    assert await desk.refused("return_items", **DELIVERED, **one, refund_to="PM3577") == "payment_method_not_owned"
    back = await desk.call("return_items", **DELIVERED, **one, refund_to="store_credit")
    assert await desk.value("select kind::text from payment_methods where id = :id", id=int(back.refund_to[2:])) == (
        "store_credit"
    )


async def test_a_refund_waits_for_the_parcel_and_is_paid_once(desk: Desk) -> None:
    await desk.verify("C1298")  # requested, not received
    assert await desk.refused("issue_refund", customer_id="C1298", return_id="R40166") == "return_not_received"
    await desk.verify("C1412")
    paid = await desk.call("issue_refund", customer_id="C1412", return_id="R40158")
    assert (paid.amount, paid.payment_method_id) == (19.18, "PM3739")
    assert await desk.refused("issue_refund", customer_id="C1412", return_id="R40158") == "return_not_received"


async def test_refunds_never_exceed_what_was_paid(desk: Desk) -> None:
    """Order W101599: paid 40.90 by gift card, lost on its way."""
    both = {"customer_id": "C1436", "order_id": "W101599", "refund_to": "PM3780", "note": "lost"}
    await desk.verify("C1436")
    assert await desk.refused("issue_goodwill_credit", **both, amount=40.91) == "refund_exceeds_payment"
    await desk.call("issue_goodwill_credit", **both, amount=40.90)
    assert await desk.refused("issue_goodwill_credit", **both, amount=0.01) == "refund_exceeds_payment"
    assert await desk.value("select balance_cents from payment_methods where id = 3780") == 910 + 4090


async def test_goodwill_is_limited_per_order(desk: Desk) -> None:
    await desk.verify("C1076")
    both = {**SHIPPED, "refund_to": "store_credit", "note": "lost"}
    assert await desk.refused("issue_goodwill_credit", **both, amount=50.01) == "goodwill_limit"
    await desk.call("issue_goodwill_credit", **both, amount=30)
    assert await desk.refused("issue_goodwill_credit", **both, amount=20.01) == "goodwill_limit"
    for amount in (0, -5, 1.005, float("nan"), float("inf")):
        assert await desk.refused("issue_goodwill_credit", **both, amount=amount) == "invalid_amount"


async def test_an_exchange_is_within_the_product_and_in_stock(desk: Desk) -> None:
    both = {"customer_id": "C1067", "order_id": "W101506", "sku": "KNT-09-SKY-XL", "reason": "wrong_size"}
    await desk.verify("C1067")
    assert await desk.refused("exchange_item", **both, new_sku="KNT-09-SKY-XL") == "nothing_to_change"
    assert await desk.refused("exchange_item", **both, new_sku=BOOTS) == "different_product"
    assert await desk.refused("exchange_item", **both, new_sku="KNT-09-SKY-L", quantity=2) == "too_many_units"
    await desk.db.exec_driver_sql("update variants set on_hand = reserved where sku = 'KNT-09-SKY-L'")
    assert await desk.refused("exchange_item", **both, new_sku="KNT-09-SKY-L") == "out_of_stock"


async def test_tickets_are_not_doubled_and_escalated_ones_are_their_teams(desk: Desk) -> None:
    about = {**SHIPPED, "category": "delivery", "subject": "Where is it?", "message": "It never came."}
    ticket = await desk.call("open_ticket", **about)
    assert await desk.refused("open_ticket", **about) == "ticket_exists"
    ticket = await desk.call("add_ticket_note", ticket_id=ticket.ticket_id, note="We are looking for it.")
    assert ticket.status == "waiting_for_customer"
    escalation = {"ticket_id": ticket.ticket_id, "team": "logistics", "reason": "Please trace it."}
    ticket = await desk.call("escalate_ticket", **escalation)
    assert (ticket.status, ticket.team) == ("escalated", "logistics")
    assert await desk.refused("escalate_ticket", **escalation) == "already_escalated"
    assert await desk.refused("resolve_ticket", ticket_id=ticket.ticket_id, resolution="Found.") == "ticket_escalated"
    assert await desk.refused("add_ticket_note", ticket_id="T9001", note="Hello?") == "ticket_resolved"


async def test_an_email_belongs_to_one_account(desk: Desk) -> None:
    await desk.verify("C1241")
    taken = await desk.refused("update_contact", customer_id="C1241", email="Hanna.OBrien2@example.com")
    assert taken == "email_in_use"
    assert await desk.refused("update_contact", customer_id="C1241", email="no address") == "invalid_email"
    changed = await desk.call("update_contact", customer_id="C1241", email="emeka@example.com")
    assert changed.email == "emeka@example.com"


async def test_people_with_one_name_are_told_apart(desk: Desk) -> None:
    both = await desk.call("find_customer", last_name="o'brien", first_name="HANNA")
    assert [found.customer_id for found in both] == ["C1027", "C1319"]
    one = await desk.call("find_customer", last_name="O'Brien", postal_code="68140")
    assert [found.customer_id for found in one] == ["C1319"]
    assert await desk.refused("find_customer", first_name="Hanna") == "too_vague"


async def test_search_finds_by_words_category_price_and_stock(desk: Desk) -> None:
    jackets = await desk.call("search_products", query="coastline jacket")
    assert "Coastline Rain Jacket" in [found.name for found in jackets]
    assert await desk.call("search_products", query="coastline submarine") == []
    cheap = await desk.call("search_products", category="Candles", max_price=15, in_stock_only=True, limit=50)
    assert all(found.price_from <= 15 and found.available > 0 for found in cheap)
    assert await desk.refused("search_products", category="Cars") == "category_not_found"
    assert len(await desk.call("list_categories")) == 25


async def test_an_id_of_another_kind_is_named_in_the_refusal(desk: Desk) -> None:
    assert await desk.refused("get_order", order_id="C1044") == "invalid_order_id"
    assert await desk.refused("get_order", order_id="99999999999999") == "invalid_order_id"
    assert await desk.refused("get_order", order_id="W999999") == "order_not_found"
    assert (await desk.call("get_order", order_id=" #w102000 ")).order_id == "W102000"
    assert await desk.refused("track_shipment") == "one_argument_needed"


async def test_a_lost_parcel_is_seen_as_late(desk: Desk) -> None:
    (tracking,) = await desk.call("track_shipment", order_id="W101700")
    assert (tracking.parcel.status, tracking.late, tracking.events[-1].status) == ("lost", True, "lost")
    (same,) = await desk.call("track_shipment", tracking_number=tracking.parcel.tracking_number.lower())
    assert same.order_id == "W101700"
    assert await desk.call("track_shipment", order_id="W102000") == []

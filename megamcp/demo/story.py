"""What happens in the demo: an agent works, its state is kept, four futures leave from there, one is taken back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import mcp
from rich.text import Text

from megamcp import types as t
from megamcp.cli import show
from megamcp.client import Checkpoint, Client, Rollout
from megamcp.demo.narrator import Narrator, Part, not_as_claimed
from megamcp.tree import Forest, draw

DIFF_LINES = 6
COUPON = "TAKE15"
CASE = """
select o.id, o.customer_id, c.email, c.first_name, c.last_name, a.postal_code, p.id as other_method
from orders o
join customers c on c.id = o.customer_id
join addresses a on a.id = o.address_id
join payment_methods p on p.customer_id = o.customer_id and p.kind = 'paypal' and p.id <> o.payment_method_id
where o.status = 'pending' and o.subtotal_cents >= 9000
  and not exists (select from coupon_redemptions r where r.customer_id = o.customer_id)
  and not exists (select from tickets k where k.customer_id = o.customer_id)
order by o.id limit 1
"""


@dataclass(frozen=True, slots=True)
class Case:
    """The customer that calls today: found with SQL, as an evaluator would."""

    order_id: str
    customer_id: str
    email: str
    name: str
    postal_code: str
    other_method: str


@dataclass(frozen=True, slots=True)
class Ending:
    """One way to go on from the checkpoint."""

    letter: str
    title: str
    go: Callable[["Hands", Case], Awaitable[None]]


class Hands:
    """An agent's hands: an MCP client on one rollout's URL. Remembers what it did, for the telling."""

    def __init__(self, agent: mcp.Client) -> None:
        self._agent = agent
        self.done: list[tuple[Part, ...]] = []

    async def use(self, tool: str, outcome: Callable[[dict[str, Any]], str], /, **arguments: Any) -> dict[str, Any]:
        """Call a tool; a refusal ends the demo."""
        result = await self._agent.call_tool(tool, arguments)
        answer: dict[str, Any] = result.structured_content
        if result.is_error:
            raise not_as_claimed(f"{tool} refused: {answer}")
        given = ", ".join(show.value(value) for value in arguments.values())
        self.done.append(
            (
                ("→ ", "cyan"),
                (tool, "bold"),
                (f"({given[:34]}{'…' if len(given) > 34 else ''})", "dim"),
                f"  {outcome(answer)}",
            )
        )
        return answer

    async def order(self, case: Case) -> dict[str, Any]:
        """The order as this agent sees it now."""
        return await self.use("get_order", _describe, order_id=case.order_id)


async def _cancel(hands: Hands, case: Case) -> None:
    await hands.use(
        "cancel_order",
        lambda o: f"{o['status']}, ${_refunded(o):.2f} refunded",
        customer_id=case.customer_id,
        order_id=case.order_id,
        reason="found_cheaper",
    )


async def _discount(hands: Hands, case: Case) -> None:
    await hands.use(
        "apply_coupon",
        lambda o: f"total ${o['total']:.2f}, ${o['discount']:.2f} less",
        customer_id=case.customer_id,
        order_id=case.order_id,
        code=COUPON,
    )


async def _pay_otherwise(hands: Hands, case: Case) -> None:
    await hands.use(
        "change_payment_method",
        lambda o: f"now paid by {o['payment_method']['label']}",
        customer_id=case.customer_id,
        order_id=case.order_id,
        payment_method_id=case.other_method,
    )


async def _escalate(hands: Hands, case: Case) -> None:
    ticket = await hands.use(
        "open_ticket",
        lambda k: f"{k['ticket_id']} is {k['status']}",
        customer_id=case.customer_id,
        category="order",
        subject="Customer found it cheaper",
        message="They ask us to match the price.",
        order_id=case.order_id,
    )
    await hands.use(
        "escalate_ticket",
        lambda k: f"{k['status']} to {k['team']}",
        ticket_id=ticket["ticket_id"],
        team="supervisor",
        reason="Price match is not ours to give.",
    )


ENDINGS = (
    Ending("A", "cancels the order", _cancel),
    Ending("B", "gives a discount", _discount),
    Ending("C", "changes the payment", _pay_otherwise),
    Ending("D", "asks a supervisor", _escalate),
)


class Story:
    """The demo on a gateway. Releases what it opened."""

    def __init__(self, tell: Narrator, client: Client) -> None:
        self._tell = tell
        self._client = client

    async def play(self) -> None:
        """All of it. Raises `MegaMCPError` at the first claim that does not hold."""
        async with contextlib.AsyncExitStack() as stack:
            rollout = await self._open(stack)
            case = await self._case(rollout)
            await self._work(stack, rollout, case)
            point = await self._keep(rollout)
            forks = await self._fork(stack, point, case)
            await self._compare(rollout, point, forks, case)
            future = await self._take_back(point, forks, case)
            await self._draw(rollout, [point, future], [fork for fork, _ in forks])
            self._tell.waiting("Releasing the rollouts …")

    async def _open(self, stack: contextlib.AsyncExitStack) -> Rollout:
        self._tell.step("A rollout: one agent's own state of the store, behind one URL")
        rollout = await self._client.open("retail", labels={"demo": "root"}, ttl_s=600)
        await stack.enter_async_context(rollout)
        environment = await self._client.environment(rollout.environment)
        tables = sum(len(server.tables) for server in environment.servers)
        self._tell.say(
            f"environment {environment.name}: {tables} tables, and it is always {environment.clock:%d %B %Y} there"
        )
        self._tell.say((rollout.url, "cyan"))
        return rollout

    async def _case(self, rollout: Rollout) -> Case:
        found = await rollout.query(CASE)
        if not found.rows:
            raise not_as_claimed("the store has no order that fits the story")
        row = dict(zip(found.columns, found.rows[0], strict=True))
        return Case(
            order_id=f"W{row['id']}",
            customer_id=f"C{row['customer_id']}",
            email=row["email"],
            name=f"{row['first_name']} {row['last_name']}",
            postal_code=row["postal_code"],
            other_method=f"PM{row['other_method']}",
        )

    async def _work(self, stack: contextlib.AsyncExitStack, rollout: Rollout, case: Case) -> None:
        self._tell.step("An agent (the official mcp SDK) connects and goes to work")
        agent = await stack.enter_async_context(mcp.Client(rollout.url))
        tools = (await agent.list_tools()).tools
        hands = Hands(agent)
        self._tell.say(
            f"protocol {agent.protocol_version}, {len(tools)} tools: ", (", ".join(x.name for x in tools), "dim")
        )
        self._tell.say(f"“This is {case.name}. I found my order {case.order_id} cheaper elsewhere.”")
        await hands.use("find_customer", lambda found: _found(found, case), email=case.email)
        await hands.order(case)
        proof = await hands.use(
            "verify_customer",
            lambda check: "verified, and written down" if check["verified"] else "not verified",
            customer_id=case.customer_id,
            proof="postal_code",
            value=case.postal_code,
        )
        self._recount(hands)
        self._tell.claim("the agent read and wrote through plain MCP", len(tools) > 0 and bool(proof["verified"]))

    async def _keep(self, rollout: Rollout) -> Checkpoint:
        self._tell.step("A checkpoint: everything up to here, kept")
        point = await rollout.checkpoint("verified")
        self._diff(await rollout.diff("base", point))
        self._tell.say(f"turn {point.turn}, digest ", (show.short(point.digest), "magenta"), (f"  {point.id}", "dim"))
        return point

    async def _fork(
        self, stack: contextlib.AsyncExitStack, point: Checkpoint, case: Case
    ) -> list[tuple[Rollout, Hands]]:
        self._tell.step("Four forks, four agents at once, four ways to go on")
        forks = await point.fork(count=len(ENDINGS), labels={"demo": "fork"}, ttl_s=600)
        agents: list[tuple[Rollout, Hands]] = []
        for fork in forks:
            await stack.enter_async_context(fork)
            agents.append((fork, Hands(await stack.enter_async_context(mcp.Client(fork.url)))))
        self._tell.waiting("Four agents at work …")
        await asyncio.gather(*(ending.go(hands, case) for ending, (_, hands) in zip(ENDINGS, agents, strict=True)))
        for ending, (fork, hands) in zip(ENDINGS, agents, strict=True):
            self._tell.say((f"{ending.letter} ", "bold magenta"), (ending.title, "bold"))
            self._recount(hands)
            self._diff(await fork.diff(point))
        return agents

    async def _compare(
        self, rollout: Rollout, point: Checkpoint, forks: list[tuple[Rollout, Hands]], case: Case
    ) -> None:
        self._tell.step("Nobody sees anybody else")
        seen = await asyncio.gather(*(hands.order(case) for _, hands in forks))
        for ending, order in zip(ENDINGS, seen, strict=True):
            self._tell.say((f"{ending.letter} ", "bold magenta"), f"sees {_describe(order)}")
        methods = [order["payment_method"]["payment_method_id"] for order in seen]
        own = (
            [order["status"] for order in seen] == ["cancelled", "pending", "pending", "pending"]
            and [order["discount"] > 0 for order in seen] == [False, True, False, False]
            and [method == case.other_method for method in methods] == [False, False, True, False]
        )
        self._tell.claim("each fork holds its own change and no other's", own)
        digests = [(await fork.digest()).digest for fork, _ in forks]
        self._tell.claim("four states, four digests", len({*digests, point.digest}) == len(digests) + 1)
        untouched = (await rollout.digest()).digest
        self._tell.claim("the rollout that they came from is untouched", untouched == point.digest, str(untouched))

    async def _take_back(self, point: Checkpoint, forks: list[tuple[Rollout, Hands]], case: Case) -> Checkpoint:
        self._tell.step("A is rolled back")
        (fork, hands), *others = forks
        future = await fork.checkpoint("cancelled")  # kept, so that it could be forked later
        before = [(await other.digest()).digest for other, _ in others]
        await fork.rollback(point)
        after = (await fork.digest()).digest
        shown = [(show.short(digest), "magenta") for digest in (future.digest, after, point.digest)]
        self._tell.say("digest before ", shown[0], ", after ", shown[1], ", of the checkpoint ", shown[2])
        self._tell.claim("the digest is the checkpoint's again", after == point.digest, f"{after} ≠ {point.digest}")
        left = (await fork.diff(point)).servers
        self._tell.claim("not one row differs", not left, str(sorted(left)))
        order = await hands.order(case)
        self._tell.claim("its agent, still connected, sees the order pending", order["status"] == "pending")
        now = [(await other.digest()).digest for other, _ in others]
        self._tell.claim("B, C and D noticed nothing", now == before)
        return future

    async def _draw(self, rollout: Rollout, points: list[Checkpoint], forks: list[Rollout]) -> None:
        self._tell.step("How it hangs together")
        names = {fork.id: f"{ending.letter} {ending.title}" for fork, ending in zip(forks, ENDINGS, strict=True)}
        names[rollout.id] = "rollout"
        everyone = [await one.refresh() for one in (rollout, *forks)]
        forest = Forest(tuple(one.view for one in everyone), tuple(point.view for point in points))

        def name(thing: t.Rollout | t.Checkpoint) -> str:
            return names.get(thing.id, "checkpoint")

        self._tell.show(draw(forest, name=name))
        self._tell.show(Text())

    def _recount(self, hands: Hands) -> None:
        for parts in hands.done:
            self._tell.say(*parts)
        hands.done.clear()

    def _diff(self, diff: t.Diff) -> None:
        tables = [(name, rows) for server in diff.servers.values() for name, rows in sorted(server.tables.items())]
        lines = [line for name, rows in tables for line in show.row_lines(rows, name)]
        for line in lines[:DIFF_LINES]:
            self._tell.say("  ", line)
        if len(lines) > DIFF_LINES:
            self._tell.say((f"  … {len(lines) - DIFF_LINES} more rows", "dim"))


def _describe(order: dict[str, Any]) -> str:
    discount = f", ${order['discount']:.2f} off" if order["discount"] else ""
    return f"{order['order_id']} {order['status']}, ${order['total']:.2f}{discount}, {order['payment_method']['label']}"


def _refunded(order: dict[str, Any]) -> float:
    return sum(float(move["amount"]) for move in order["money"] if move["kind"] == "refund")


def _found(found: dict[str, Any], case: Case) -> str:
    rows = found["result"]
    return f"{rows[0]['customer_id']} {rows[0]['name']}" if rows else f"nobody called {case.name}"

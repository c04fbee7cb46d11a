"""Calls on a clone through the tool servers' SDK, unchanged: exactly once."""

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from sqlalchemy import text

from megamcp.errors import DeadlineExceeded
from megamcp.handles import Mode, fingerprint
from megamcp.sdk.calls import Call, run_recorded
from megamcp.sdk.database import Database as Pool
from megamcp.sdk.results import CallRefused, Outcome
from megamcp.state.clones import Cluster
from tests.integration.clones.conftest import SIGNER, Database, World

DDL = "create table account (id int primary key, balance int not null check (balance >= 0))"
SEED = "insert into account values (1, 10), (2, 0)"
OK = Outcome(b'{"content":[]}', False)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def source(cluster: Cluster) -> AsyncIterator[str]:
    world = World(cluster)
    yield await world.source(DDL, SEED)
    await world.close()


@pytest_asyncio.fixture(loop_scope="session")
async def bank(world: World, source: str) -> Database:
    return await world.clone(source)


@pytest_asyncio.fixture(loop_scope="session")
async def pool(bank: Database) -> AsyncIterator[Pool]:
    pool = Pool(bank.cluster.dsn_for(bank.name, bank.login, bank.password), 4)
    yield pool
    await pool.aclose()


def add(amount: int, account: int = 1) -> Callable[..., Awaitable[Outcome]]:
    async def body(lease: Any, _clock: Any, _random: Any) -> Outcome:
        await lease.db.execute(text(f"update account set balance = balance + {amount} where id = {account}"))
        return OK

    return body


async def balance(bank: Database) -> int:
    found: int = await bank.user.fetchval("select balance from account where id = 1")
    return found


def call(handle: str, *, read_only: bool = False) -> Call:
    return Call(handle, "add", "{}", read_only)


async def test_a_call_and_its_record_are_one_transaction(bank: Database, pool: Pool) -> None:
    key = {"idempotency_key": "k", "request": fingerprint("shop", "add", b"{}")}
    for _ in range(3):
        assert (await run_recorded(pool, call(bank.handle(**key)), add(1))).text == OK.text
    assert await balance(bank) == 11
    async with bank.hold() as inside:
        rows = await inside.calls(0)
    assert [(row.tool, row.outcome, row.idempotency_key, row.server) for row in rows] == [("add", "done", "k", "shop")]
    with pytest.raises(CallRefused) as refused:
        await run_recorded(pool, call(bank.handle(idempotency_key="k", request=b"other")), add(1))
    assert refused.value.code == "idempotency_key_reused"


async def test_a_handle_is_good_for_one_call(bank: Database, pool: Pool) -> None:
    handle = bank.handle()
    await run_recorded(pool, call(handle), add(1))
    with pytest.raises(CallRefused) as refused:
        await run_recorded(pool, call(handle), add(1))
    assert refused.value.code == "handle_replayed"
    assert await balance(bank) == 11


@pytest.mark.parametrize("field", ["rollout", "server", "epoch", "mac", "mode", "expired"])
async def test_a_handle_that_is_not_for_this_database_is_refused(bank: Database, pool: Pool, field: str) -> None:
    code = "handle_foreign"
    given: dict[str, Any] = {"rollout": bank.rollout, "server": "shop", "epoch": 1, "mode": Mode.WRITE}
    match field:
        case "epoch":
            given["epoch"], code = 2, "rolled_back"
        case "mode":
            given["mode"], code = Mode.QUERY, "handle_forged"
        case "rollout" | "server":
            given[field] = "other"
        case _:
            pass
    handle = SIGNER.mint(**given, deadline=1.0 if field == "expired" else 4e9)
    if field == "mac":
        handle, code = handle[:-4] + "0000", "handle_forged"
    if field == "expired":
        code = "handle_expired"
    with pytest.raises(CallRefused) as refused:
        await run_recorded(pool, call(handle), add(1))
    assert refused.value.code == code
    assert await balance(bank) == 10


async def test_a_tool_that_fails_is_rolled_back_and_recorded(bank: Database, pool: Pool) -> None:
    async def body(lease: Any, _clock: Any, _random: Any) -> Outcome:
        await lease.db.execute(text("update account set balance = 0"))
        return Outcome(b'{"isError":true,"content":[]}', True)

    assert (await run_recorded(pool, call(bank.handle()), body)).is_error
    assert await balance(bank) == 10
    async with bank.hold() as inside:
        assert [(row.outcome, row.is_error) for row in await inside.calls(0)] == [("done", True)]


async def test_a_tool_that_commits_changes_nothing(bank: Database, pool: Pool) -> None:
    async def body(lease: Any, _clock: Any, _random: Any) -> Outcome:
        await lease.driver.execute("update account set balance = 99")
        await lease.driver.execute("commit")
        return OK

    outcome = await run_recorded(pool, call(bank.handle()), body)
    assert outcome.is_error
    assert await balance(bank) == 10
    async with bank.hold() as inside:
        assert [(row.outcome, row.is_error) for row in await inside.calls(0)] == [("failed", True)]


async def test_reads_run_beside_each_other_and_change_nothing(bank: Database, pool: Pool) -> None:
    together = asyncio.Barrier(2)

    async def body(lease: Any, _clock: Any, _random: Any) -> Outcome:
        await together.wait()
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            await lease.driver.execute("update account set balance = 99")
        return OK

    async with asyncio.timeout(10):
        await asyncio.gather(
            *(run_recorded(pool, call(bank.handle(Mode.READ), read_only=True), body) for _ in range(2))
        )
    assert await balance(bank) == 10
    async with bank.hold() as inside:
        assert [row.mode for row in await inside.calls(0)] == ["r", "r"]


async def test_writes_run_one_after_another(bank: Database, pool: Pool) -> None:
    inside = 0

    async def body(lease: Any, _clock: Any, _random: Any) -> Outcome:
        nonlocal inside
        inside += 1
        assert inside == 1
        await lease.db.execute(text("update account set balance = balance + 1 where id = 1"))
        inside -= 1
        return OK

    await asyncio.gather(*(run_recorded(pool, call(bank.handle()), body) for _ in range(4)))
    assert await balance(bank) == 14


async def test_a_call_that_waits_too_long_is_refused(bank: Database, pool: Pool) -> None:
    async with bank.hold():
        with pytest.raises(CallRefused) as refused:
            await run_recorded(pool, call(bank.handle(seconds=1)), add(1))
    assert refused.value.code == "deadline_exceeded"


async def test_a_call_is_found_and_ended_whatever_it_calls_itself(bank: Database, pool: Pool) -> None:
    nonce, began = uuid.uuid4(), asyncio.Event()

    async def body(lease: Any, _clock: Any, _random: Any) -> Outcome:
        await lease.driver.execute("set application_name = 'somebody else'; set transaction_timeout = 0")
        await lease.driver.execute("update account set balance = 99")
        began.set()
        await lease.driver.execute("select pg_sleep(60)")
        return OK

    handle = bank.handle(nonce=nonce)
    task = asyncio.create_task(run_recorded(pool, call(handle), body))
    await began.wait()
    async with bank.cluster.inside(bank.name) as inside:
        await inside.tell([nonce], "It took too long.")
        assert await inside.end_call(nonce)
        outcome = await task
        assert (b"It took too long." in outcome.text.encode(), outcome.is_error) == (True, True)
        assert not await inside.end_call(nonce)
        assert [row.outcome for row in await inside.calls(0)] == ["failed"]
    assert await balance(bank) == 10


async def test_on_busy_is_told_which_call_is_ended(bank: Database, pool: Pool) -> None:
    nonce, began, told = uuid.uuid4(), asyncio.Event(), []

    async def body(lease: Any, _clock: Any, _random: Any) -> Outcome:
        await lease.driver.execute("update account set balance = 99")
        began.set()
        await lease.driver.execute("select pg_sleep(60)")
        return OK

    async def busy(calls: list[str]) -> None:
        told.extend(calls)
        async with bank.cluster.inside(bank.name) as inside:
            await inside.tell(calls, "The rollout moves.")

    task = asyncio.create_task(run_recorded(pool, call(bank.handle(nonce=nonce)), body))
    await began.wait()
    async with bank.hold(patience_s=0.05, on_busy=busy) as inside:
        await inside.bind(bank.rollout, "shop", 2)
    assert told == [str(nonce)]
    assert b"The rollout moves." in (await task).text.encode()
    with pytest.raises(CallRefused) as refused:
        await run_recorded(pool, call(bank.handle(epoch=1)), add(1))
    assert refused.value.code == "rolled_back"


async def test_keys_belong_to_the_path(bank: Database, pool: Pool) -> None:
    async def once(key: str) -> bool:
        before = await balance(bank)
        await run_recorded(pool, call(bank.handle(idempotency_key=key)), add(1))
        return await balance(bank) > before

    assert await once("early")
    first = await bank.mark()
    assert await once("late")
    second = await bank.mark()
    await bank.rewind(first.position)
    assert await balance(bank) == 11
    assert not await once("early")  # it was used before the mark
    assert await once("late")  # it was used after it, which never was
    await bank.rewind(second.position)
    assert not await once("late")


async def test_a_fork_does_not_inherit_keys_and_its_calls_are_its_own(world: World, bank: Database, pool: Pool) -> None:
    await run_recorded(pool, call(bank.handle(idempotency_key="k")), add(1))
    async with bank.hold() as inside:
        known = (await inside.mark()).call
    fork = await world.clone(bank.name)
    other = Pool(fork.cluster.dsn_for(fork.name, fork.login, fork.password), 1)
    await run_recorded(other, call(fork.handle(idempotency_key="k")), add(1))
    await other.aclose()
    assert await fork.user.fetchval("select balance from account where id = 1") == 12
    async with fork.hold() as inside:
        assert [row.rollout for row in await inside.calls(known)] == [fork.rollout]


async def test_a_query_is_read_only_and_waits_for_writers(bank: Database) -> None:
    async with bank.user.transaction():
        await bank.user.execute("select megamcp.query_begin($1)", bank.handle(Mode.QUERY))
        await bank.user.execute("set transaction read only")
        with pytest.raises(asyncpg.PostgresError):
            async with bank.user.transaction():
                await bank.user.execute("set transaction read write")
        assert await bank.user.fetchval("select sum(balance) from account") == 10


async def test_enter_and_leave_hold_movers_off(bank: Database) -> None:
    await bank.user.execute("select megamcp.enter('way in')")
    moved = asyncio.Event()

    async def mover() -> None:
        async with bank.hold(patience_s=20):
            moved.set()

    task = asyncio.create_task(mover())
    await bank.user.execute("insert into account values (3, 3)")
    assert not moved.is_set()
    await bank.user.execute("select megamcp.leave('way in')")
    await task
    await bank.user.execute("select megamcp.leave('way in')")  # once too often does no harm


LEAVING = (
    "select megamcp.leave('a guess')",
    "select megamcp.leave(null)",
    "select megamcp.enter('mine'), megamcp.leave('mine'), megamcp.leave('mine'), megamcp.leave('mine')",
    "select megamcp.leave(int8send((classid::bigint << 32) | objid::bigint)) from pg_locks where locktype = 'advisory'",
    "do $$ begin perform megamcp.leave('a guess'); exception when others then null; end $$",
    "select pg_advisory_unlock_all()",
    "savepoint a; select megamcp.leave('a guess'); rollback to a",
)


@pytest.mark.parametrize("attempt", LEAVING)
async def test_nobody_opens_the_gate_who_did_not_close_it(bank: Database, attempt: str) -> None:
    proof = secrets.token_bytes(16)
    await bank.user.fetchval("select megamcp.enter($1)", proof)
    async with bank.user.transaction():
        await bank.user.execute(attempt)
        with pytest.raises(DeadlineExceeded):
            async with bank.hold(patience_s=0.1):
                pass
    await bank.user.fetchval("select megamcp.leave($1)", proof)
    async with bank.hold(patience_s=1):
        pass


async def test_a_call_can_not_open_the_gate_of_its_own_transaction(bank: Database, pool: Pool) -> None:
    async def body(lease: Any, _clock: Any, _random: Any) -> Outcome:
        for attempt in LEAVING:
            await lease.driver.execute(attempt)
            with pytest.raises(DeadlineExceeded):
                async with bank.hold(patience_s=0.05):
                    pass
        return OK

    assert not (await run_recorded(pool, call(bank.handle()), body)).is_error


CONSTRAINED = """create table parent (id int primary key);
create table child (id int primary key, parent int references parent deferrable initially deferred)"""
IMMEDIATE = (
    "set constraints all immediate",
    "do $$ begin for n in 1..300 loop set constraints all immediate; set constraints all deferred; end loop; end $$",
    "savepoint a; set constraints all immediate; rollback to a; set constraints all immediate",
    "set constraints megamcp.call_is_over immediate",
)


@pytest.mark.parametrize("statement", IMMEDIATE)
async def test_constraints_are_checked_at_once_for_a_call_that_asks_for_it(world: World, statement: str) -> None:
    shop = await world.start(CONSTRAINED)
    pool = Pool(shop.cluster.dsn_for(shop.name, shop.login, shop.password), 1)

    async def good(lease: Any, _clock: Any, _random: Any) -> Outcome:
        await lease.driver.execute("insert into child values (1, 1); insert into parent values (1)")
        await lease.driver.execute(statement)
        return OK

    async def bad(lease: Any, _clock: Any, _random: Any) -> Outcome:
        await lease.driver.execute("insert into child values (2, 2)")
        with pytest.raises(asyncpg.ForeignKeyViolationError):
            async with lease.driver.transaction():
                await lease.driver.execute("set constraints all immediate")
        await lease.driver.execute("delete from child where id = 2")
        return OK

    assert not (await run_recorded(pool, call(shop.handle()), good)).is_error
    assert not (await run_recorded(pool, call(shop.handle()), bad)).is_error
    await pool.aclose()
    assert await shop.user.fetchval("select count(*) from child") == 1


@pytest.mark.parametrize("statement", [*IMMEDIATE, "set constraints all deferred"])
@pytest.mark.parametrize("end", ["commit", "end", "{}; commit", "commit and chain"])
async def test_no_set_constraints_lets_a_tool_commit(bank: Database, pool: Pool, statement: str, end: str) -> None:
    async def body(lease: Any, _clock: Any, _random: Any) -> Outcome:
        await lease.driver.execute("update account set balance = 99")
        await lease.driver.execute(statement)
        await lease.driver.execute(end.format(statement))
        return OK

    outcome = await run_recorded(pool, call(bank.handle()), body)
    assert outcome.is_error
    assert await balance(bank) == 10


async def test_a_client_that_did_not_enter_writes_nothing_while_the_database_is_held(bank: Database) -> None:
    async with bank.hold() as inside:
        write = asyncio.create_task(bank.user.execute("update account set balance = 77 where id = 1"))
        mark = await inside.mark()
        assert await inside.digest() == mark.digest
        assert not write.done()
    await write
    await bank.rewind(mark.position)
    assert await balance(bank) == 10

"""A binding is good for one backend and one transaction, and says what it says: tries to make, move and stretch one."""

import contextlib

import asyncpg

from megamcp.handles import Mode
from tests.integration.security.conftest import Attack, hidden, refused

READ = "select count(*) from secret"
WRITE = "insert into secret (word) values ('forged')"
BINDING = "select current_setting('megamcp.binding')"


async def _bound_to(conn: asyncpg.Connection, binding: str) -> None:
    await conn.execute("select set_config('megamcp.binding', $1, true)", binding)


async def test_without_a_binding_nothing_is_read_and_nothing_written(
    attack: Attack, tool: asyncpg.Connection, query: asyncpg.Connection
) -> None:
    for sql in (
        READ,
        WRITE,
        "select * from hint",
        "select initials()",
        "select nextval('secret_id_seq')",
        "select now()",
    ):
        await refused(tool, sql)
    await refused(query, READ)


async def test_a_binding_read_in_the_parent_does_not_open_the_fork(attack: Attack, tool: asyncpg.Connection) -> None:
    (parent,) = await attack.open()
    async with attack.call(tool, parent):
        await tool.execute("insert into secret (word) values ('of the parent')")
    point = await attack.world.checkpoint(parent)
    (fork,) = await attack.world.fork(point["id"])
    async with attack.call(tool, parent):
        await tool.execute("insert into secret (word) values ('after the fork')")
        stolen = await tool.fetchval(BINDING)
    async with attack.call(tool, fork):
        own = await tool.fetchval(BINDING)
        await _bound_to(tool, stolen)
        await refused(tool, READ)
        await refused(tool, WRITE)
        await _bound_to(tool, own)
        assert await tool.fetchval("select count(*) from secret where word = 'after the fork'") == 0


async def test_a_binding_dies_with_its_transaction(attack: Attack, tool: asyncpg.Connection) -> None:
    (mine,) = await attack.open()
    async with attack.call(tool, mine):
        binding = await tool.fetchval(BINDING)
        await tool.execute("select set_config('megamcp.binding', $1, false)", binding)  # as a session's setting
    assert await tool.fetchval(BINDING) == binding
    await refused(tool, READ)
    async with tool.transaction():
        await refused(tool, READ)
        await refused(tool, WRITE)
    await tool.execute("reset all")


async def test_a_binding_is_no_use_on_another_connection(attack: Attack, tool: asyncpg.Connection) -> None:
    (mine,) = await attack.open()
    other = await attack.login()
    async with attack.call(tool, mine):
        binding = await tool.fetchval(BINDING)
        async with other.transaction():
            await _bound_to(other, binding)
            await refused(other, READ)
    await other.close()


async def test_a_savepoint_does_not_bring_an_old_binding_back(attack: Attack, tool: asyncpg.Connection) -> None:
    mine, victim = await attack.open(2)
    async with attack.call(tool, victim):
        await tool.execute("insert into secret (word) values ('of the victim')")
    async with attack.call(tool, mine):
        savepoint = tool.transaction()
        await savepoint.start()
        await _bound_to(tool, "")
        await savepoint.rollback()
        assert await tool.fetchval("select count(*) from secret where word = 'of the victim'") == 0
        assert await tool.fetchval(READ) == 20


async def test_no_bit_of_a_binding_can_be_changed(attack: Attack, tool: asyncpg.Connection) -> None:
    mine, victim = await attack.open(2)
    head, theirs = await attack.head(mine), await attack.head(victim)
    async with attack.call(tool, mine):
        own = await tool.fetchval(BINDING)
        body, mac = own.rsplit("|", 1)
        # The bar before the MAC says nothing: both sides of it are taken by length.
        flipped = [own[:i] + chr(ord(own[i]) ^ 1) + own[i + 1 :] for i in range(len(own)) if i != len(body)]
        guessed = [
            own.replace(str(head), str(theirs)),
            body.replace("{0,", f"{{0,{theirs},") + "|" + mac,
            body.replace("|w", "|r") + "|" + mac,
            body + "|" + "0" * 64,
            body + "|",
            body,
            "|" + mac,
            mac,
            own + " ",
            own + own,
            "x" * 10_000,
        ]
        for forged in (*flipped, *guessed):
            if forged in (own, ""):
                continue
            await _bound_to(tool, forged)
            await refused(tool, "select megamcp.chain()")
        await _bound_to(tool, own)


async def test_a_reader_can_not_write(attack: Attack, tool: asyncpg.Connection, query: asyncpg.Connection) -> None:
    (mine,) = await attack.open()
    token = attack.handle(mine, Mode.READ)
    async with tool.transaction():
        await tool.fetchrow("select * from megamcp.call_begin($1, 'raw', '{}')", token)
        for sql in (
            WRITE,
            "update secret set pin = 2",
            "delete from clue",
            "select megamcp_advance_clock(5)",
            "select setval('secret_id_seq', 900)",
        ):
            await refused(tool, sql, state="25006")
        await tool.fetchval("select megamcp.call_finish($1, 'raw', '{}', '{}', false)", token)
    async with attack.query(query, mine):
        assert await query.fetchval(READ) == 20
        for sql in (WRITE, "update secret set pin = 2", "delete from clue"):
            await refused(query, sql, state=("42501", "25006"))


async def test_a_query_login_has_no_use_for_a_tools_handle_nor_the_reverse(
    attack: Attack, tool: asyncpg.Connection, query: asyncpg.Connection
) -> None:
    (mine,) = await attack.open()
    await refused(query, "select * from megamcp.call_begin($1, 'raw', '{}')", attack.handle(mine))
    await refused(tool, "select megamcp.query_begin($1)", attack.handle(mine, Mode.QUERY))


async def test_a_handle_of_another_environment_is_refused(attack: Attack, tool: asyncpg.Connection) -> None:
    (foreign,) = await attack.world.open()
    await refused(
        tool, "select * from megamcp.call_begin($1, 'raw', '{}')", attack.handle(foreign), state=("MM401", "MM404")
    )


async def test_a_counter_of_another_layer_can_not_be_written(attack: Attack, tool: asyncpg.Connection) -> None:
    """Drawn numbers wait in a setting that a tool can forge: the layer in it is never believed."""
    mine, victim = await attack.open(2)
    async with attack.call(tool, victim):
        await tool.fetchval("select nextval('secret_id_seq')")
    before = await attack.world.execute(f'select * from {attack.state.hidden_schema}."~counters" order by 1, 2')
    for layer in (0, await attack.head(victim)):
        for number in range(4):
            async with attack.call(tool, mine):
                await tool.execute(
                    "select set_config('megamcp.c' || $1::int, $2::text || ':777', true)", number, str(layer)
                )
                draws = ("select nextval('secret_id_seq')", "select random()", "select megamcp_advance_clock(1)")
                for sql in draws:
                    with contextlib.suppress(asyncpg.InsufficientPrivilegeError):
                        async with tool.transaction():
                            await tool.fetchval(sql)
                await tool.execute("select set_config('megamcp.c' || $1::int, '', true)", number)
    mine_too = await attack.head(mine)
    after = await attack.world.execute(
        f'select * from {attack.state.hidden_schema}."~counters" where layer <> $1 order by 1, 2', mine_too
    )
    assert after == before


async def test_settings_of_the_overlay_move_nothing_outside_of_the_rollout(
    attack: Attack, tool: asyncpg.Connection
) -> None:
    """A tool may spoil its own rollout by the overlay's settings, never another's rows."""
    mine, victim = await attack.open(2)
    layers = f"select * from {hidden(attack.state, 'clue')} where _mm_layer >= 0 and _mm_layer <> $1 order by 1, 3"
    own = await attack.head(mine)
    before = await attack.world.execute(layers, own)
    for name, value in (
        ("draining", "on"),
        ("queued", "on"),
        ("t1", "5"),
        ("t2", "5"),
        ("now", "0"),
        ("last", "7"),
        ("u1_0", "on"),
    ):
        async with attack.call(tool, mine):
            await tool.execute("select set_config('megamcp.' || $1, $2, true)", name, value)
            for sql in (
                "delete from secret where id = 3",
                "update clue set text = 'x'",
                "insert into clue values (99)",
            ):
                with contextlib.suppress(asyncpg.PostgresError):
                    async with tool.transaction():
                        await tool.execute(sql)
    assert await attack.world.execute(layers, own) == before
    async with attack.call(tool, victim):
        assert await tool.fetchval("select count(*) from clue") == 20
        assert await tool.fetchval("select count(*) from clue where text = 'x'") == 0

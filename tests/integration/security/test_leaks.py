"""Side doors of a read: expressions, statistics, plans, shadowing names. What holds, and what a login can still tell.

The victim holds rows that the attacker's expressions would fail on, or tell, if they ever met one.
"""

from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from tests.integration.security.conftest import Attack, refused

# Each fails with 22P02 or 22012 on a victim's row, and is fine on every row of the attacker's own.
EXPRESSIONS = (
    "select count(*) from secret where substr(word, 5)::int > 0",
    "select count(*) from secret where 1 / pin > 0",
    "select 1 / pin from secret order by word limit 1",
    "select count(*) from secret where (case when word like 'victim%' then 1 / (pin - pin) else 1 end) = 1",
    "select count(*) from secret where word = 'victim7' and 1 / pin > 0",
    "select count(*) from secret where word >= 'victim' and substr(word, 5)::int > 0",
    "select count(*) from secret s join secret t on s.word = t.word and 1 / (s.pin * t.pin) > 0",
    "select count(*) from secret where pin = any (select 1 / pin from secret)",
    "select count(*) from secret s where exists (select from clue c where c.secret_id = s.id and 1 / s.pin > 0)",
    "select sum(1 / pin) over (partition by word) from secret",
    "select max(substr(word, 5)::int) from secret group by pin having max(1 / pin) > 0",
    "select count(*) from (select * from secret offset 0) s where 1 / pin > 0",
    "with s as not materialized (select * from secret) select count(*) from s where substr(word, 5)::int > 0",
    "select count(*) from hint where id in (select id from secret where 1 / pin > 0)",
    "select count(*) from secret left join clue on clue.secret_id = secret.id and 1 / secret.pin > 0",
    "select jsonb_path_query(to_jsonb(pin), '$ ? (1 / $ > 0)') from secret",
    "update secret set pin = 1 / pin where substr(word, 5)::int > 0",
    "delete from clue using secret where 1 / secret.pin < 0",
    "merge into secret using (select 1 as one) s on 1 / pin > 5 when matched then do nothing",
    "insert into clue select 1000 + id, id, (1 / pin)::text from secret where 1 / pin > 0",
)
# The same under plans that move a filter about as far as the planner will.
PLANS = (
    "set local enable_sort = on",
    "set local enable_indexscan = off; set local enable_bitmapscan = off",
    "set local enable_seqscan = off; set local enable_bitmapscan = off",
    "set local enable_seqscan = off; set local enable_indexscan = off",
    "set local enable_hashjoin = off; set local enable_mergejoin = off; set local enable_memoize = off",
    "set local join_collapse_limit = 1; set local from_collapse_limit = 1; set local geqo_threshold = 2",
    "set local plan_cache_mode = force_generic_plan",
    "set local debug_parallel_query = on; set local parallel_setup_cost = 0; set local parallel_tuple_cost = 0;"
    " set local min_parallel_table_scan_size = 0; set local max_parallel_workers_per_gather = 2",
    "set local row_security = off",
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def attacker(attack: Attack) -> AsyncIterator[str]:
    """A rollout beside another that holds 3,000 rows to fail on, analysed."""
    mine, victim = await attack.open(2)
    conn = await attack.login()
    async with attack.call(conn, victim):
        await conn.execute("insert into secret (word, pin) select 'victim' || n, 0 from generate_series(1, 3000) n")
        await conn.execute("update secret set word = 'victim', pin = 0 where id <= 10")
    await conn.close()
    await attack.world.execute(f"analyze {attack.state.hidden_schema}.secret")
    return mine


@pytest.mark.parametrize("plan", PLANS)
async def test_no_expression_meets_a_row_of_another_rollout(attack: Attack, attacker: str, plan: str) -> None:
    conn = await attack.login()
    for sql in EXPRESSIONS:
        async with attack.call(conn, attacker):
            savepoint = conn.transaction()
            await savepoint.start()
            await conn.execute(plan)
            try:
                await conn.fetch(sql)
            except asyncpg.InsufficientPrivilegeError:
                assert "row_security" in plan  # "query would be affected by row-level security"
            finally:
                await savepoint.rollback()
    await conn.close()


async def test_no_message_of_an_error_holds_another_rollouts_row(attack: Attack, attacker: str) -> None:
    """Keys and constraints are checked against the own chain: what another rollout holds is free here."""
    conn = await attack.login()
    (mine,) = await attack.open()
    async with attack.call(conn, mine):
        assert await conn.fetchval("insert into secret (id, word) values (21, 'mine') returning id") == 21
        await refused(conn, "insert into clue values (500, 2999)", state="23503")
        with pytest.raises(asyncpg.UniqueViolationError, match=r"Key \(id\)=\(3\) already exists"):
            async with conn.transaction():
                await conn.execute("insert into secret (id, word) values (3, 'mine')")
    await conn.close()


async def test_statistics_show_no_value(attack: Attack, attacker: str) -> None:
    for login in ("tool", "query"):
        conn = await attack.login(login)
        for view in ("pg_stats", "pg_stats_ext", "pg_stats_ext_exprs"):
            schemas = f"('{attack.state.hidden_schema}', '{attack.other.hidden_schema}', 'megamcp')"
            assert await conn.fetchval(f"select count(*) from {view} where schemaname in {schemas}") == 0
        await refused(conn, "select count(*) from pg_statistic")
        await refused(conn, "select stxdndistinct from pg_statistic_ext_data")
        await conn.close()


async def test_plans_tell_how_common_a_value_is_over_all_rollouts_but_only_to_a_raw_login(
    attack: Attack, attacker: str
) -> None:
    """What does not hold: estimates are made from the statistics of the whole table, other rollouts' rows included.

    A tool author, who serves all these rollouts, learns nothing new by it; texts of agents get no EXPLAIN.
    """
    from megamcp.errors import UnsupportedStatement
    from megamcp.state.statements import check_query

    conn = await attack.login()
    async with attack.call(conn, attacker):
        rows = await conn.fetch("explain select * from secret where word = 'victim'")
        assert "rows=" in rows[0][0]
        assert await conn.fetchval("select count(*) from secret where word = 'victim'") == 0
        # How many rows there are, in all rollouts together.
        assert await conn.fetchval("select reltuples from pg_class where relname = 'secret~delta'") >= 3000
    await conn.close()
    with pytest.raises(UnsupportedStatement):
        check_query("explain select * from secret where word = 'victim'")


async def test_catalogs_tell_names_and_no_row(attack: Attack, attacker: str) -> None:
    conn = await attack.login()
    async with attack.call(conn, attacker):
        found = await conn.fetch(
            "select prosrc from pg_proc where prosrc ~ 'victim' union all"
            " select pg_get_viewdef(oid) from pg_class where relkind = 'v' and pg_get_viewdef(oid) ~ 'victim' union all"
            " select description from pg_description where description ~ 'victim' union all"
            " select rolconfig::text from pg_roles where rolconfig::text ~ 'victim|password'"
        )
        assert found == []
        assert await conn.fetchval("select rolpassword from pg_roles where rolname = session_user") == "********"
    await conn.close()


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("CVE-2018-1058: an object of public shadows one that a function means", "public"),
        ("CVE-2023-2454: CREATE SCHEMA … runs its elements under another path", "schema"),
        ("CVE-2023-2455: a plan of one role's policies runs for another", "plan"),
        ("CVE-2024-10978: SET ROLE undone by a rollback, or by SET in a function, changes who reads", "role"),
    ],
)
async def test_a_known_way_around_search_paths_and_roles(attack: Attack, attacker: str, name: str, made: str) -> None:
    conn = await attack.login()
    await getattr(_Ways, made)(attack, conn, attacker)
    await conn.close()


class _Ways:
    """One attempt for each of the CVEs above, by the raw login."""

    @staticmethod
    async def public(attack: Attack, conn: asyncpg.Connection, attacker: str) -> None:
        """No schema takes an object of the login; one planted by somebody else is not looked into either."""
        for schema in ("public", "pg_temp", "megamcp", attack.state.visible_schema, attack.state.hidden_schema):
            await refused(
                conn,
                f"create function {schema}.left(text, int) returns text language sql as $$ select 'stolen' $$",
                state=("42501", "3F000"),
            )
        await attack.world.execute("create schema planted")
        try:
            await attack.world.execute(
                "create function planted.left(text, int) returns text language sql as $$ select 'stolen' $$"
            )
            await attack.world.execute(
                "create function planted.current_setting(text, bool) returns text language sql as $$ select '{0,1}' $$"
            )
            await attack.world.execute("grant usage on schema planted to public")
            async with attack.call(conn, attacker):
                await conn.execute("set local search_path = planted, public, pg_catalog")
                visible = attack.state.visible_schema
                assert (await conn.fetchval(f"select {visible}.initials()")) == "b" * 20
                assert await conn.fetchval(f"select count(*) from {visible}.secret") == 20
                await conn.execute(f"insert into {visible}.secret (id, word) values (70, 'x')")
                await conn.execute(f"delete from {visible}.secret where id = 70")
        finally:
            await attack.world.execute("drop schema planted cascade")

    @staticmethod
    async def schema(attack: Attack, conn: asyncpg.Connection, attacker: str) -> None:
        await refused(conn, "create schema mine create view secret as select 1")
        await refused(conn, "create schema authorization current_user create table t (id int)")

    @staticmethod
    async def plan(attack: Attack, conn: asyncpg.Connection, attacker: str) -> None:
        """Policies are for the view role, never the login: a plan kept from one binding asks for the next anew."""
        await conn.execute("prepare kept as select count(*) from secret")
        async with attack.call(conn, attacker):
            assert await conn.fetchval("execute kept") == 20
            await conn.execute("set local role megamcp_tools")
            await refused(conn, "execute kept", state=("42501", "42P01"))  # the views' schema is out of its sight
            await conn.execute("reset role")
        await refused(conn, "execute kept")

    @staticmethod
    async def role(attack: Attack, conn: asyncpg.Connection, attacker: str) -> None:
        """The identity that counts is session_user, which a login can't change."""
        async with attack.call(conn, attacker):
            await conn.execute("set local role megamcp_tools")
            assert await conn.fetchval("select session_user::text") == attack.state.tool_role
            await conn.execute(
                "do $$ begin set local role megamcp_tools; raise exception 'x'; exception when others then null; end $$"
            )
            assert await conn.fetchval("select current_user::text") == "megamcp_tools"
            await conn.execute("reset role")
            assert await conn.fetchval("select current_user::text") == attack.state.tool_role
            await refused(conn, "set local session authorization postgres")


async def test_plans_that_a_session_prints_hold_no_secret(attack: Attack, attacker: str) -> None:
    """PostgreSQL lets every session have its plans printed, constants and all."""
    constants = [await attack.world.execute("select megamcp.secret() as value")]
    constants += [
        await attack.world.execute(
            "select convert_to(megamcp.kept($1, $2), 'UTF8') as value", attack.state.hidden_schema, what
        )
        for what in ("chain", "head")
    ]
    for role in ("tool", "query"):
        conn = await attack.login(role)  # plans of a session are made once
        printed: list[str] = []
        conn.add_log_listener(
            lambda _, message, printed=printed: printed.append(str(message.detail or message.message))
        )
        await conn.execute("set debug_print_plan = on; set client_min_messages = log")
        if role == "tool":
            async with attack.call(conn, attacker):
                await conn.execute(
                    "select count(*), max(word) from secret; insert into secret (word) values ('printed')"
                )
                await conn.execute("update secret set word = 'again' where word = 'printed'")
        else:
            async with attack.query(conn, attacker):
                await conn.execute("select count(*), max(word) from secret")
        await conn.close()
        text = " ".join(" ".join(printed).split())
        assert ":constvalue" in text
        for rows in constants:
            assert _as_printed(rows[0]["value"]) not in text


def _as_printed(value: bytes) -> str:
    """Bytes as a plan shows a constant's."""
    return " ".join(str(byte - 256 if byte > 127 else byte) for byte in value)


async def test_settings_that_hold_what_was_verified_are_not_listed(attack: Attack, attacker: str) -> None:
    conn = await attack.login()
    async with attack.call(conn, attacker):
        await conn.execute("insert into secret (word) values ('listed')")
        listed = await conn.fetch("select name from pg_settings") + await conn.fetch("show all")
        assert [row["name"] for row in listed if row["name"].startswith("megamcp")] == []
    await conn.close()

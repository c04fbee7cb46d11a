"""An agent's SQL text, at the one door where it is taken: the query endpoint refuses what a raw login might try."""

import pytest

from megamcp.errors import MegaMCPError
from tests.integration.security.conftest import Attack

TEXTS = (
    "select 1; drop view secret",
    "select set_config('megamcp.binding', '', true)",
    "select pg_catalog.set_config('megamcp.' || 'binding', '', true)",
    "set megamcp.binding = ''",
    "set role megamcp_tools",
    "set local row_security = off",
    "begin",
    "rollback to x",
    "prepare p as select 1",
    "declare c cursor with hold for select 1",
    "listen x",
    "notify x",
    "lock table secret",
    "do $$ begin end $$",
    "copy secret to stdout",
    "copy (select 1) to program 'id'",
    "explain select * from secret",
    "explain (analyze) select * from secret",
    "select pg_sleep(1)",
    "select pg_advisory_lock(1)",
    "select pg_read_file('/etc/hostname')",
    "select lo_import('/etc/hostname')",
    "select query_to_xml('select 1', true, true, '')",
    "select * from pg_stats",
    "select * from pg_locks",
    "select * from pg_stat_activity",
    "select * from megamcp.rollouts",
    "select megamcp.chain()",
    "select ctid from secret",
    "select nextval('secret_id_seq')",
    "with x as (delete from secret returning *) select * from x",
    "select 1 into temp secret",
    "create temp view secret as select 1",
    "select * from secret for update",
    "alter role current_user password 'x'",
    "discard all",
    "reset all",
)


@pytest.mark.parametrize("text", TEXTS)
async def test_a_text_that_reaches_out_of_the_rollout_is_refused(attack: Attack, text: str) -> None:
    (mine,) = await attack.open()
    with pytest.raises(MegaMCPError):
        await attack.world.services.queries.run(mine, None, text, None)


async def test_a_plain_query_is_answered(attack: Attack) -> None:
    (mine,) = await attack.open()
    columns, rows, _ = await attack.world.services.queries.run(mine, None, "select count(*) from secret", None)
    assert (columns, [bytes(row) for row in rows]) == (["count"], [b"[20]"])

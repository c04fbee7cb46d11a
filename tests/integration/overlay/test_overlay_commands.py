"""Commands of several parts, compared with plain tables: same rows, counts, RETURNING, errors."""

from collections.abc import Callable

import pytest

DDL = """
create table parent (id int primary key, name text unique);
create table child (id int primary key, p int references parent{action});
create table log (id int generated always as identity primary key, what text, p int);
"""
SEEDS = [
    "insert into parent values (1, 'a'), (2, 'b'), (3, 'c')",
    "insert into child values (1, 1), (2, 1), (3, 2)",
]
WRITES = [
    "with p as (insert into parent values (9, 'z') returning id) insert into child select 90 + id, id from p",
    "with p as (insert into parent values (8, 'y') returning id) insert into child values (80, 8) returning *",
    "with c as (insert into child values (70, 7) returning p) insert into parent select p, 'x' from c returning id",
    "with c as (insert into child values (60, 6)) select 1",
    "with c as (insert into child values (60, 6)) insert into parent values (5, 'q')",
    "with d as (delete from child where p = 1 returning *) delete from parent where id in (select p from d)",
    "with d as (delete from child where p = 2 returning id, p), l as (insert into log (what, p) select 'gone', p from d"
    " returning *) select d.id, l.what, l.id from d join l on l.p = d.p",
    "with d as (delete from parent where id = 3 returning id) insert into child values (50, 3)",
    "with d as (delete from parent where id = 3 returning id) insert into child select 51, id from d",
    "with u as (update parent set id = id + 100 where id in (1, 9) returning id) update child set p = 101 where p = 1",
    "with u as (update parent set name = name || '!' returning id, name) select * from u order by id",
    "with recursive t(n) as (values (1) union all select n + 1 from t where n < 3), i as ("
    "insert into log (what, p) select 'n', n from t returning id) select count(*) from i, log",
    "with a as (insert into parent values (1, 'dup')), b as (insert into child values (1, 1)) select 1",
    "with d as (delete from child), e as (delete from parent) insert into log (what) select 'end' returning id",
    "with m as (merge into child using (values (1, 3), (900, 2)) s(id, p) on child.id = s.id when matched then update"
    " set p = s.p when not matched then insert values (s.id, s.p) returning merge_action(), child.id) select * from m",
]


@pytest.mark.support("WITH … (INSERT, UPDATE, DELETE, MERGE): several tables in one command", "exact")
@pytest.mark.parametrize(
    "action", ["", " on delete cascade on update cascade", " on delete set null", " on delete restrict"]
)
def test_parts_of_a_command_share_a_snapshot_and_end_together(compare: Callable[..., None], action: str) -> None:
    compare(DDL.format(action=action), ["parent", "child", "log"], SEEDS, WRITES)

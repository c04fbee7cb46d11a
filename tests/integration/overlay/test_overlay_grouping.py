"""GROUP BY a primary key: what hangs on the key may be selected, as on plain tables."""

import pytest

from megamcp.errors import UnsupportedSchema, UnsupportedStatement
from megamcp.state import rewrites
from tests.integration.overlay.conftest import Compare, World

DDL = """
create table p (a int, b int, name text, j json, primary key (a, b));
create table c (id int primary key, a int, b int, word text, late int, unique (late), foreign key (a, b) references p);
create table d (id int, word text, primary key (id) deferrable);
create view counted (x, y, z) as select p.a, p.name, count(*) from p join c using (a, b)
  group by p.a, p.b having max(c.word) > '' order by p.name;
create view over_it as select * from counted where y > '';
create function named(low int) returns setof text language sql as
  'select name from p where a >= low group by a, b order by name';
create function told(low int) returns text language plpgsql as $$
declare r record; told text := '';
begin
  for r in select p.name, count(*) as n from p where a >= low group by a, b order by name loop
    told := told || r.name || r.n;
  end loop;
  return told;
end $$;
create function first(low int, inout größe text default '', out one int) language plpgsql as $$
declare other text;
begin
  select p.name, p.a into strict größe, one from p where a >= low group by a, b order by name limit 1;
  other := (select max(n) from (select p.name as n from p where a = one group by a, b) x);
  if exists (select p.name from p group by p.a, p.b having p.name = other) then
    größe := größe || other;
  end if;
  insert into d values (one, größe) on conflict (id) do update set word = d.word || excluded.word
    returning d.word into strict größe;
  with w as (select 1) insert into p select 7, 7, p.name from p
    group by a, b order by name limit 1 on conflict do nothing returning p.a into one;
  return;
end $$;
"""
TABLES = ["p", "c", "d"]
SEEDS = ["insert into p values (1, 1, 'x'), (1, 2, 'y')", "insert into c values (1, 1, 1, 'q'), (2, 1, 1, 'r')"]


@pytest.mark.support("GROUP BY a primary key, other columns of its table beside it", "exact")
def test_columns_that_hang_on_a_grouped_key_are_there(compare: Compare) -> None:
    compare(
        DDL,
        TABLES,
        SEEDS,
        [
            "select * from counted",
            "select * from over_it",
            "select named(0), told(0)",
            "select name from p group by a, b order by name",
            "select p.name, count(c.id) from p left join c using (a, b) group by a, b order by 1",
            "select q.name, max(c.word) from p as q join c on (c.a, c.b) = (q.a, q.b) group by q.a, q.b",
            "select z from p as q (x, y, z) group by x, y order by z",
            "select a as u, b as w, name from p group by u, w order by 1, 2, 3",
            "select a, b, name from p group by 1, 2 order by 3",
            "select c.*, c from c group by id order by id",
            "select 1 from p group by a, b having name > 'x'",
            "select name, (select count(*) from c where c.a = p.a and c.word > p.name) from p group by a, b order by 1",
            "insert into c select 100 + row_number() over (), a, b, name from p group by a, b returning *",
            "update c set word = x.name from (select a, b, name from p group by a, b) x"
            " where c.a = x.a and c.b = x.b returning c.*",
            "select p.name, c.word from p right join c using (a, b) group by c.id, p.a, p.b order by 1, 2",
            "select p.name from c right join p using (a, b) group by a, b order by 1",
            "select p.name from p natural left join c group by a, b order by 1",
            "select p.name from p full join c using (a, b) group by a, b order by 1",
            "select p.name from p join c using (a, b) as u group by u.a, u.b order by 1",
            "select q.name from p right join p q using (a, b) group by a, b order by 1",
            "select p.name from p right join p q using (a, b) group by a, b order by 1",
            "insert into c select a * 10 + b, a, b, name from p group by a, b on conflict (id)"
            " do update set word = excluded.word returning *",
            "with w as (insert into c select 11, a, b, name from p group by a, b on conflict do nothing returning id)"
            " select name, (select count(*) from w) from p group by a, b order by 1",
            "select p.name from p, lateral (select word from c where c.a = p.a) l group by p.a, p.b order by 1",
            "with p as (select 1 as a, 2 as b, 3 as name) select name from p group by a, b",
            "select name from p group by a",
            "select word from c group by late",
            "select word from d group by id",
            "select p.name, c.word from p join c using (a, b) group by p.a, p.b",
            "select name from p group by (a, b) order by name",
            "select p.a, b, name, word, count(*), grouping(word), grouping(p.a) from p left join c using (a, b)"
            " group by p.a, p.b, rollup (word) order by 1, 2, 4",
            "select a, name, late, count(*) from p left join c using (a, b)"
            " group by p.a, grouping sets ((p.b), (p.b, late), grouping sets ((p.b, word), (p.b))) order by 1, 2, 3",
            "select name, nothing(name) from p group by a, b",
            "select id, word, c, a, count(*) from c group by id, cube (word) order by id, word",
            "select p.a, name from p group by p.a, p.b, grouping sets ((), (name), rollup (b + 1)) order by 1, 2",
            "select name from p group by distinct a, b, rollup (a), rollup (b) order by name",
            "select name from p group by rollup (a, b)",
            "select name from p group by a, rollup (b)",
            "select name from p group by grouping sets ((a, b), (a))",
            "select name from p group by grouping sets ((a, b), ())",
            "select * from first(0)",
            "select * from first(1)",
        ],
    )


@pytest.mark.support(
    "GROUP BY a primary key beside a column whose type has no equality", "refused: a view has no primary key"
)
async def test_a_column_that_can_not_be_grouped_by_is_refused(world: World) -> None:
    rollout = await world.open(await world.load(DDL))
    async with rollout.call() as db:

        async def fetch(sql: str, *arguments: object) -> list[object]:
            async with db.transaction():
                return list(await db.fetch(sql, *arguments))

        with pytest.raises(UnsupportedStatement, match="whose type has no equality"):
            await rewrites.Rewriter().rewrite("select j from p group by a, b", fetch)


async def test_a_view_that_can_not_be_made_over_views_is_refused(world: World) -> None:
    ddl = "create table p (a int, b int, name text, j json, primary key (a, b));"
    with pytest.raises(UnsupportedSchema, match="GROUP BY a primary key g"):
        await world.load(f"{ddl} create view g as select a, j from p group by a, b")

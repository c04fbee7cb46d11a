insert into account (id, owner, balance)
select n, 'owner-' || n, 100 from generate_series(1, 10) as g(n);

insert into item (key, value)
select 'base-' || n, 'seeded' from generate_series(1, 5) as g(n);

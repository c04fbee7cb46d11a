insert into item (key, value) select 'base-' || n, 'seeded' from generate_series(1, 5) n;

insert into secret (word) select 'base' || n from generate_series(1, 20) as g(n);
insert into clue (id, secret_id) select n, n from generate_series(1, 20) as g(n);

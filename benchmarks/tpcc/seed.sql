insert into warehouse values (1, 'W1', 0.05, 300000);
insert into district select 1, d, 'D' || d, 0.01 * d, 30000, 301 from generate_series(1, 10) d;
insert into customer (c_w_id, c_d_id, c_id, c_last, c_credit, c_discount, c_balance, c_data)
  select 1, d, c, 'LAST' || c % 100, case when c % 10 = 0 then 'BC' else 'GC' end, 0.0001 * (c % 5000), -10,
         repeat(md5((d * 1000 + c)::text), 6)
    from generate_series(1, 10) d, generate_series(1, 600) c;
insert into item select i, 'item ' || md5(i::text), 1 + i % 9900 / 100.0 from generate_series(1, 10000) i;
insert into stock (s_w_id, s_i_id, s_quantity, s_data)
  select 1, i, 10 + i * 7 % 91, md5(i::text) || md5((i + 1)::text) from generate_series(1, 10000) i;
insert into orders (o_w_id, o_d_id, o_id, o_c_id, o_entry, o_lines)
  select 1, d, o, 1 + o * 37 % 600, timestamptz '2025-01-01 00:00Z' + (d * 300 + o) * interval '1 minute', 5 + o % 11
    from generate_series(1, 10) d, generate_series(1, 300) o;
insert into order_line
  select 1, o.o_d_id, o.o_id, n, 1 + (o.o_id * 131 + o.o_d_id * 17 + n * 997) % 10000, 5, 10 + n
    from orders o, generate_series(1, o.o_lines) n;

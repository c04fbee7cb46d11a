insert into authors (name, born)
select format('%s %s', first, last), date '1900-01-01' + (n * 389) % 29000
  from (select n, (array['Ada', 'Bo', 'Chen', 'Dina', 'Emil', 'Fatou', 'Goran', 'Hana'])[1 + n % 8] as first,
               (array['Adler', 'Brook', 'Castro', 'Dufour', 'Endo'])[1 + n / 8] as last
          from generate_series(0, 39) n) names;

insert into books (isbn, title, author_id, price, stock, published)
select format('978-%s', lpad((n * 7919 % 10000000000)::text, 10, '0')),
       format('%s of the %s', (array['History', 'Garden', 'Grammar', 'Geometry', 'Secret'])[1 + n % 5],
              (array['Sea', 'North', 'City', 'Clock', 'River', 'Moon', 'Road'])[1 + n % 7]) || ' ' || n,
       1 + n % 40, 5 + (n * 37 % 4000) / 100.0, n * 13 % 50, date '1990-01-01' + n * 31
  from generate_series(1, 400) n;

insert into customers (name, email, joined)
select 'Customer ' || n, format('customer%s@example.com', n), timestamptz '2025-01-01 00:00Z' + n * interval '7 hours'
  from generate_series(1, 200) n;

insert into orders (customer_id, placed, status)
select 1 + n * 17 % 200, timestamptz '2025-06-01 00:00Z' + n * interval '3 hours',
       (array['open', 'paid', 'shipped', 'shipped', 'cancelled'])[1 + n % 5]
  from generate_series(1, 1000) n;

insert into order_lines (order_id, isbn, quantity, price)
select distinct on (o.order_id, b.isbn) o.order_id, b.isbn, 1 + (o.order_id + k) % 3, b.price
  from orders o, generate_series(1, 3) k,
       lateral (select isbn, price from books offset (o.order_id * 31 + k * 97) % 400 limit 1) b;

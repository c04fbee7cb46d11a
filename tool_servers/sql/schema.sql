create table authors (
    author_id integer generated always as identity primary key,
    name text not null unique,
    born date
);
comment on table authors is 'Who wrote the books.';

create table books (
    isbn text primary key check (isbn ~ '^97[89]-[0-9]{10}$'),
    title text not null,
    author_id integer not null references authors,
    price numeric(8, 2) not null check (price >= 0),
    stock integer not null default 0 check (stock >= 0),
    published date not null
);
create index on books (author_id);
comment on table books is 'What the shop sells, and how many of each are on the shelf.';

create table customers (
    customer_id integer generated always as identity primary key,
    name text not null,
    email text not null unique,
    joined timestamptz not null default now()
);

create table orders (
    order_id integer generated always as identity primary key,
    customer_id integer not null references customers,
    placed timestamptz not null default now(),
    status text not null default 'open' check (status in ('open', 'paid', 'shipped', 'cancelled'))
);
create index on orders (customer_id);

create table order_lines (
    order_id integer not null references orders on delete cascade,
    isbn text not null references books,
    quantity integer not null check (quantity > 0),
    price numeric(8, 2) not null,
    primary key (order_id, isbn)
);
create index on order_lines (isbn);

create view revenue_by_author as
select a.author_id, a.name, coalesce(sum(l.quantity * l.price), 0) as revenue
  from authors a
  left join books b using (author_id)
  left join order_lines l using (isbn)
  left join orders o on o.order_id = l.order_id and o.status in ('paid', 'shipped')
 where l.order_id is null or o.order_id is not null
 group by a.author_id, a.name;

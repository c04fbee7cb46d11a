create table warehouse (
    w_id integer primary key,
    w_name text not null,
    w_tax numeric(4, 4) not null,
    w_ytd numeric(12, 2) not null
);

create table district (
    d_w_id integer not null references warehouse,
    d_id integer not null,
    d_name text not null,
    d_tax numeric(4, 4) not null,
    d_ytd numeric(12, 2) not null,
    d_next_o_id integer not null,
    primary key (d_w_id, d_id)
);

create table customer (
    c_w_id integer not null,
    c_d_id integer not null,
    c_id integer not null,
    c_last text not null,
    c_credit text not null check (c_credit in ('GC', 'BC')),
    c_discount numeric(4, 4) not null,
    c_balance numeric(12, 2) not null,
    c_payments integer not null default 0,
    c_data text not null,
    primary key (c_w_id, c_d_id, c_id),
    foreign key (c_w_id, c_d_id) references district
);

create table item (
    i_id integer primary key,
    i_name text not null,
    i_price numeric(6, 2) not null check (i_price > 0)
);

create table stock (
    s_w_id integer not null references warehouse,
    s_i_id integer not null references item,
    s_quantity integer not null,
    s_ytd integer not null default 0,
    s_orders integer not null default 0,
    s_data text not null,
    primary key (s_w_id, s_i_id)
);

create table orders (
    o_w_id integer not null,
    o_d_id integer not null,
    o_id integer not null,
    o_c_id integer not null,
    o_entry timestamptz not null default now(),
    o_lines integer not null,
    primary key (o_w_id, o_d_id, o_id),
    foreign key (o_w_id, o_d_id, o_c_id) references customer
);
create index on orders (o_w_id, o_d_id, o_c_id);

create table order_line (
    ol_w_id integer not null,
    ol_d_id integer not null,
    ol_o_id integer not null,
    ol_number integer not null,
    ol_i_id integer not null references item,
    ol_quantity integer not null,
    ol_amount numeric(8, 2) not null,
    primary key (ol_w_id, ol_d_id, ol_o_id, ol_number),
    foreign key (ol_w_id, ol_d_id, ol_o_id) references orders
);

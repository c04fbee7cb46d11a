create table account (
    id integer primary key,
    owner text not null unique,
    balance integer not null default 0 check (balance >= 0)
);

create table entry (
    id bigint generated always as identity primary key,
    account_id integer not null references account (id),
    amount integer not null,
    made_at timestamptz not null default now()
);
create index on entry (account_id);

create table item (
    key text primary key,
    value text not null
);

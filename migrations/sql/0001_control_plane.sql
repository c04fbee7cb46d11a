-- Control plane, revision 1. Never edited once released: a change is a new revision.

create table megamcp.keys (
    name text primary key,
    inner_pad bytea not null,           -- key xor 0x36…, 64 bytes: HMAC-SHA256 in two calls of sha256()
    outer_pad bytea not null,           -- key xor 0x5c…, 64 bytes
    secret bytea not null
);

create table megamcp.environments (
    id integer generated always as identity primary key,
    name text not null,
    hash text not null,                 -- of definition and files; name@hash names one version for ever
    definition jsonb not null,          -- environment.toml as read, with the folder it came from
    clock timestamptz not null,
    seed bigint not null,
    loaded_at timestamptz not null default clock_timestamp(),
    unique (name, hash)
);

create table megamcp.servers (
    environment integer not null references megamcp.environments on delete cascade,
    name text not null,
    position integer not null,
    kind text not null,
    role name,                          -- the login a schema server's process uses; call_begin demands it
    query_role name,
    state text,                         -- hash of the schema state
    descriptor jsonb,
    primary key (environment, name)
);

create sequence megamcp.layer_seq as bigint start 1;

create table megamcp.checkpoints (
    id text primary key,
    rollout text not null,              -- no foreign key: a checkpoint outlives its rollout
    environment integer not null references megamcp.environments,
    parent text references megamcp.checkpoints,
    turn integer not null,
    depth integer not null,
    seq bigint not null,                -- last journal row before it
    epoch integer not null,             -- of the path segment that it ended
    chain bigint[] not null,            -- layers from the root, without the base
    layer bigint,                       -- its own layer; null where nothing was written since the parent
    sums jsonb not null,                -- server -> 128-bit sum of the state as hex
    digest text not null,
    label text,
    seed bigint not null,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    released_at timestamptz             -- the lease ended; the row stays while something stands on it
);
create index on megamcp.checkpoints (rollout, created_at);
create index on megamcp.checkpoints (parent) where parent is not null;
create index on megamcp.checkpoints (expires_at) where released_at is null;
create index on megamcp.checkpoints (released_at) where released_at is not null;

create table megamcp.pins (
    checkpoint text not null references megamcp.checkpoints on delete cascade,
    owner text not null,
    expires_at timestamptz not null,
    primary key (checkpoint, owner)
);

create table megamcp.rollouts (
    id text primary key,
    environment integer not null references megamcp.environments,
    "group" text not null,
    status text not null default 'open' check (status in ('open', 'closed', 'expired')),
    parent_checkpoint text,             -- where it was forked from; no foreign keys: these outlive their rows
    parent_rollout text,
    checkpoint text references megamcp.checkpoints,     -- what its head stands on
    layer bigint not null,              -- its head
    start_seq bigint not null default 0,
    seq bigint not null default 0,      -- last journal row
    epoch integer not null default 0,   -- one up at each rollback: fences calls that began before
    turn integer not null default 0,
    depth integer not null default 0,
    dirty boolean not null default false,
    seed bigint not null,
    labels jsonb not null default '{}',
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    closed_at timestamptz
) with (fillfactor = 80);
create index on megamcp.rollouts (created_at, id);
create index on megamcp.rollouts ("group");
create index on megamcp.rollouts (checkpoint) where checkpoint is not null;
create index on megamcp.rollouts (expires_at) where status = 'open';
create index on megamcp.rollouts (closed_at) where status <> 'open';

create table megamcp.blobs (
    hash bytea primary key,
    content text not null,
    bytes bigint not null,
    created_at timestamptz not null default clock_timestamp()
);
create index on megamcp.blobs (created_at);

create table megamcp.events (
    rollout text not null,
    seq bigint not null,
    kind text not null check (kind in ('open', 'call', 'checkpoint', 'fork', 'rollback', 'score', 'close')),
    at timestamptz not null default clock_timestamp(),
    data jsonb,
    -- what follows is for calls only
    server text,
    tool text,
    arguments text,
    state text check (state in ('running', 'done', 'failed', 'unknown')),
    result text,
    result_blob bytea,                  -- large results are stored apart, once per content
    is_error boolean,
    ended_at timestamptz,
    nonce uuid,                         -- of the state handle: a handle is good for one call
    idempotency_key text,
    fingerprint bytea,                  -- of server, tool and arguments: a key belongs to one request
    checkpoint text,                    -- with epoch: the path segment that the call belongs to
    epoch integer,
    exact boolean,                      -- effects and result committed together
    owner bigint,                       -- gateway process of a call that isn't exact
    primary key (rollout, seq)
) with (fillfactor = 80);
create unique index events_nonce_key on megamcp.events (nonce) where nonce is not null;
create index on megamcp.events (rollout, idempotency_key) where idempotency_key is not null;
create index on megamcp.events (owner) where kind = 'call' and not exact and state = 'running';
create index on megamcp.events (at);

-- Calls that write, from call_begin to call_finish, each seen by its own transaction only: at COMMIT a row that is left
-- is an error. Whoever has to know whether a call's transaction is over inserts its nonce too, and waits for that.
create unlogged table megamcp.open_calls (
    nonce uuid primary key,
    started_at timestamptz not null default clock_timestamp()
);

-- Calls that an operation on their rollout had to end: what their agents are told.
create table megamcp.ended_calls (
    nonce uuid primary key,
    reason text not null,
    at timestamptz not null default clock_timestamp()
);

create table megamcp.dead_layers (
    layer bigint primary key,
    environment integer not null references megamcp.environments on delete cascade,
    since timestamptz not null default clock_timestamp()
);

-- An opened state handle (megamcp/handles.py mints, megamcp.open_handle checks).
create type megamcp.handle as (
    rollout text, server text, epoch integer, mode text, nonce uuid, deadline timestamptz, key text, fingerprint bytea,
    point text
);

-- State kind `database`: which databases of the state clusters there are, and what for. The row comes first, the database
-- after it; a row whose work was cut off says what has to be undone. Nothing here can be derived from a cluster alone.

create table megamcp.databases (
    name text primary key,
    cluster text not null,
    environment integer references megamcp.environments,    -- of a clone
    server text,
    kind text not null check (kind in ('source', 'spare', 'clone', 'view')),
    status text not null default 'creating' check (status in ('creating', 'ready', 'full', 'dropping')),
    content text not null,              -- hash of what the source was built from
    rollout text,                       -- whose head it is; null: a copy that is kept for a checkpoint, or for nobody
    rewind_to bigint,                   -- a rollback that still has to be carried out inside, to this position
    lineage jsonb not null default '{}',    -- ancestor -> up to where this one's log is a copy of the ancestor's
    sealed boolean not null default false,  -- takes no connections: nothing is written here any more
    collected bigint not null default 0,    -- last call inside that the journal has
    owner bigint not null,              -- gateway process that works on it while it is being created
    created_at timestamptz not null default clock_timestamp(),
    used_at timestamptz not null default clock_timestamp(),
    bytes bigint,                       -- disk that it has to itself, as last looked at
    measured_at timestamptz
);
create unique index on megamcp.databases (rollout, server) where rollout is not null;
create unique index on megamcp.databases (cluster, content) where kind = 'source' and status <> 'dropping';
create index on megamcp.databases (cluster, content) where kind = 'spare';
create index on megamcp.databases (status) where status <> 'ready';

-- Where a checkpoint's databases stand: a position in the log of one of them. No row: the state that the environment starts with.
create table megamcp.snapshots (
    checkpoint text not null references megamcp.checkpoints on delete cascade,
    server text not null,
    database text not null references megamcp.databases,
    position bigint not null,
    sealed text references megamcp.databases,   -- a copy at an earlier position, from which the log can be played forward
    sealed_position bigint,
    primary key (checkpoint, server)
);
create index on megamcp.snapshots (database);
create index on megamcp.snapshots (sealed) where sealed is not null;

-- Null: the sum of a state after DDL isn't kept; it is computed when somebody asks.
alter table megamcp.checkpoints alter digest drop not null;

-- State kind `process`: the sandboxes of rollouts and the images that they were frozen to. The row comes first, the thing at
-- the host's keeper after it; a row whose work was cut off says what has to be undone.

create table megamcp.images (
    name text primary key,
    host text not null,                 -- the keeper that has it
    environment integer not null references megamcp.environments,
    server text not null,
    runtime text not null,
    status text not null default 'creating' check (status in ('creating', 'ready', 'lost', 'dropping')),
    memory boolean not null default false,  -- false: files only
    digest text,                        -- of the files
    bytes bigint not null default 0,
    modern boolean,                     -- what the handshake with the process found: null where there was none yet
    instructions text,
    owner bigint not null,              -- gateway process that works on it while it is being created
    created_at timestamptz not null default clock_timestamp()
);
create index on megamcp.images (status) where status <> 'ready';

create table megamcp.sandboxes (
    name text primary key,
    host text not null,
    environment integer not null references megamcp.environments,
    server text not null,
    runtime text not null,
    rollout text,                       -- whose head it is; null: nobody's any more
    status text not null default 'creating' check (status in ('creating', 'ready', 'parked', 'lost', 'dropping')),
    image text references megamcp.images,   -- what it stood as at `seq`; null: as the environment starts
    seq bigint not null,                -- journal row up to which that is so: a call after it may have changed something
    modern boolean,
    instructions text,
    reason text,                        -- why it was lost
    owner bigint not null,
    created_at timestamptz not null default clock_timestamp(),
    used_at timestamptz not null default clock_timestamp()
);
create unique index on megamcp.sandboxes (rollout, server) where rollout is not null;
create index on megamcp.sandboxes (image) where image is not null;
create index on megamcp.sandboxes (status) where status <> 'ready';

-- What a checkpoint keeps of a server's sandbox. No row: as the environment starts.
create table megamcp.image_points (
    checkpoint text not null references megamcp.checkpoints on delete cascade,
    server text not null,
    image text not null references megamcp.images,
    primary key (checkpoint, server)
);
create index on megamcp.image_points (image);

alter table megamcp.events drop constraint events_kind_check;
alter table megamcp.events add constraint events_kind_check
    check (kind in ('open', 'call', 'checkpoint', 'fork', 'rollback', 'score', 'close', 'state_lost'));

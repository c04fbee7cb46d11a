-- Squashing: a long chain is replaced by a shorter one that shows the same (megamcp/state/squash.py).

-- Chains are in the order of their layers' numbers. A squashed layer stands above the layers that it sums up and below
-- every head that builds on them: it takes a number out of the 63 that follow its newest part. Numbers below the
-- sequence's start were given out before, without room between them.
do $$
declare
    last bigint;
begin
    select last_value into last from megamcp.layer_seq;
    execute format('alter sequence megamcp.layer_seq increment by 64 start with %s restart', (last / 64 + 1) * 64);
end $$;

alter table megamcp.checkpoints
    add void boolean not null default false,    -- released, and nothing stands on it: its chain keeps no layer alive
    add leaf boolean not null default false;    -- void, and perhaps without children: its row may go
drop index megamcp.checkpoints_released_at_idx;
create index on megamcp.checkpoints (released_at) where released_at is not null and not void;
create index on megamcp.checkpoints (id) where leaf;

-- Length of the chain that the head builds on. It names the version: a chain is only ever replaced by a shorter one.
alter table megamcp.rollouts add layers integer not null default 0;
update megamcp.rollouts r set layers = cardinality(c.chain) from megamcp.checkpoints c where c.id = r.checkpoint;
drop index megamcp.rollouts_checkpoint_idx;
create index on megamcp.rollouts (checkpoint, layers) where checkpoint is not null;
create index on megamcp.rollouts (checkpoint) where layers > 8;     -- what the squasher looks for, usually nothing

-- Chains that squashing replaced, for the rollouts that still build on them.
create table megamcp.replaced_chains (
    checkpoint text not null references megamcp.checkpoints,
    layers integer not null,
    chain bigint[] not null,
    unused_since timestamptz,           -- when a sweep first found no rollout on it
    primary key (checkpoint, layers)
);

create table megamcp.squashed_layers (
    layer bigint primary key,
    environment integer not null references megamcp.environments on delete cascade
);

-- Layers of chains that were given up. A sweep finds those that no other chain holds; they are dead.
create table megamcp.loose_layers (
    layer bigint primary key,
    environment integer not null references megamcp.environments on delete cascade
);
create index on megamcp.dead_layers (since);

-- An idle rollout, with its one row of the journal, is to cost less than 1 KiB. Pages of rollouts are read in the order of
-- this index; the few of one microsecond are sorted then. A journal row is mostly written once: only calls to servers
-- without state here are completed later.
drop index megamcp.rollouts_created_at_id_idx;
create index on megamcp.rollouts (created_at);
alter table megamcp.events set (fillfactor = 90);

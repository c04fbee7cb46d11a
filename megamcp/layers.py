"""Every query on what becomes of layers: chains that are squashed, layers that nothing shows any more.

A layer lives as long as a chain names it: the chain of a checkpoint that isn't void, or one that squashing replaced and
a rollout still builds on. A head is its rollout's alone. What dies:

    released, nothing stands on it ─► void ─► its layers are loose ─► in no other chain: dead ─► rows deleted
    replaced, no rollout builds on it ───────────┘

Who began before a chain was given up may still read by it. So the last step, and the forgetting of a replaced chain,
wait for a moment when every transaction of that time is over (`HORIZON`). It is asked for in a statement of its own,
before the one that deletes: that one then sees all that those transactions left.

Void, loosen, mark and discard run under one advisory lock (`reaper.py`), so none of them sees another half done.
"""

# -- squashing (squasher.py) --------------------------------------------------------------------------------------

SPACING = 64
"""Numbers from one layer of the sequence to the next; what lies between is for squashed layers."""


def long_chains(most: int) -> str:
    """Checkpoints with a rollout on a chain of more than `most` layers that no shorter one has replaced yet.

    The number is part of the text: for 8 and more the partial index answers, which is mostly empty.
    """
    return f"""with long as (
    select distinct r.checkpoint from megamcp.rollouts r where r.layers > {int(most)} and r.checkpoint is not null
)
select c.id from long join megamcp.checkpoints c on c.id = long.checkpoint
 where cardinality(c.chain) > {int(most)} and not c.void order by cardinality(c.chain) desc, c.id limit $1"""


CHAIN = "select environment, chain from megamcp.checkpoints where id = $1 and not void"

# A number for the layer that sums up a chain's end: null where none is free after its last layer.
TAKE_NUMBER = f"""with free as (
    select coalesce(max(s.layer), $1::bigint) + 1 as layer from megamcp.squashed_layers s
     where s.layer >= $1 and s.layer < ($1 / {SPACING} + 1) * {SPACING}
)
insert into megamcp.squashed_layers (layer, environment) select f.layer, $2 from free f
 where f.layer % {SPACING} <> 0
   and $1 >= (select q.seqstart from pg_sequence q where q.seqrelid = 'megamcp.layer_seq'::regclass)
on conflict do nothing returning layer"""

# The swap: who comes to the checkpoint from now on gets the short chain; who stands on it keeps the old one.
SWAP = """with old as (
    select c.id, c.chain from megamcp.checkpoints c where c.id = $1 and c.chain = $2::bigint[] and not c.void
       for no key update
), kept as (
    insert into megamcp.replaced_chains (checkpoint, layers, chain)
    select o.id, cardinality(o.chain), o.chain from old o
)
update megamcp.checkpoints c set chain = $3::bigint[] from old o where c.id = o.id returning c.id"""

# Replaced chains that rollouts may still build on, each with what has taken its place.
REPLACED = """select o.checkpoint, o.layers, o.chain, c.chain as squashed, c.environment
  from megamcp.replaced_chains o join megamcp.checkpoints c on c.id = o.checkpoint
 order by o.unused_since is not null, o.checkpoint, o.layers limit $1"""

# Some rollouts on a replaced chain, and whether their lock was free: it then is this transaction's.
TRY_ROLLOUTS = """select r.id, pg_try_advisory_xact_lock(megamcp.lock_key(r.id)) as free from (
    select r.id from megamcp.rollouts r
     where r.checkpoint = $1 and r.layers = $2 and r.id > $3 order by r.id limit $4) r"""

# Those of them that wrote nothing since their checkpoint build on the short chain from here on.
MOVE_CLEAN = """update megamcp.rollouts r set layers = $4 from (
    select x.id from megamcp.rollouts x
     where x.id = any($3::text[]) and x.checkpoint = $1 and x.layers = $2 and not x.dirty
       for no key update skip locked) x where r.id = x.id"""

# The others, with their heads. The row lock is for calls to servers without state, which take no other.
DIRTY = """select r.id, r.layer from megamcp.rollouts r
    where r.id = any($3::text[]) and r.checkpoint = $1 and r.layers = $2 and r.dirty for no key update skip locked"""
MOVE_DIRTY = "update megamcp.rollouts set layers = $2 where id = $1"

# -- collecting (reaper.py) ---------------------------------------------------------------------------------------

# When the oldest transaction that runs in this database began.
HORIZON = """select coalesce(min(a.xact_start), clock_timestamp()) from pg_stat_activity a
    where a.datname = current_database() and a.backend_type = 'client backend' and a.pid <> pg_backend_pid()"""

# Two statements: a fork holds the row until it is done, so who then stands on it is seen.
LOCK_RELEASED = """select c.id from megamcp.checkpoints c
    where c.released_at is not null and not c.void
      and not exists (select 1 from megamcp.rollouts r where r.checkpoint = c.id)
    order by c.released_at limit $1 for update skip locked"""
VOID = """with gone as (
    update megamcp.checkpoints c set void = true, leaf = true
     where c.id = any($1::text[]) and not exists (select 1 from megamcp.rollouts r where r.checkpoint = c.id)
    returning c.chain, c.environment
), loose as (
    insert into megamcp.loose_layers (layer, environment)
    select distinct on (u.layer) u.layer, g.environment from gone g, unnest(g.chain) as u(layer) on conflict do nothing
)
select count(*) from gone"""

# Replaced chains without rollouts: first it is noted since when, then they go.
NOTE_UNUSED = """update megamcp.replaced_chains o set unused_since = clock_timestamp()
    where o.unused_since is null and not exists (
        select 1 from megamcp.rollouts r where r.checkpoint = o.checkpoint and r.layers = o.layers)"""
FORGET_REPLACED = """with gone as (
    delete from megamcp.replaced_chains o where o.unused_since < $1 and not exists (
        select 1 from megamcp.rollouts r where r.checkpoint = o.checkpoint and r.layers = o.layers)
    returning o.checkpoint, o.chain
), loose as (
    insert into megamcp.loose_layers (layer, environment)
    select distinct on (u.layer) u.layer, c.environment
      from gone g join megamcp.checkpoints c on c.id = g.checkpoint, unnest(g.chain) as u(layer) on conflict do nothing
), leaves as (
    update megamcp.checkpoints c set leaf = true from gone g where c.id = g.checkpoint and c.void
)
select count(*) from gone"""

# Loose layers in no chain are dead; the others are held by one that will loosen them in its turn.
MARK_DEAD = """with loose as (
    delete from megamcp.loose_layers returning layer, environment
), held(layer) as (
    select unnest(c.chain) from megamcp.checkpoints c where not c.void
    union all
    select unnest(o.chain) from megamcp.replaced_chains o
), dead as (
    insert into megamcp.dead_layers (layer, environment)
    select l.layer, l.environment from loose l where not exists (select 1 from held h where h.layer = l.layer)
    on conflict do nothing
)
select count(*) from loose"""

# Rows of void checkpoints without children; then their parents may be without children too.
DROP_LEAVES = """with seen as (
    select c.id from megamcp.checkpoints c where c.leaf order by c.id limit $1 for update skip locked
), gone as (
    delete from megamcp.checkpoints c using seen s where c.id = s.id
       and not exists (select 1 from megamcp.checkpoints d where d.parent = c.id)
       and not exists (select 1 from megamcp.replaced_chains o where o.checkpoint = c.id)
    returning c.id, c.parent
), looked_at as (
    update megamcp.checkpoints c set leaf = exists (select 1 from gone g where g.parent = c.id)
     where c.void and c.id in (select s.id from seen s union select g.parent from gone g)
       and not exists (select 1 from gone g where g.id = c.id)
)
select count(*) from seen"""

DEAD_LAYERS = "select layer, environment from megamcp.dead_layers where since < $1 order by since, layer limit $2"
FORGET_LAYERS = """with forgotten as (delete from megamcp.dead_layers where layer = any($1::bigint[]))
    delete from megamcp.squashed_layers where layer = any($1::bigint[])"""

"""Every query on `megamcp.databases` and `megamcp.snapshots`, each with a name and a sentence over it.

The tables are the truth about what should exist; clusters follow. A row is committed before its database is made and
goes after it was dropped, so whatever is cut off in between is found here.
"""

# A rollout's own database, whatever its condition.
HEAD = """select d.name, d.cluster, d.status, d.rewind_to, d.collected, d.lineage, d.epoch,
    d.status = 'creating' and not megamcp.alive(d.owner) as orphaned
    from megamcp.databases d where d.rollout = $1 and d.server = $2"""

# The same for a checkpoint, with the copy that the line's last checkpoint can be played on from.
STANDING_HEAD = """select d.name, d.cluster, d.status, d.rewind_to, d.collected, d.lineage, s.sealed, s.sealed_position
    from megamcp.databases d left join megamcp.snapshots s on s.checkpoint = $3 and s.server = d.server
    where d.rollout = $1 and d.server = $2"""

# Where a rollout that has no database of its own stands: no row is the state that the environment starts with.
ORIGIN = """select s.database, s.position, s.sealed, s.sealed_position, d.cluster, d.lineage
    from megamcp.rollouts r join megamcp.snapshots s on s.checkpoint = r.checkpoint and s.server = $2
    join megamcp.databases d on d.name = s.database where r.id = $1"""

# The same of a checkpoint.
SNAPSHOT = """select s.database, s.position, s.sealed, s.sealed_position, d.cluster, d.lineage
    from megamcp.snapshots s join megamcp.databases d on d.name = s.database
    where s.checkpoint = $1 and s.server = $2"""

SOURCE = """select name, cluster, status, status = 'creating' and not megamcp.alive(owner) as orphaned
    from megamcp.databases where kind = 'source' and content = $1 and cluster = $2 and status <> 'dropping'"""

CONDEMN_SOURCE = "update megamcp.databases set status = 'dropping' where name = $1 and kind = 'source'"

# How busy each cluster is: a new rollout goes where the fewest databases are.
LOADS = "select cluster, count(*) as databases from megamcp.databases where status <> 'dropping' group by cluster"

PLAN = """insert into megamcp.databases (name, cluster, environment, server, kind, content, rollout, lineage, owner)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9) on conflict do nothing returning name"""

# A spare becomes a rollout's own. Still `creating`: it has to be bound first.
TAKE_SPARE = """update megamcp.databases d
       set kind = 'clone', status = 'creating', rollout = $1, server = $4, environment = $5, owner = $6,
           used_at = clock_timestamp()
    where d.name = (select x.name from megamcp.databases x where x.kind = 'spare' and x.status = 'ready'
                       and x.content = $2 and x.cluster = $3 limit 1 for update skip locked)
      and not exists (select 1 from megamcp.databases h where h.rollout = $1 and h.server = $4)
    returning d.name"""

READY = """update megamcp.databases set status = 'ready', sealed = $2, lineage = coalesce($3::jsonb, lineage)
    where name = $1 and status = 'creating' returning name"""

# What a process says that it is making, and what turned out to be made by nobody.
UNMADE = "select name from megamcp.databases where status = 'creating' and owner = $1"
CONDEMN_UNMADE = """update megamcp.databases set status = 'dropping', rollout = null, rewind_to = null
    where name = any ($1::text[]) and status = 'creating' returning name"""

# A rollout's database is ready, if the rollout still stands where it stood when the copy was begun.
HEAD_READY = """update megamcp.databases d set status = 'ready', epoch = $2, lineage = $4::jsonb, collected = $5
    from megamcp.rollouts r
    where d.name = $1 and d.status = 'creating' and d.rollout = r.id and r.status = 'open' and r.epoch = $2
      and r.checkpoint is not distinct from $3 returning d.name"""

UNRECORDED = """select n.nonce from unnest($1::uuid[]) as n(nonce)
    where not exists (select 1 from megamcp.events v where v.nonce = n.nonce)"""

# After a rollback to checkpoint $2 each database of the rollout is told to go back, or is given up where the position
# is not in its own log. Position 0 is in every log.
MOVE = """with target as (
    select d.name, case when s.database is null then 0
                        when s.database = d.name or (d.lineage ->> s.database)::bigint >= s.position then s.position
                   end as position
      from megamcp.databases d left join megamcp.snapshots s on s.checkpoint = $2 and s.server = d.server
     where d.rollout = $1
)
update megamcp.databases d
   set rewind_to = case when d.status = 'ready' then t.position end,
       rollout = case when d.status = 'ready' and t.position is not null then d.rollout end
  from target t where d.name = t.name"""

# A rollout ends: its databases are nobody's.
LEAVE = "update megamcp.databases set rollout = null, rewind_to = null where rollout = $1"

ABANDON = "update megamcp.databases set rollout = null, rewind_to = null where name = $1 and rollout = $2"

SETTLED = "update megamcp.databases set rewind_to = null where name = $1 and rewind_to = $2"

STATUS = "select status from megamcp.databases where name = $1"
CLUSTER_OF = "select cluster from megamcp.databases where name = $1"
COLLECTED_UPTO = "select collected from megamcp.databases where name = $1"

# The journal's row of a call that was recorded inside a database.
RECORD = "select megamcp.record_call($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"

STANDING = "select status, epoch, checkpoint, environment from megamcp.rollouts where id = $1"

# -- the keeper's -----------------------------------------------------------------------------------------------

# Copies that nobody may use any more and that still take connections.
OPEN_LEFTOVERS = """select name, cluster from megamcp.databases
    where kind = 'clone' and (status = 'full' or status = 'ready' and rollout is null) and not sealed limit $1"""

# Rollouts' databases that were looked at longest ago, and what each turned out to take.
UNMEASURED = """select name, cluster, rollout from megamcp.databases
    where rollout is not null and status = 'ready'
      and coalesce(measured_at, created_at) < clock_timestamp() - $2::interval
    order by measured_at nulls first limit $1"""
MEASURED = """update megamcp.databases set bytes = $2::bigint, measured_at = clock_timestamp(),
        status = case when status = 'ready' and rollout is not null and $2::bigint > $3::bigint then 'full'
                      else status end
    where name = $1 returning old.status = 'ready' and new.status = 'full'"""

# How far the log of each large database is needed by no checkpoint: each can be played on from its copy.
TRIMMABLE = """select d.name, d.cluster, min(coalesce(s.sealed_position, 0)) as upto
    from megamcp.databases d join megamcp.snapshots s on s.database = d.name
    where d.rollout is not null and d.status = 'ready' and d.bytes > $1
    group by d.name, d.cluster having min(coalesce(s.sealed_position, 0)) > 0"""

SEALED = "update megamcp.databases set sealed = true where name = $1"

# Snapshots of checkpoints that are gone for everybody. One that was only released may be being forked.
DROP_SNAPSHOTS = "delete from megamcp.snapshots s using megamcp.checkpoints c where c.id = s.checkpoint and c.void"

# What nothing needs any more, and what its maker left half done.
CONDEMN = """with old as (
    select d.name from megamcp.databases d
     where (d.status = 'creating' and not megamcp.alive(d.owner))
        or (d.kind = 'view' and d.status = 'ready' and d.used_at < clock_timestamp() - interval '60 s')
        or (d.kind = 'clone' and d.status in ('ready', 'full') and d.rollout is null and d.sealed
            and not exists (select 1 from megamcp.snapshots s where s.database = d.name or s.sealed = d.name))
        or (d.kind in ('source', 'spare') and d.status = 'ready' and d.content not like '%-' || $2
            and d.used_at < clock_timestamp() - interval '1 day')    -- another version's
     limit $1 for update skip locked
)
update megamcp.databases d set status = 'dropping', rollout = null from old where d.name = old.name
returning d.name"""

# A condemned database is dropped by whoever gets its row.
DROPPING = """select name, cluster from megamcp.databases where status = 'dropping' limit $1"""
LOCK_ROW = "select name from megamcp.databases where name = $1 and status = 'dropping' for update skip locked"
FORGET = "delete from megamcp.databases where name = $1 and status = 'dropping'"

# Sources that open rollouts have used lately, with the spares that each cluster has of them.
WANTED_SPARES = """select s.content, s.name as source, s.cluster, (
        select count(*) from megamcp.databases x where x.kind = 'spare' and x.content = s.content
           and x.cluster = s.cluster and x.status <> 'dropping') as spares
    from megamcp.databases s
    where s.kind = 'source' and s.status = 'ready'
      and s.used_at > clock_timestamp() - $1::interval"""

USED = "update megamcp.databases set used_at = clock_timestamp() where name = $1"

# Whether each database on a cluster should take connections.
DOORS = """select name, not sealed as open from megamcp.databases
    where cluster = $1 and (status = 'ready' or sealed and status = 'full')"""

NAMES = "select name from megamcp.databases where cluster = $1"

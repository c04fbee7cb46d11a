"""Every query on `megamcp.sandboxes`, `megamcp.images` and `megamcp.image_points`, each with a name and a sentence.

The tables are the truth about what should exist; the keeper follows. A row is committed before its sandbox or image is
made and goes after that was removed, so whatever is cut off in between is found here.
"""

from megamcp.store import ALIVE, WHOLE

# Whether a call after journal row $seq may have changed what a sandbox of that rollout and server knows.
_CALLED = """exists (select 1 from megamcp.events v where v.rollout = s.rollout and v.seq > s.seq and v.kind = 'call'
    and v.server = s.server)"""

# Whether the server has answered one: what it did in calls without an answer nobody was told.
_ANSWERED = _CALLED.replace("v.kind = 'call'", "v.kind = 'call' and v.state = 'done'")

# A rollout's sandbox, whatever its condition. `called`: what it knows, or knew, may be nowhere else.
HEAD = f"""select s.name, s.host, s.runtime, s.status, s.image, s.seq, s.modern, s.about, s.reason,
    case s.status when 'lost' then {_ANSWERED} else {_CALLED} end as called, s.owner,
    s.status = 'creating' and not megamcp.alive(s.owner) as orphaned
    from megamcp.sandboxes s where s.rollout = $1 and s.server = $2"""

# Where a rollout that has no sandbox of its own stands: no row is as the environment starts. A conversation goes on
# from an image only if that holds memory.
ORIGIN = """select i.name, i.host, i.runtime, i.status, case when i.memory then i.modern end as modern,
    case when i.memory then i.about end as about
    from megamcp.rollouts r join megamcp.image_points p on p.checkpoint = r.checkpoint and p.server = $2
    join megamcp.images i on i.name = p.image where r.id = $1"""

# The same of a checkpoint.
POINT = """select i.name, i.host, i.runtime, i.status, i.digest, i.memory
    from megamcp.image_points p join megamcp.images i on i.name = p.image where p.checkpoint = $1 and p.server = $2"""

# A server of which a checkpoint's image is gone for good.
LOST_OF = """select p.server from megamcp.image_points p join megamcp.images i on i.name = p.image
    where p.checkpoint = $1 and i.status = 'lost' order by p.server limit 1"""

# The last checkpoint that is whole, of a rollout's own line from where it stands ...
_LINE = f"""with recursive line (id, parent, back) as (
    %s
    union all
    select c.id, c.parent, l.back + 1 from line l join megamcp.checkpoints c on c.id = l.parent
)
select c.id from line l join megamcp.checkpoints c on c.id = l.id
 where {ALIVE} and {WHOLE} %s order by l.back limit 1"""
LAST_WHOLE = _LINE % (
    "select c.id, c.parent, 0 from megamcp.checkpoints c join megamcp.rollouts r on r.checkpoint = c.id and r.id = $1",
    "and (c.rollout = $1 or c.id = (select r.parent_checkpoint from megamcp.rollouts r where r.id = $1))",
)
# ... and of all that lead to a checkpoint.
LAST_WHOLE_BEFORE = _LINE % ("select c.id, c.parent, 0 from megamcp.checkpoints c where c.id = $1", "")

# Where a rollout stands. `since` is the journal row after which calls are of now: none of them has a sandbox yet that
# is made at this point.
STANDING = """select r.status, r.epoch, r.checkpoint, r.environment, (
        select max(v.seq) from megamcp.events v
         where v.rollout = r.id and v.kind in ('open', 'fork', 'checkpoint', 'rollback')) as since
    from megamcp.rollouts r where r.id = $1"""

PLAN = """insert into megamcp.sandboxes (name, host, environment, server, runtime, rollout, image, seq, modern,
                                         about, owner)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) on conflict do nothing returning name"""

# A sandbox that is not there (parked, or lost with nothing in it) is made again under another name. Whoever books an
# answer of it holds its row: that is locked first, so that the answer is seen.
LOCK = "select 1 from megamcp.sandboxes where name = $1 for update"
REPLACE = f"""update megamcp.sandboxes s set name = $2, status = 'creating', owner = $3, host = $4, reason = null,
    (modern, about) = (select i.modern, i.about from megamcp.images i where i.name = s.image and i.memory)
    where name = $1 and (status = 'parked' or status = 'lost' and not {_ANSWERED}) returning name"""

# Ready, if the rollout still stands where it stood when it was begun.
READY = """update megamcp.sandboxes s set status = 'ready', used_at = clock_timestamp()
    from megamcp.rollouts r
    where s.name = $1 and s.status = 'creating' and s.rollout = r.id and r.status = 'open' and r.epoch = $2
    returning s.name"""

SPOKEN = "select modern, about from megamcp.sandboxes where name = $1"
SPOKE = "update megamcp.sandboxes set modern = $2, about = $3 where name = $1"

CONDEMN = "update megamcp.sandboxes set status = 'dropping', rollout = null where name = $1"
USED = "update megamcp.sandboxes set used_at = clock_timestamp() where name = $1"

# The end of a sandbox that nobody asked for.
LOST = """update megamcp.sandboxes set status = 'lost', reason = $2 where name = $1 and status = 'ready'
    returning server"""

# Answered calls that are lost with a sandbox are told of in the journal: once, since its rollout's row is locked before
# it is looked. An answer may be booked after the end, so it is looked again whenever somebody is told.
LOCK_ROLLOUT_OF = """select r.id from megamcp.rollouts r join megamcp.sandboxes s on s.rollout = r.id where s.name = $1
    for no key update of r"""
TELL_LOST = f"""with gone as (
    select s.rollout, s.server, s.reason from megamcp.sandboxes s
     where s.name = $1 and s.status = 'lost' and {_ANSWERED}
       and not exists (select 1 from megamcp.events v where v.rollout = s.rollout and v.seq > s.seq
                          and v.kind = 'state_lost' and v.server = s.server)
), counted as (
    update megamcp.rollouts r set seq = r.seq + 1 from gone g where r.id = g.rollout and r.status = 'open'
    returning r.id, r.seq
)
insert into megamcp.events (rollout, seq, kind, server, data)
select c.id, c.seq, 'state_lost', g.server,
       jsonb_build_object('server', g.server, 'reason', g.reason, 'checkpoint', $2::text)
  from counted c, gone g"""

# What it printed last, for whoever is told of the end.
LAST_WORDS = """update megamcp.sandboxes set reason = reason || E'.\\nIt printed last:\\n' || $2
    where name = $1 and status = 'lost' and reason not like '%It printed last:%'"""

# What a keeper that was started anew doesn't have any more.
READY_HERE = "select name from megamcp.sandboxes where host = $1 and status = 'ready'"
IMAGES_HERE = "select name from megamcp.images where host = $1 and status = 'ready'"
IMAGE_LOST = "update megamcp.images set status = 'lost' where name = $1 and status = 'ready'"

# -- checkpoints ------------------------------------------------------------------------------------------------

# Calls of these servers that run; the rollout's row is locked, so none can begin.
LOCK_ROLLOUT = "select 1 from megamcp.rollouts where id = $1 for no key update"
LOCK_IDLE_ROLLOUT = "select 1 from megamcp.rollouts where id = $1 and status = 'open' for no key update skip locked"
RUNNING = """select exists (select 1 from megamcp.events v where v.rollout = $1 and v.kind = 'call'
    and v.state = 'running' and v.server = any ($2::text[]))"""

IMAGE = "select name, host, runtime, status, digest, memory from megamcp.images where name = $1"
PLAN_IMAGE = """insert into megamcp.images (name, host, environment, server, runtime, modern, about, owner)
    select $1, s.host, s.environment, s.server, s.runtime, s.modern, s.about, $3
      from megamcp.sandboxes s where s.name = $2"""
# It stays `creating`, its owner's, until a checkpoint is published that keeps it, or its sandbox is given up for it.
FROZEN = """update megamcp.images set memory = $2, digest = $3, bytes = $4
    where name = $1 and status = 'creating' returning name"""
IMAGE_READY = """with made as (
    update megamcp.images set status = 'ready' where name = $1 and status = 'creating' returning name
) select name from made union all select name from megamcp.images where name = $1 and status = 'ready'"""
STANDS_AS = "update megamcp.sandboxes set image = $2, seq = $3 where name = $1"
CONDEMN_IMAGE = "update megamcp.images set status = 'dropping' where name = $1 and status = 'creating'"
KEEP_POINT = "insert into megamcp.image_points (checkpoint, server, image) values ($1, $2, $3)"

# After a rollback to checkpoint $2: a sandbox that stands there, and was asked nothing since, is kept; the others are
# given up.
MOVE = f"""update megamcp.sandboxes s set status = 'dropping', rollout = null
    where s.rollout = $1 and (s.status = 'creating' or {_CALLED} or s.image is distinct from (
        select p.image from megamcp.image_points p where p.checkpoint = $2 and p.server = s.server))
    returning s.name"""

# A rollout ends: its sandboxes are nobody's.
LEAVE = "update megamcp.sandboxes set status = 'dropping', rollout = null where rollout = $1 returning name"

# -- the tender's -----------------------------------------------------------------------------------------------

ANY = "select exists (select 1 from megamcp.sandboxes) or exists (select 1 from megamcp.images)"
CONDEMN_ORPHANS = """update megamcp.sandboxes set status = 'dropping', rollout = null
    where status = 'creating' and not megamcp.alive(owner)"""
CONDEMN_IMAGES = """with old as (
    select i.name from megamcp.images i
     where (i.status = 'creating' and (not megamcp.alive(i.owner) or i.created_at < clock_timestamp() - $2::interval))
        or (i.status in ('ready', 'lost') and i.created_at < clock_timestamp() - interval '2 s'
            and not exists (select 1 from megamcp.image_points p where p.image = i.name)
            and not exists (select 1 from megamcp.sandboxes s where s.image = i.name))
     limit $1 for update skip locked
)
update megamcp.images i set status = 'dropping' from old where i.name = old.name returning i.name"""
# Of checkpoints that nothing stands on and nobody can come back to. One that was only released may be being forked.
DROP_POINTS = "delete from megamcp.image_points p using megamcp.checkpoints c where c.id = p.checkpoint and c.void"
DROPPING = "select name from megamcp.sandboxes where host = $1 and status = 'dropping' limit $2"
DROPPING_IMAGES = "select name from megamcp.images where host = $1 and status = 'dropping' limit $2"
# By a gateway of the host's own: another one's keeper says of any name that it isn't there.
FORGET = "delete from megamcp.sandboxes where name = $1 and host = $2 and status = 'dropping'"
FORGET_IMAGE = "delete from megamcp.images where name = $1 and status = 'dropping'"
KNOWN = "select name from megamcp.sandboxes where host = $1 union all select name from megamcp.images where host = $1"

# What has no process any more, by its row.
ENDED_HERE = "select name from megamcp.sandboxes where host = $1 and status in ('parked', 'lost')"

# Sandboxes that nothing has used for long and that can wait on disk, memory and all. `used_at` is when one was last
# opened, or found to be unable to wait; the journal has its calls.
IDLE = """select s.name, s.rollout, s.server from megamcp.sandboxes s
    where s.host = $1 and s.status = 'ready' and s.runtime = 'criu' and s.rollout is not null
      and s.used_at < clock_timestamp() - $2::interval
      and coalesce((select coalesce(v.ended_at, v.at) from megamcp.events v
                     where v.rollout = s.rollout and v.kind = 'call' and v.server = s.server
                     order by v.seq desc limit 1) < clock_timestamp() - $2::interval, true)
      and not exists (select 1 from megamcp.events v where v.rollout = s.rollout and v.server = s.server
                         and v.kind = 'call' and not v.exact and v.state = 'running') limit $3"""
PARK = """update megamcp.sandboxes s set status = 'parked', image = $2, seq = r.seq from megamcp.rollouts r
    where s.name = $1 and s.status = 'ready' and r.id = s.rollout returning s.name"""

"""Every query on the control plane's tables, each with a name and a sentence over it (of layers: `layers.py`).

A `Store` owns the process's connections. It turns PostgreSQL's errors into this project's tree at one place
(`translate`), holds no state besides them, and decides nothing:
when to fork, lock or reap is said in `rollouts.py`.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from megamcp import outages
from megamcp.connections import Connections, reusable
from megamcp.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    Gone,
    MegaMCPError,
    NoCapacity,
    NotFound,
    Unauthorized,
    Unavailable,
    Unprocessable,
)
from megamcp.state.names import literal

ROLLOUT = """r.id, r.environment, e.name || '@' || e.hash as environment_name, r."group", r.status, r.parent_checkpoint,
    r.checkpoint, r.layer, r.seq, r.epoch, r.turn, r.depth, r.dirty, r.seed, r.labels, r.created_at, r.expires_at"""

CHECKPOINT = """c.id, c.rollout, c.environment, e.name || '@' || e.hash as environment_name, c.parent, c.turn,
    c.depth, c.seq, c.epoch, c.chain, c.layer, c.sums, c.digest, c.label, c.seed, c.created_at, c.expires_at,
    array(select p.owner from megamcp.pins p where p.checkpoint = c.id and p.expires_at > clock_timestamp()
          order by p.owner) as pins"""

ALIVE = """c.released_at is null and (c.expires_at > clock_timestamp() or exists (
    select 1 from megamcp.pins p where p.checkpoint = c.id and p.expires_at > clock_timestamp()))"""
WHOLE = """not exists (select 1 from megamcp.image_points p join megamcp.images i on i.name = p.image
    where p.checkpoint = c.id and i.status = 'lost')"""

# The newest version of an environment, or the one that is named by its hash.
ENVIRONMENT = """select e.* from megamcp.environments e
    where e.name = $1 and ($2::text is null or e.hash = $2) order by e.loaded_at desc, e.id desc limit 1"""

# New rollouts on the environment's first state, each with the row that opens its journal.
OPEN = f"""with made as (
    insert into megamcp.rollouts (id, environment, "group", layer, seq, seed, labels, expires_at, tenant, key)
    select x.id, $2, $3, nextval('megamcp.layer_seq'), 1, $4, $5::jsonb, clock_timestamp() + $6, $7, $8
      from unnest($1::text[]) as x(id)
    returning *
), told as (
    insert into megamcp.events (rollout, seq, kind, data)
    select id, seq, 'open', jsonb_build_object('seed', seed) from made
)
select {ROLLOUT} from made r join megamcp.environments e on e.id = r.environment"""

# New rollouts on a checkpoint, of its tenant. The row lock keeps the reaper from taking it meanwhile.
FORK = f"""with origin as (
    select c.*, coalesce(o.tenant, $7) as tenant from megamcp.checkpoints c
      left join megamcp.rollouts o on o.id = c.rollout where c.id = $2 and {ALIVE} and {WHOLE} for key share of c
), made as (
    insert into megamcp.rollouts (id, environment, "group", parent_checkpoint, parent_rollout, checkpoint, layers,
                                  layer, start_seq, seq, turn, depth, seed, labels, expires_at, tenant, key)
    select x.id, c.environment, $3, c.id, c.rollout, c.id, cardinality(c.chain), nextval('megamcp.layer_seq'),
           c.seq, c.seq + 1, c.turn, c.depth, coalesce(x.seed, c.seed), $5::jsonb, clock_timestamp() + $6, c.tenant, $8
      from origin c, unnest($1::text[], $4::bigint[]) as x(id, seed)
    returning *
), told as (
    insert into megamcp.events (rollout, seq, kind, data)
    select id, seq, 'fork', jsonb_build_object('checkpoint', parent_checkpoint, 'parent', parent_rollout, 'seed', seed)
      from made
)
select {ROLLOUT} from made r join megamcp.environments e on e.id = r.environment"""

# One rollout; the chain of its head comes along, and the one that squashing has put in its place.
ROLLOUT_BY_ID = f"""select {ROLLOUT},
    coalesce(o.chain, c.chain, '{{}}') as chain, coalesce(c.chain, '{{}}') as squashed, coalesce(c.sums, '{{}}') as sums
    from megamcp.rollouts r join megamcp.environments e on e.id = r.environment
    left join megamcp.checkpoints c on c.id = r.checkpoint
    left join megamcp.replaced_chains o on o.checkpoint = r.checkpoint and o.layers = r.layers where r.id = $1"""

# A page of rollouts, oldest first.
ROLLOUTS = f"""select {ROLLOUT} from megamcp.rollouts r join megamcp.environments e on e.id = r.environment
    where ($1::text is null or r."group" = $1) and ($2::text is null or r.status = $2)
      and ($3::text is null or e.name = $3 or e.name || '@' || e.hash = $3)
      and ($4::timestamptz is null or (r.created_at, r.id) > ($4, $5)) and ($7::text is null or r.tenant = $7)
    order by r.created_at, r.id limit $6"""

# A longer lease.
RENEW_ROLLOUT = """update megamcp.rollouts set expires_at = clock_timestamp() + $2
    where id = $1 and status = 'open' returning id"""

# What gateway processes tell each other, and the channel of each: any login may listen to one whose name it knows.
CANCELLATIONS, MOVES = "cancellations", "moves"
CHANNEL = "select megamcp.channel($1)"
TELL_CANCELLED = f"select pg_notify(megamcp.channel('{CANCELLATIONS}'), $1)"

# Tells of a rollback (with the epoch that it began) or, without an epoch, of a rollout's end.
TELL_MOVE = f"select pg_notify(megamcp.channel('{MOVES}'), json_build_array($1::text, $2::bigint)::text)"

# The same where a rollout stays at its epoch: what processes have noted of its databases is no longer true.
TELL_STANDING = f"""select pg_notify(megamcp.channel('{MOVES}'), json_build_array(id, epoch)::text)
    from megamcp.rollouts where id = $1"""


def take_lock(lock: str, rollout: str, wait_s: float) -> str:
    """A rollout's lock for the transaction, in one round trip. Raises `BadRequest` for an id that no text is."""
    if "\0" in rollout:
        raise BadRequest("A rollout's id holds a NUL character.", code="nul_character")
    return (
        f"set local lock_timeout = {int(wait_s * 1000)};"
        f"select {lock}(megamcp.lock_key({literal(rollout)})); set local lock_timeout = '30s'"
    )


# With a query of rollouts: their rows stay locked.
ROW_LOCK = " for no key update of r"

# The last layer that two points have in common: of the newest checkpoint that both stand on. Null without one.
LAST_COMMON_LAYER = """with recursive a(id, parent, depth, chain) as (
    select c.id, c.parent, c.depth, c.chain from megamcp.checkpoints c where c.id = $1
    union all
    select c.id, c.parent, c.depth, c.chain from a join megamcp.checkpoints c on c.id = a.parent
), b(id, parent) as (
    select c.id, c.parent from megamcp.checkpoints c where c.id = $2
    union all
    select c.id, c.parent from b join megamcp.checkpoints c on c.id = b.parent
)
select a.chain[cardinality(a.chain)] from a join b on b.id = a.id order by a.depth desc limit 1"""

# What ends a rollout: its head's layer is dead, its position is given up, its journal stays.
END_ROLLOUT = """with ended as (
    update megamcp.rollouts r set status = $2, closed_at = clock_timestamp(), checkpoint = null, layers = 0,
           seq = r.seq + 1
     where r.id = $1 and r.status = 'open' and (not $3 or r.expires_at <= clock_timestamp()) returning r.*
), told as (
    insert into megamcp.events (rollout, seq, kind, data)
    select id, seq, 'close', jsonb_build_object('status', status) from ended
), dead as (
    insert into megamcp.dead_layers (layer, environment) select layer, environment from ended where dirty
    on conflict do nothing
)
select count(*) from ended"""

# Publishes a checkpoint and moves the rollout's head onto a fresh layer, unless the old one holds nothing.
_PUBLISH = """with made as (
    insert into megamcp.checkpoints (id, rollout, environment, parent, turn, depth, seq, epoch, chain, layer, sums,
                                     digest, label, seed, expires_at)
    select $2, r.id, r.environment, r.checkpoint, coalesce($3, r.turn + 1), r.depth + 1, r.seq, r.epoch,
           $4::bigint[], $5, $6::jsonb, $7, $8, r.seed, clock_timestamp() + $9
      from megamcp.rollouts r where r.id = $1
    returning *
), moved as (
    update megamcp.rollouts r
       set checkpoint = m.id, layers = cardinality(m.chain), turn = m.turn, depth = m.depth, seq = r.seq + 1,
           dirty = false, layer = case when m.layer is null then r.layer else nextval('megamcp.layer_seq') end
      from made m where r.id = m.rollout
    returning r.id, r.seq
), told as (
    insert into megamcp.events (rollout, seq, kind, data)
    select v.id, v.seq, 'checkpoint',
           jsonb_build_object('checkpoint', m.id, 'turn', m.turn, 'label', m.label, 'digest', m.digest)
      from moved v, made m
)"""
_PUBLISHED = """
select m.*, e.name || '@' || e.hash as environment_name, array[]::text[] as pins
  from made m join megamcp.environments e on e.id = m.environment"""
PUBLISH_CHECKPOINT = _PUBLISH + _PUBLISHED

# The same with the points of the rollout's own databases. The journal has their calls up to each point's; copies that
# were made for it are ready with it. No row where one of those was condemned meanwhile.
PUBLISH_CHECKPOINT_AND_POINTS = f"""{_PUBLISH}, point as (
    select * from unnest($10::text[], $11::text[], $12::bigint[], $13::text[], $14::bigint[], $15::bigint[])
        as x(server, database, position, sealed, sealed_position, call)
), heard as (
    update megamcp.databases d set collected = greatest(d.collected, p.call)
      from point p where d.name = p.database and d.rollout = $1
), kept as (
    update megamcp.databases d set status = 'ready', sealed = true
      from point p where d.name = p.sealed and d.status = 'creating' returning d.name
), stands as (
    insert into megamcp.snapshots (checkpoint, server, database, position, sealed, sealed_position)
    select m.id, p.server, p.database, p.position, p.sealed, p.sealed_position from made m, point p
     where p.sealed is null or exists (select 1 from kept k where k.name = p.sealed)
        or exists (select 1 from megamcp.databases d where d.name = p.sealed and d.status = 'ready')
    returning server
){_PUBLISHED} where (select count(*) from stands) = (select count(*) from point)"""

# Moves the head back. The abandoned layer is dead; its rows are invisible from this statement on.
MOVE_BACK = """with old as (
    select * from megamcp.rollouts where id = $1
), target as (
    select c.* from megamcp.checkpoints c where c.id = $2 and not c.void for key share
), moved as (
    update megamcp.rollouts r
       set checkpoint = c.id, layers = cardinality(c.chain), layer = nextval('megamcp.layer_seq'),
           epoch = r.epoch + 1, seq = r.seq + 1, turn = c.turn, depth = c.depth, dirty = false
      from target c where r.id = $1
    returning r.*
), told as (
    insert into megamcp.events (rollout, seq, kind, data)
    select m.id, m.seq, 'rollback', jsonb_build_object('checkpoint', m.checkpoint, 'from', o.checkpoint, 'turn', m.turn)
      from moved m, old o
), dead as (
    insert into megamcp.dead_layers (layer, environment) select layer, environment from old where dirty
    on conflict do nothing
)
select count(*) from moved"""

# One checkpoint with its pins, alive or not.
CHECKPOINT_BY_ID = f"""select {CHECKPOINT}, {ALIVE} as alive
    from megamcp.checkpoints c join megamcp.environments e on e.id = c.environment where c.id = $1"""

# A rollout's own live checkpoints, oldest first.
CHECKPOINTS = f"""select {CHECKPOINT} from megamcp.checkpoints c join megamcp.environments e on e.id = c.environment
    where c.rollout = $1 and {ALIVE} order by c.created_at, c.depth"""

RENEW_CHECKPOINT = f"""update megamcp.checkpoints c set expires_at = clock_timestamp() + $2
    where c.id = $1 and {ALIVE} returning c.id"""

# Pins and releases of one checkpoint take turns: each decides by what the other left.
LOCK_CHECKPOINT = "select 1 from megamcp.checkpoints where id = $1 for no key update"

# Ends a checkpoint's lease now; its row stays while something stands on it.
RELEASE_CHECKPOINT = """update megamcp.checkpoints c set released_at = clock_timestamp()
    where c.id = $1 and c.released_at is null
      and not exists (select 1 from megamcp.pins p where p.checkpoint = c.id and p.expires_at > clock_timestamp())
    returning c.id"""

PIN = f"""insert into megamcp.pins (checkpoint, owner, expires_at)
    select c.id, $2, clock_timestamp() + $3 from megamcp.checkpoints c where c.id = $1 and {ALIVE} for key share of c
    on conflict (checkpoint, owner) do update set expires_at = excluded.expires_at returning owner"""

UNPIN = "delete from megamcp.pins where checkpoint = $1 and owner = $2"

# A page of the journal with the ancestors' part: each ancestor up to the point where the line left it.
EVENTS = """with recursive line(id, parent, first, last) as (
    select r.id, r.parent_rollout, r.start_seq, null::bigint from megamcp.rollouts r where r.id = $1
    union all
    select p.id, p.parent_rollout, p.start_seq, l.first
      from line l join megamcp.rollouts p on p.id = l.parent
)
select v.rollout, v.seq, v.kind, v.at, v.data, v.server, v.tool, v.arguments, v.state,
       megamcp.event_result(v) as result, v.is_error, extract(epoch from v.ended_at - v.at) * 1000 as duration_ms
  from line l join megamcp.events v on v.rollout = l.id and v.seq > l.first and (l.last is null or v.seq <= l.last)
 where v.seq > $2 order by v.seq limit $3"""

SCORE = """with next as (
    update megamcp.rollouts r set seq = r.seq + 1 where r.id = $1 returning r.id, r.seq
)
insert into megamcp.events (rollout, seq, kind, data) select id, seq, 'score', $2::jsonb from next returning seq"""

# Backends of tool servers and evaluators that hold a rollout's lock; what they run is in their name.
HOLDERS = """select l.pid, a.application_name as name from pg_locks l join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'advisory' and l.granted and l.objsubid = 1
      and l.database = (select oid from pg_database where datname = current_database())
      and l.classid::bigint = ((megamcp.lock_key($1) >> 32) & 4294967295)
      and l.objid::bigint = (megamcp.lock_key($1) & 4294967295) and a.usename <> current_user"""

# What the agent of a call that is about to be ended will be told.
TELL_ENDED = """insert into megamcp.ended_calls (nonce, reason) select x, $2 from unnest($1::uuid[]) as x
    on conflict do nothing"""
FORGET_ENDED = "delete from megamcp.ended_calls where at < clock_timestamp() - interval '1 hour'"

# Those of them that still hold the lock: a backend may serve another rollout by now.
END_HOLDERS = f"select count(pg_terminate_backend(h.pid)) from ({HOLDERS}) h where h.pid = any($2::integer[])"

# Ends the backend of one call, whether it runs or still waits for the rollout.
END_CALL = """select count(pg_terminate_backend(a.pid)) from pg_stat_activity a
    where a.application_name = 'call ' || $1::uuid::text and a.datname = current_database()
      and a.usename <> current_user"""

# An exactly-once call that will get no answer: its error goes to the journal, or its recorded result comes back.
CALL_FAIL = "select recorded, result, is_error from megamcp.call_fail($1, $2, $3, $4)"

# At most once: the row before the call, or the row that the same key left.
CALL_INTENT = """select found_state, result, is_error, seq
    from megamcp.call_intent($1, $2, $3, $4, $5, $6, $7, $8)"""

# The row after the call; false when the rollout was rolled back or released meanwhile.
CALL_OUTCOME = "select megamcp.call_outcome($1, $2, $3, $4, $5, case when $6 then 'done' else 'failed' end)"

# The same of a sandbox's answer; no row where it was replaced. Its row is locked: who would replace it sees the answer.
CALL_OUTCOME_IN = f"""with held as (select 1 from megamcp.sandboxes s where s.name = $7 for key share)
{CALL_OUTCOME} from held"""

# Of a call that its server refused before it began: another try may have its key.
CALL_REFUSED = "select megamcp.call_refused($1, $2, $3, $4)"

# What every request of the data plane asks first.
ROLLOUT_EPOCH = "select environment, epoch, status, tenant from megamcp.rollouts where id = $1"

# The live rollout of a client that knows only a fixed URL and shows the same key each time.
ROLLOUT_OF_KEY = """select r.id from megamcp.rollouts r
    where r."group" = $1 and r.environment = $2 and r.tenant = $3 and r.status = 'open'
      and r.expires_at > clock_timestamp() order by r.created_at limit 1"""

COUNT_OPEN = "select count(*) from megamcp.rollouts where status = 'open'"

# Calls whose gateway died between the intent and the outcome.
LOSE_INTENTS = """update megamcp.events v set state = 'unknown', ended_at = clock_timestamp()
    where v.kind = 'call' and not v.exact and v.state = 'running' and v.owner is not null
      and not exists (select 1 from pg_locks l where l.locktype = 'advisory' and l.granted and l.objsubid = 1
                         and l.database = (select oid from pg_database where datname = current_database())
                         and l.classid::bigint = ((v.owner >> 32) & 4294967295)
                         and l.objid::bigint = (v.owner & 4294967295))"""

EXPIRED_ROLLOUTS = """select id from megamcp.rollouts where status = 'open' and expires_at <= clock_timestamp()
    order by expires_at limit $1"""

# Two statements: whether a pin came meanwhile is seen only after the rows are locked.
LOCK_EXPIRED_CHECKPOINTS = """select c.id from megamcp.checkpoints c
     where c.released_at is null and c.expires_at <= clock_timestamp()
       and not exists (select 1 from megamcp.pins p where p.checkpoint = c.id and p.expires_at > clock_timestamp())
     order by c.expires_at limit $1 for no key update skip locked"""
RELEASE_EXPIRED_CHECKPOINTS = """update megamcp.checkpoints c set released_at = clock_timestamp()
    where c.id = any($1::text[]) and c.released_at is null and c.expires_at <= clock_timestamp()
      and not exists (select 1 from megamcp.pins p where p.checkpoint = c.id and p.expires_at > clock_timestamp())"""

# Journals of rollouts that ended long ago and hold no checkpoint any more.
DROP_JOURNALS = """with old as (
    select r.id from megamcp.rollouts r
     where r.status <> 'open' and r.closed_at < clock_timestamp() - $1::interval
       and not exists (select 1 from megamcp.checkpoints c where c.rollout = r.id)
     order by r.closed_at limit $2
), events as (
    delete from megamcp.events v using old where v.rollout = old.id
)
delete from megamcp.rollouts r using old where r.id = old.id returning r.id"""

# The oldest large results, as far as they exceed the budget.
DROP_BLOBS = """delete from megamcp.blobs b using (
    select hash, sum(bytes) over (order by created_at desc, hash) as total from megamcp.blobs) s
    where s.hash = b.hash and s.total > $1 returning b.hash"""

_BY_SQLSTATE: dict[str, type[MegaMCPError]] = {
    "MM401": Unauthorized,
    "MM402": DeadlineExceeded,
    "MM403": Conflict,
    "MM404": NotFound,
    "MM408": DeadlineExceeded,
    "MM409": Conflict,
    "MM410": Gone,
    "MM422": Unprocessable,
    "MM423": Conflict,
    "MM424": Conflict,
}


def translate(error: BaseException) -> MegaMCPError | None:
    """This project's error for one of PostgreSQL's, or None where it isn't the caller's or the network's."""
    if isinstance(error, MegaMCPError):
        return error
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        if state in _BY_SQLSTATE:
            detail = json.loads(error.detail or "{}")
            return _BY_SQLSTATE[state](detail.get("message", str(error)), code=detail.get("code"))
        if state in ("53300", "53400"):
            return NoCapacity("PostgreSQL has no connection left.", code="database_busy")
        if state[:2] in ("57", "08"):
            return Unavailable("The database is away.", code="database_unavailable", hint="Try again in a moment.")
        if state == "55P03":
            return DeadlineExceeded("The rollout is busy: another operation holds it.", code="rollout_busy")
        if state in ("22021", "22P05"):
            return BadRequest("Text holds a NUL character, which PostgreSQL can't store.", code="nul_character")
        if state[:2] == "22":  # every statement here is our own: only a value of the caller's can be at fault
            return BadRequest(f"A value is out of range: {error}.", code="value_out_of_range")
    if isinstance(error, asyncpg.DataError):
        return BadRequest(f"A value is out of range: {error}.", code="value_out_of_range")
    if isinstance(error, outages.BROKEN):
        return Unavailable("The database is away.", code="database_unavailable", hint="Try again in a moment.")
    return None


@contextmanager
def translated() -> Any:
    """Raise this project's errors instead of PostgreSQL's."""
    try:
        yield
    except outages.DRIVER as error:
        known = translate(error)
        if known is None:
            raise
        raise known from error


@dataclass(frozen=True, slots=True)
class Store:
    """The connections and the few ways to use them."""

    connections: Connections

    @classmethod
    @asynccontextmanager
    async def open(cls, dsn: str, connections: int) -> AsyncIterator["Store"]:
        """A store on connections of its own, made when they are needed and again after an outage."""
        settings = {
            "application_name": "megamcp",
            "jit": "off",
            "lock_timeout": "30s",
            # A gateway that freezes in the middle of a move must not keep the rollout from the others.
            "idle_in_transaction_session_timeout": "60s",
            "tcp_keepalives_idle": "30",
            "tcp_keepalives_interval": "10",
            "tcp_keepalives_count": "3",
        }
        async with Connections.open(dsn, connections, init=_prepare, settings=settings) as opened:
            yield cls(opened)

    @asynccontextmanager
    async def connection(self, wait_s: float = 10) -> AsyncIterator[asyncpg.Connection]:
        """A connection of the control role. Raises `NoCapacity` when none gets free in `wait_s`."""
        with translated():
            connection = await self._take(wait_s)
            clean = False
            try:
                yield connection
                clean = reusable(connection)
            finally:
                await self.connections.give(connection, clean=clean)

    @asynccontextmanager
    async def transaction(self, wait_s: float = 10) -> AsyncIterator[asyncpg.Connection]:
        """A READ COMMITTED transaction of the control role."""
        async with self.connection(wait_s) as connection, connection.transaction():
            yield connection

    async def row(self, query: str, *arguments: Any) -> asyncpg.Record | None:
        """First row of a query."""
        return await self._once("fetchrow", query, arguments)

    async def rows(self, query: str, *arguments: Any) -> Sequence[asyncpg.Record]:
        """All rows of a query."""
        rows: Sequence[asyncpg.Record] = await self._once("fetch", query, arguments)
        return rows

    async def value(self, query: str, *arguments: Any) -> Any:
        """First column of the first row."""
        return await self._once("fetchval", query, arguments)

    async def _once(self, fetch: str, query: str, arguments: Sequence[Any]) -> Any:
        # Every tool call comes through here, twice: no context managers, which cost as much as the query does.
        connection, clean = None, False
        try:
            connection = await self._take(10)
            result = await getattr(connection, fetch)(query, *arguments)
            clean = True
        except outages.DRIVER as error:
            known = translate(error)
            if known is None:
                raise
            raise known from error
        finally:
            if connection is not None:
                await self.connections.give(connection, clean=clean)
        return result

    async def _take(self, wait_s: float) -> asyncpg.Connection:
        try:
            return await self.connections.take(wait_s)
        except TimeoutError as error:
            raise NoCapacity(
                "All control connections are busy.",
                code="control_busy",
                hint="Raise MEGAMCP_CONTROL_CONNECTIONS, or send fewer requests at once.",
            ) from error


async def _prepare(connection: asyncpg.Connection) -> None:
    for kind in ("json", "jsonb"):
        await connection.set_type_codec(kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")


def seconds(value: float) -> timedelta:
    """A duration as asyncpg wants it for an interval."""
    return timedelta(seconds=value)


def cursor_of(row: asyncpg.Record) -> str:
    """The page cursor after a row: opaque to clients."""
    return f"{row['created_at'].isoformat()}~{row['id']}"


def read_cursor(cursor: str | None) -> tuple[datetime | None, str | None]:
    """A cursor's parts. Raises `BadRequest` for what this gateway didn't make."""
    if cursor is None:
        return None, None
    created, _, rollout = cursor.partition("~")
    try:
        return datetime.fromisoformat(created).astimezone(UTC), rollout
    except (ValueError, OverflowError) as error:
        raise BadRequest(
            "The cursor is not one of this gateway's.", code="invalid_cursor", hint="Pass next_cursor unchanged."
        ) from error

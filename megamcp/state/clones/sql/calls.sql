-- Calls on this database, exactly once: lock, effects and result in one transaction. Same functions, order and SQLSTATEs
-- as the control plane's (megamcp/sql/control.sql), so that the tool servers' SDK is the same.
--
-- The record is kept here, outside the undo log, and is copied to the journal from here. Idempotency keys belong to a
-- rollout and its path: a rewind starts a new segment of the path, and calls that came after its mark are off it.

-- SQLSTATEs: MM401 handle forged or malformed · MM402 handle expired · MM403 handle used before · MM409 rolled back
-- meanwhile · MM408 deadline passed while waiting · MM422 idempotency key reused · MM423 transaction lost
-- MM424 tool committed

create type megamcp.handle as (
    rollout text, server text, epoch integer, mode text, nonce uuid, deadline timestamptz, key text, fingerprint bytea,
    point text
);

create table megamcp.keys (name text primary key, inner_pad bytea not null, outer_pad bytea not null);

-- A stretch of the log from one rewind to the next. Those that the present state stands on are its path.
create table megamcp.segments (
    id bigint generated always as identity primary key,
    parent bigint references megamcp.segments,
    origin bigint,                      -- the parent's mark that was come back to
    call bigint not null,               -- the last one of the parent that is on the path
    start bigint not null               -- position at which the state was the origin's
);

-- Whose database this is: one row. Nobody's (a source, a sealed copy): rollout is null.
create table megamcp.here (
    single boolean primary key default true check (single),
    rollout text,
    server text,
    epoch integer,
    segment bigint not null,            -- no foreign keys onto segments: each call of a fresh copy would write their page
    hand integer,                       -- backend that puts rows back on behalf of the one who has the lock
    trimmed bigint not null default 0   -- the log is whole above this position only
);
with first as (insert into megamcp.segments (call, start) values (0, 0) returning id)
insert into megamcp.here (segment) select id from first;

create table megamcp.calls (
    id bigint generated always as identity primary key,
    nonce uuid not null unique,
    rollout text not null,
    server text not null,
    epoch integer not null,
    segment bigint not null,
    mode text not null,
    tool text not null,
    arguments text not null,
    outcome text not null,              -- done or failed
    result text not null,
    is_error boolean not null,
    idempotency_key text,
    fingerprint bytea,
    began timestamptz not null,
    ended timestamptz not null default clock_timestamp()
);
create index on megamcp.calls (idempotency_key, id) where idempotency_key is not null;

-- `asked`: how often it was asked whether the call is over, in the statement of the client's that came in at `asked_in`.
create table megamcp.open_calls (
    nonce uuid primary key,
    started_at timestamptz not null default clock_timestamp(),
    asked integer not null default 0,
    asked_in timestamptz
);
create table megamcp.ended_calls (nonce uuid primary key, reason text not null);

-- By this lock the gateway finds the backend of a call that it has to end, whatever the call's own SQL does to its name.
create function megamcp.call_lock(nonce uuid) returns bigint
language sql immutable parallel safe set search_path = pg_catalog, pg_temp
return hashtextextended(nonce::text, 7726);

-- Whose database this is. A fresh copy still says whose it was copied from, and when: the first call brings the gateway's
-- *deed*, a handle of mode d that names the database, as a setting of its session, and the copy is the deed's from then on.
create function megamcp.owner_now(h megamcp.handle) returns megamcp.here
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    here megamcp.here;
    deed text := current_setting('megamcp.deed', true);
    d megamcp.handle;
begin
    select x.* into here from megamcp.here x;
    if deed <> '' and (here.rollout, here.server, here.epoch) is distinct from (h.rollout, h.server, h.epoch) then
        d := megamcp.open_handle(deed);
        if d.mode = 'd' and d.point = current_database() then
            update megamcp.here x set rollout = d.rollout, server = d.server, epoch = d.epoch
             where (x.rollout, x.server) is distinct from (d.rollout, d.server) or x.epoch < d.epoch;
            select x.* into here from megamcp.here x;
        end if;
    end if;
    return here;
end $$;

-- Waits for the database's lock until the handle's deadline, then checks whose database this is now.
create function megamcp.admit(h megamcp.handle, shared boolean) returns megamcp.here
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    remaining bigint := least(2147483647, ceil(extract(epoch from h.deadline - clock_timestamp()) * 1000));
    before_lock text := current_setting('lock_timeout');
    here megamcp.here;
begin
    if remaining <= 0 then
        perform megamcp.refuse('MM402', 'handle_expired', 'The state handle has expired: its call''s deadline has passed.');
    end if;
    perform set_config('lock_timeout', remaining::text, true);
    begin
        perform pg_advisory_xact_lock_shared(megamcp.call_lock(h.nonce));
        if shared then
            perform pg_advisory_xact_lock_shared(7723);
        else
            perform pg_advisory_xact_lock(7723);
        end if;
    exception when lock_not_available then
        perform megamcp.refuse('MM408', 'deadline_exceeded',
            'The call waited for another call of this rollout until its deadline.');
    end;
    perform set_config('lock_timeout', before_lock, true);
    here := megamcp.owner_now(h);
    if here.rollout is distinct from h.rollout or here.server is distinct from h.server then
        perform megamcp.refuse('MM401', 'handle_foreign', 'The state handle was made for another database.');
    end if;
    if here.epoch is distinct from h.epoch then
        perform megamcp.refuse('MM409', 'rolled_back', 'The rollout was rolled back while this call was on its way.');
    end if;
    return here;
end $$;

create function megamcp.on_path(head bigint, segment bigint, call bigint) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
    with recursive path (segment, upto) as (
        select head, 9223372036854775807
        union all
        select s.parent, least(s.call, p.upto) from path p join megamcp.segments s on s.id = p.segment
         where s.parent is not null
    )
    select exists (select from path p where p.segment = on_path.segment and on_path.call <= p.upto)
$$;

create function megamcp.call_begin(token text, tool text, arguments text,
    out replayed boolean, out result text, out is_error boolean, out seed bigint, out clock timestamptz, out seq bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
    here megamcp.here;
    c megamcp.calls;
begin
    if h.mode not in ('r', 'w') then
        perform megamcp.refuse('MM401', 'handle_forged', 'This state handle is not for a call.');
    end if;
    perform set_config('application_name', 'call ' || h.nonce, true);
    here := megamcp.admit(h, h.mode = 'r');
    if h.mode = 'w' then
        insert into megamcp.open_calls (nonce) values (h.nonce);
    end if;
    if exists (select from megamcp.calls x where x.nonce = h.nonce) then
        perform megamcp.refuse('MM403', 'handle_replayed', 'The state handle was used before; each is good for one call.');
    end if;
    if h.key is not null then
        if h.mode = 'r' then    -- readers run in parallel, so the key needs a lock of its own
            perform pg_advisory_xact_lock(hashtextextended(h.key, 7724));
        end if;
        select x.* into c from megamcp.calls x
         where x.rollout = h.rollout and x.idempotency_key = h.key and megamcp.on_path(here.segment, x.segment, x.id)
         order by x.id desc limit 1;
        if found then
            if c.fingerprint is distinct from h.fingerprint then
                perform megamcp.refuse('MM422', 'idempotency_key_reused',
                    format('Idempotency key %s was used for another request (%s).', to_json(h.key), c.tool));
            end if;
            delete from megamcp.open_calls o where o.nonce = h.nonce and h.mode = 'w';
            replayed := true;
            result := c.result;
            is_error := c.is_error;
            seq := c.id;
            return;
        end if;
    end if;
    replayed := false;
    -- A tool server that hangs can't hold the rollout for longer than the call may take.
    perform set_config('transaction_timeout',
        least(2147483647, ceil(extract(epoch from h.deadline - clock_timestamp()) * 1000) + 2000)::bigint::text, true);
    perform set_config('megamcp.call', h.nonce::text, true);
end $$;

create function megamcp.append_call(h megamcp.handle, tool text, arguments text, result text, failed boolean,
    outcome text, began timestamptz) returns bigint
language sql volatile set search_path = pg_catalog, pg_temp as $$
    insert into megamcp.calls (nonce, rollout, server, epoch, segment, mode, tool, arguments, outcome, result, is_error,
                               idempotency_key, fingerprint, began)
    select h.nonce, h.rollout, h.server, here.epoch, here.segment, h.mode, tool, arguments, outcome, result, failed,
           -- The key of a call that failed is not kept: nothing was done, so a retry may do it.
           case when outcome = 'done' then h.key end, h.fingerprint, began
      from megamcp.here
     where here.rollout = h.rollout and here.server = h.server
       and (here.epoch = h.epoch or outcome = 'failed')
    returning id
$$;

create function megamcp.call_finish(token text, tool text, arguments text, result text, failed boolean)
returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
    began timestamptz;
    number bigint;
begin
    if h.mode = 'w' then
        delete from megamcp.open_calls o where o.nonce = h.nonce returning o.started_at into began;
    elsif current_setting('megamcp.call', true) = h.nonce::text then
        began := transaction_timestamp();
    end if;
    if began is not null then
        number := megamcp.append_call(h, tool, arguments, result, failed, 'done', began);
    end if;
    if number is null then
        perform megamcp.refuse('MM423', 'transaction_lost', 'The call''s transaction ended before the call did.');
    end if;
    return number;
end $$;

-- After the call's own transaction is gone: what it recorded, else its error is recorded now.
create function megamcp.call_fail(token text, tool text, arguments text, error_result text,
    out recorded boolean, out result text, out is_error boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
    c megamcp.calls;
begin
    if h.mode not in ('r', 'w') then
        perform megamcp.refuse('MM401', 'handle_forged', 'This state handle is not for a call.');
    end if;
    perform set_config('lock_timeout', '30000', true);
    insert into megamcp.open_calls (nonce) values (h.nonce);    -- waits for the call's own transaction
    delete from megamcp.open_calls o where o.nonce = h.nonce;
    select x.* into c from megamcp.calls x where x.nonce = h.nonce;
    if found then
        recorded := true;
        result := c.result;
        is_error := c.is_error;
        return;
    end if;
    -- Who ended the call said why: in words, or (a gateway that gave it up) as the whole result.
    select case when starts_with(x.reason, '{') then x.reason
                else jsonb_build_object('isError', true, 'content', jsonb_build_array(
                         jsonb_build_object('type', 'text', 'text', x.reason)))::text end
      into result from megamcp.ended_calls x where x.nonce = h.nonce;
    perform megamcp.owner_now(h);
    result := coalesce(result, error_result);
    recorded := result <> error_result;
    is_error := true;
    begin
        perform megamcp.append_call(h, tool, arguments, result, true, 'failed', clock_timestamp());
    exception when unique_violation then    -- a read was just recorded
        select x.* into c from megamcp.calls x where x.nonce = h.nonce;
        recorded := true;
        result := c.result;
        is_error := c.is_error;
    end;
end $$;

-- Read-only SQL of an evaluator: the same login, in a transaction that is made READ ONLY right after this.
create function megamcp.query_begin(token text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
begin
    if h.mode <> 'q' then
        perform megamcp.refuse('MM401', 'handle_forged', 'This state handle is not for a query.');
    end if;
    perform megamcp.admit(h, true);
end $$;

-- The relay's, around each transaction of a client that has a DSN. What the client sends runs between the two on the same
-- connection and may call them as well, so the way out wants the random bytes that the way in was given: a lock on their
-- hash remembers them. The bytes travel as the argument of a function call, which no view, log or error repeats.
create function megamcp.proof_lock(proof bytea) returns bigint
language sql immutable parallel safe set search_path = pg_catalog, pg_temp
return int8(substr(sha256(convert_to('megamcp gate', 'UTF8') || proof), 1, 8));

create function megamcp.enter(proof bytea) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform pg_advisory_lock_shared(megamcp.proof_lock(proof));
    perform pg_advisory_lock_shared(7723);
end $$;

create function megamcp.leave(proof bytea) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp set client_min_messages = error as $$
begin
    -- In one expression: a cancel can't come in between.
    perform case when pg_advisory_unlock_shared(megamcp.proof_lock(proof)) then pg_advisory_unlock_shared(7723) end;
end $$;

-- A tool can't end the transaction by itself: at COMMIT its call must be over. SET CONSTRAINTS ALL IMMEDIATE fires this
-- too, and then nothing is ended. COMMIT is told from it by what it does with a trigger that wants to be fired again: it
-- fires it again at once, for as long as that is wanted, and SET CONSTRAINTS does not.
create function megamcp.demand_result() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    asked integer;
begin
    set constraints megamcp.call_is_over deferred;
    update megamcp.open_calls o
       set asked = case when o.asked_in = statement_timestamp() then o.asked + 1 else 1 end,
           asked_in = statement_timestamp()
     where o.nonce = new.nonce returning o.asked into asked;
    if asked > 500 then
        perform megamcp.refuse('MM424', 'tool_committed',
            'The transaction belongs to the gateway: a tool may not commit it. Nothing was changed.');
    end if;
    return null;
end $$;
create constraint trigger call_is_over after insert or update on megamcp.open_calls
    deferrable initially deferred for each row execute function megamcp.demand_result();

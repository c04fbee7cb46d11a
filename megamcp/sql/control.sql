-- Functions of the control plane. Re-applied whenever this text changes (create or replace), so nothing here holds data.
--
-- A tool server's process may execute call_begin, call_finish and call_fail and nothing else of this schema. What it
-- may touch is decided here, from the signed state handle, never by the tool server. Order in every function: verify,
-- lock, then read: the advisory lock of the rollout comes before the first snapshot that matters (each statement of
-- a volatile function takes a new one in READ COMMITTED).
--
-- One call, one transaction:
--     BEGIN; call_begin; SAVEPOINT tool; [SET TRANSACTION READ ONLY;] body; call_finish; COMMIT
-- A tool that raises: ROLLBACK TO SAVEPOINT tool before call_finish. A read-only tool: SET TRANSACTION READ ONLY right
-- after the savepoint and always ROLLBACK TO SAVEPOINT tool at its end (which makes the transaction writable again
-- for the journal, while the rollout's shared lock is held until the row is written).

-- SQLSTATEs: MM401 handle forged or malformed · MM402 handle expired · MM403 handle used before · MM404 rollout unknown
-- MM409 rolled back meanwhile · MM410 rollout closed · MM422 idempotency key reused · MM423 transaction lost
-- MM408 deadline passed while waiting for the rollout · MM429 the same key is in flight

-- The channel on which gateway processes tell each other of something. Its name is a secret of the deployment, since
-- PostgreSQL lets every login listen and notify.
create or replace function megamcp.channel(purpose text) returns text
language sql stable set search_path = pg_catalog, pg_temp set debug_print_plan = off
return format('megamcp_%s_%s', purpose, left(encode(sha256(convert_to('channel ' || purpose, 'UTF8')
    || megamcp.secret()), 'hex'), 24));

create or replace function megamcp.lock_key(rollout text) returns bigint
language sql immutable parallel safe set search_path = pg_catalog, pg_temp
return hashtextextended(rollout, 7723);

-- Is the path segment (checkpoint, epoch) one that the rollout's head stands on? Rolled-back segments are not.
create or replace function megamcp.on_path(rollout text, head text, head_epoch integer, segment text, segment_epoch integer)
returns boolean language sql stable set search_path = pg_catalog, pg_temp as $$
    with recursive path(checkpoint, epoch) as (
        select head, head_epoch
        union all
        select c.parent, c.epoch
          from path p join megamcp.checkpoints c on c.id = p.checkpoint and c.rollout = on_path.rollout
    )
    select exists (select 1 from path p where p.checkpoint is not distinct from segment and p.epoch = segment_epoch)
$$;

create or replace function megamcp.event_result(e megamcp.events) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(e.result, (select b.content from megamcp.blobs b where b.hash = e.result_blob))
$$;

-- Waits for the rollout's lock until the handle's deadline, then reads the rollout. Shared for reads.
create or replace function megamcp.enter(h megamcp.handle, shared boolean, grace interval,
    out status text, out epoch integer, out seq bigint, out layer bigint, out seed bigint, out checkpoint text,
    out environment integer, out chain bigint[], out clock timestamptz, out role name, out query_role name)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    remaining bigint := ceil(extract(epoch from h.deadline + grace - clock_timestamp()) * 1000);
    before_lock text := current_setting('lock_timeout');
begin
    if remaining <= 0 then
        perform megamcp.refuse('MM402', 'handle_expired', 'The state handle has expired: its call''s deadline has passed.');
    end if;
    perform set_config('lock_timeout', remaining::text, true);
    begin
        if shared then
            perform pg_advisory_xact_lock_shared(megamcp.lock_key(h.rollout));
        else
            perform pg_advisory_xact_lock(megamcp.lock_key(h.rollout));
        end if;
    exception when lock_not_available then
        perform megamcp.refuse('MM408', 'deadline_exceeded',
            'The call waited for another call of this rollout until its deadline.');
    end;
    perform set_config('lock_timeout', before_lock, true);
    select r.status, r.epoch, r.seq, r.layer, r.seed, r.checkpoint, r.environment,
           coalesce(o.chain, c.chain, '{}') || r.layer, e.clock, s.role, s.query_role
      into status, epoch, seq, layer, seed, checkpoint, environment, chain, clock, role, query_role
      from megamcp.rollouts r
      join megamcp.environments e on e.id = r.environment
      left join megamcp.servers s on s.environment = r.environment and s.name = h.server
      left join megamcp.checkpoints c on c.id = r.checkpoint
      left join megamcp.replaced_chains o on o.checkpoint = r.checkpoint and o.layers = r.layers
     where r.id = h.rollout;
    if not found then
        perform megamcp.refuse('MM404', 'rollout_not_found', format('There is no rollout %s.', h.rollout));
    end if;
end $$;

create or replace function megamcp.call_begin(token text, tool text, arguments text,
    out replayed boolean, out result text, out is_error boolean, out seed bigint, out clock timestamptz, out seq bigint)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
    r record;
    e megamcp.events;
begin
    if h.mode not in ('r', 'w') then
        perform megamcp.refuse('MM401', 'handle_forged', 'This state handle is not for a call.');
    end if;
    -- By this name the gateway finds the backend of a call that it has to end.
    perform set_config('application_name', 'call ' || h.nonce, true);
    r := megamcp.enter(h, h.mode = 'r', interval '0');
    if r.role is distinct from session_user then
        perform megamcp.refuse('MM401', 'handle_foreign', 'The state handle was made for another tool server.');
    end if;
    if r.status <> 'open' then
        perform megamcp.refuse('MM410', 'rollout_' || r.status, format('Rollout %s is %s.', h.rollout, r.status));
    end if;
    if r.epoch <> h.epoch then
        perform megamcp.refuse('MM409', 'rolled_back', 'The rollout was rolled back while this call was on its way.');
    end if;
    if h.mode = 'w' then
        insert into megamcp.open_calls (nonce) values (h.nonce);
    end if;
    if exists (select 1 from megamcp.events x where x.nonce = h.nonce) then
        perform megamcp.refuse('MM403', 'handle_replayed', 'The state handle was used before; each is good for one call.');
    end if;
    seed := r.seed;
    clock := r.clock;
    if h.key is not null then
        if h.mode = 'r' then    -- readers run in parallel, so the key needs a lock of its own
            perform pg_advisory_xact_lock(hashtextextended(h.rollout || chr(10) || h.key, 7724));
        end if;
        select x.* into e from megamcp.events x
         where x.rollout = h.rollout and x.idempotency_key = h.key
           and megamcp.on_path(h.rollout, r.checkpoint, r.epoch, x.checkpoint, x.epoch)
         order by x.seq desc limit 1;
        if found then
            if e.fingerprint is distinct from h.fingerprint then
                perform megamcp.refuse('MM422', 'idempotency_key_reused',
                    format('Idempotency key %s was used for another request (%s).', to_json(h.key), e.tool));
            end if;
            delete from megamcp.open_calls o where o.nonce = h.nonce and h.mode = 'w';
            replayed := true;
            result := megamcp.event_result(e);
            is_error := e.is_error;
            seq := e.seq;
            if result is null then
                perform megamcp.refuse('MM422', 'result_expired', 'The call was done, but its result is no longer kept.');
            end if;
            return;
        end if;
    end if;
    replayed := false;
    -- A tool server that hangs can't hold the rollout for longer than the call may take.
    perform set_config('transaction_timeout',
        greatest(1, ceil(extract(epoch from h.deadline - clock_timestamp()) * 1000) + 2000)::bigint::text, true);
    perform megamcp.bind(r.chain, r.layer, r.seed, r.clock, h.mode = 'w');
end $$;

create or replace function megamcp.keep_result(inout result text, out blob bytea)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    if octet_length(result) > 32768 then
        blob := sha256(convert_to(result, 'UTF8'));
        -- A row that is locked makes another rollout's call wait, so it is touched now and then only.
        if not exists (select 1 from megamcp.blobs b where b.hash = blob and b.created_at > now() - interval '1 hour') then
            insert into megamcp.blobs as b (hash, content, bytes) values (blob, result, octet_length(result))
                on conflict (hash) do update set created_at = excluded.created_at;
        end if;
        result := null;
    end if;
end $$;

-- The journal row of a call, on the rollout's present path. Null where the rollout was moved or has ended.
create or replace function megamcp.append_call(h megamcp.handle, tool text, arguments text, result text, blob bytea,
    failed boolean, outcome text, began timestamptz, fenced boolean) returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    r record;
begin
    update megamcp.rollouts x set seq = x.seq + 1, dirty = x.dirty or h.mode = 'w'
     where x.id = h.rollout and x.status = 'open' and (x.epoch = h.epoch or not fenced)
    returning x.seq, x.checkpoint, x.epoch into r;
    if found then
        insert into megamcp.events (rollout, seq, kind, at, server, tool, arguments, state, nonce, idempotency_key,
                                    fingerprint, checkpoint, epoch, exact, result, result_blob, is_error, ended_at)
        values (h.rollout, r.seq, 'call', began, h.server, tool, arguments, outcome, h.nonce,
                -- The key of a call that failed is not kept: nothing was done, so a retry may do it.
                case when outcome = 'done' then h.key end,
                h.fingerprint, r.checkpoint, r.epoch, true, result, blob, failed, clock_timestamp());
    end if;
    return r.seq;
end $$;

create or replace function megamcp.call_finish(token text, tool text, arguments text, result text, failed boolean)
returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
    kept record := megamcp.keep_result(result);
    began timestamptz;
    number bigint;
begin
    if h.mode = 'w' then
        delete from megamcp.open_calls o where o.nonce = h.nonce returning o.started_at into began;
    elsif current_setting('megamcp.binding', true) <> '' then
        began := transaction_timestamp();
    end if;
    if began is not null then
        number := megamcp.append_call(h, tool, arguments, kept.result, kept.blob, failed, 'done', began, true);
    end if;
    if number is null then
        perform megamcp.refuse('MM423', 'transaction_lost', 'The call''s transaction ended before the call did.');
    end if;
    return number;
end $$;

-- After the call's own transaction is gone: what it recorded, else its error goes to the journal now.
create or replace function megamcp.call_fail(token text, tool text, arguments text, error_result text,
    out recorded boolean, out result text, out is_error boolean)
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
    e megamcp.events;
    kept record;
begin
    if h.mode not in ('r', 'w') then
        perform megamcp.refuse('MM401', 'handle_forged', 'This state handle is not for a call.');
    end if;
    perform set_config('lock_timeout', '30000', true);
    insert into megamcp.open_calls (nonce) values (h.nonce);    -- waits for the call's own transaction
    delete from megamcp.open_calls o where o.nonce = h.nonce;
    select x.* into e from megamcp.events x where x.nonce = h.nonce;
    if found then
        recorded := true;
        result := megamcp.event_result(e);
        is_error := e.is_error;
        return;
    end if;
    -- Who ended the call said why: in words, or (a gateway that gave it up) as the whole result.
    select case when starts_with(x.reason, '{') then x.reason
                else jsonb_build_object('isError', true, 'content', jsonb_build_array(
                         jsonb_build_object('type', 'text', 'text', x.reason)))::text end
      into result from megamcp.ended_calls x where x.nonce = h.nonce;
    result := coalesce(result, error_result);
    recorded := result <> error_result;
    is_error := true;
    kept := megamcp.keep_result(result);
    begin
        perform megamcp.append_call(h, tool, arguments, kept.result, kept.blob, true, 'failed', clock_timestamp(), false);
    exception when unique_violation then    -- a read was just recorded
        select x.* into e from megamcp.events x where x.nonce = h.nonce;
        recorded := true;
        result := megamcp.event_result(e);
        is_error := e.is_error;
    end;
end $$;

-- Read-only SQL of an evaluator, by the state's query role.
create or replace function megamcp.query_begin(token text) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
    r record;
    c record;
begin
    if h.mode <> 'q' then
        perform megamcp.refuse('MM401', 'handle_forged', 'This state handle is not for a query.');
    end if;
    r := megamcp.enter(h, true, interval '0');
    if r.query_role is distinct from session_user then
        perform megamcp.refuse('MM401', 'handle_foreign', 'The state handle was made for another tool server.');
    end if;
    if h.point is null then
        if r.status <> 'open' then
            perform megamcp.refuse('MM410', 'rollout_' || r.status, format('Rollout %s is %s.', h.rollout, r.status));
        end if;
        perform megamcp.bind(r.chain, r.layer, r.seed, r.clock, false);
    elsif h.point = 'base' then
        perform megamcp.bind('{}', 0, r.seed, r.clock, false);
    else
        -- Locked until the query is done: the reaper leaves its layers alone as long.
        select x.chain, x.seed into c from megamcp.checkpoints x where x.id = h.point and not x.void for key share;
        if not found then
            perform megamcp.refuse('MM410', 'checkpoint_gone', format('Checkpoint %s is gone.', h.point));
        end if;
        perform megamcp.bind(c.chain, 0, c.seed, r.clock, false);
    end if;
end $$;

-- A call to a server that keeps no state here: at most once. The row comes first; an outcome may never follow.
create or replace function megamcp.call_intent(rollout text, server text, tool text, arguments text, nonce uuid,
    key text, fingerprint bytea, owner bigint,
    out found_state text, out result text, out is_error boolean, out seq bigint)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    r megamcp.rollouts;
    e megamcp.events;
begin
    select x.* into r from megamcp.rollouts x where x.id = rollout for no key update;
    if not found then
        perform megamcp.refuse('MM404', 'rollout_not_found', format('There is no rollout %s.', rollout));
    end if;
    if r.status <> 'open' then
        perform megamcp.refuse('MM410', 'rollout_' || r.status, format('Rollout %s is %s.', rollout, r.status));
    end if;
    if key is not null then
        select x.* into e from megamcp.events x
         where x.rollout = r.id and x.idempotency_key = key
           and megamcp.on_path(r.id, r.checkpoint, r.epoch, x.checkpoint, x.epoch)
         order by x.seq desc limit 1;
        if found then
            if e.fingerprint is distinct from call_intent.fingerprint then
                perform megamcp.refuse('MM422', 'idempotency_key_reused',
                    format('Idempotency key %s was used for another request (%s).', to_json(key), e.tool));
            end if;
            found_state := e.state;
            result := megamcp.event_result(e);
            is_error := e.is_error;
            seq := e.seq;
            return;
        end if;
    end if;
    update megamcp.rollouts x set seq = x.seq + 1 where x.id = r.id returning x.seq into seq;
    insert into megamcp.events (rollout, seq, kind, server, tool, arguments, state, nonce, idempotency_key,
                                fingerprint, checkpoint, epoch, exact, owner)
    values (r.id, seq, 'call', server, tool, arguments, 'running', nonce, key, fingerprint,
            r.checkpoint, r.epoch, false, owner);
end $$;

-- Says whether the agent may have the result: not when the rollout was rolled back or released meanwhile.
create or replace function megamcp.call_outcome(p_rollout text, p_seq bigint, p_nonce uuid, p_result text, p_failed boolean,
    p_state text) returns boolean language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    kept record := megamcp.keep_result(p_result);
    at_epoch integer;
begin
    update megamcp.events e
       set state = p_state, result = kept.result, result_blob = kept.blob, is_error = p_failed, ended_at = clock_timestamp()
     where e.rollout = p_rollout and e.seq = p_seq and e.nonce = p_nonce and e.state in ('running', 'unknown')
    returning e.epoch into at_epoch;
    return exists (select 1 from megamcp.rollouts r where r.id = p_rollout and r.epoch = at_epoch and r.status = 'open');
end $$;

-- The outcome of a call that its server refused before it began: its key is free for another try.
create or replace function megamcp.call_refused(p_rollout text, p_seq bigint, p_nonce uuid, p_result text)
returns boolean language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    update megamcp.events e set idempotency_key = null
     where e.rollout = p_rollout and e.seq = p_seq and e.nonce = p_nonce;
    return megamcp.call_outcome(p_rollout, p_seq, p_nonce, p_result, true, 'failed');
end $$;

-- Whether the gateway process of that number lives: its instance connection holds the lock.
create or replace function megamcp.alive(owner bigint) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
    select exists (select 1 from pg_locks l where l.locktype = 'advisory' and l.granted and l.objsubid = 1
                      and l.database = (select oid from pg_database where datname = current_database())
                      and l.classid::bigint = ((owner >> 32) & 4294967295)
                      and l.objid::bigint = (owner & 4294967295))
$$;

-- The journal row of a call that a rollout's own database has recorded; the row that is there already, by its nonce. Null
-- where the rollout was rolled back or released after the call had begun, unless `p_late`: the database goes now.
create or replace function megamcp.record_call(p_rollout text, p_server text, p_tool text, p_arguments text, p_result text,
    p_failed boolean, p_began timestamptz, p_ended timestamptz, p_nonce uuid, p_key text, p_fingerprint bytea, p_epoch integer, p_late boolean)
returns bigint language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    kept record := megamcp.keep_result(p_result);
    r record;
begin
    update megamcp.rollouts x set seq = x.seq + 1
     where x.id = p_rollout and (p_late or x.status = 'open' and x.epoch = p_epoch)
       and not exists (select 1 from megamcp.events v where v.nonce = p_nonce)
    returning x.seq, x.checkpoint into r;
    if found then
        insert into megamcp.events (rollout, seq, kind, at, server, tool, arguments, state, nonce, idempotency_key,
                                    fingerprint, checkpoint, epoch, exact, result, result_blob, is_error, ended_at)
        values (p_rollout, r.seq, 'call', p_began, p_server, p_tool, p_arguments, 'done', p_nonce, p_key, p_fingerprint,
                r.checkpoint, p_epoch, true, kept.result, kept.blob, p_failed, p_ended);
        return r.seq;
    end if;
    return (select v.seq from megamcp.events v where v.nonce = p_nonce);
exception when unique_violation then    -- two gateway processes record it at once
    return (select v.seq from megamcp.events v where v.nonce = p_nonce);
end $$;

-- A tool can't end the transaction by itself: at COMMIT its call must be over.
create or replace function megamcp.demand_result() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    if exists (select 1 from megamcp.open_calls o where o.nonce = new.nonce) then
        perform megamcp.refuse('MM424', 'tool_committed',
            'The transaction belongs to the gateway: a tool may not commit it. Nothing was changed.');
    end if;
    return null;
end $$;

do $$
begin
    if not exists (select 1 from pg_trigger where tgname = 'call_is_over' and tgrelid = 'megamcp.open_calls'::regclass) then
        create constraint trigger call_is_over after insert on megamcp.open_calls
            deferrable initially deferred for each row execute function megamcp.demand_result();
    end if;
end $$;

do $$
begin
    -- Group roles of the cluster; each loaded state's own logins are members.
    perform pg_advisory_xact_lock(7725);
    if not exists (select 1 from pg_roles where rolname = 'megamcp_tools') then
        create role megamcp_tools nologin;
    end if;
    if not exists (select 1 from pg_roles where rolname = 'megamcp_queries') then
        create role megamcp_queries nologin;
    end if;
end $$;

revoke all on schema megamcp from public;
revoke all on all functions in schema megamcp from public;
grant usage on schema megamcp to megamcp_tools, megamcp_queries;
grant execute on function megamcp.call_begin(text, text, text), megamcp.call_finish(text, text, text, text, boolean),
    megamcp.call_fail(text, text, text, text) to megamcp_tools;
grant execute on function megamcp.query_begin(text) to megamcp_queries;

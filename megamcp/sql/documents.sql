-- Functions of state kind `document`, for tool servers and within the transaction of a call that `call_begin` has begun:
-- it holds the rollout's lock, so the head stays where it is. Nothing here looks into a document; who may touch which one
-- is said by the state handle. Logins of document servers may execute four of these (megamcp/documents/logins.py).

-- The handle, if its call is under way in this transaction.
create or replace function megamcp.document_call(token text, must_write boolean) returns megamcp.handle
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
begin
    if not exists (select 1 from megamcp.rollouts r join megamcp.servers x on x.environment = r.environment
                    where r.id = h.rollout and x.name = h.server and x.role = session_user and x.kind = 'document') then
        perform megamcp.refuse('MM401', 'handle_foreign', 'The state handle was made for another tool server.');
    end if;
    if h.mode = 'w' and not exists (select 1 from megamcp.open_calls o where o.nonce = h.nonce)
       or h.mode = 'r' and (must_write or coalesce(current_setting('megamcp.binding', true), '') = '')
       or h.mode not in ('r', 'w') then
        perform megamcp.refuse('MM423', 'transaction_lost', 'No call that may do this is under way in this transaction.');
    end if;
    return h;
end $$;

-- Where a rollout's document stands: a row of its own, else what its checkpoint keeps, else what its environment starts
-- with. No version: that isn't known yet. The content is left out: a record would hold all of it, read and unpacked.
create or replace function megamcp.document_place(p_rollout text, p_server text,
    out version bigint, out hash bytea, out own boolean, out deltas integer, out delta_bytes bigint)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(d.version, p.version, b.version), case when d.version is null then coalesce(p.hash, b.hash) else d.hash end,
           d.version is not null, coalesce(d.deltas, 0), coalesce(d.delta_bytes, 0)
      from megamcp.rollouts r
      left join megamcp.documents d on d.rollout = r.id and d.server = p_server
      left join megamcp.document_points p on p.checkpoint = r.checkpoint and p.server = p_server
      left join megamcp.document_bases b on b.environment = r.environment and b.server = p_server
     where r.id = p_rollout
$$;

-- The head, with its content unless the caller knows that version.
create or replace function megamcp.document_head(token text, known bigint[],
    out version bigint, out clock timestamptz, out deltas integer, out delta_bytes bigint,
    out content bytea, out positions integer[], out removed integer[], out added bytea[])
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.document_call(token, false);
    s record;
begin
    select e.clock into clock
      from megamcp.rollouts r join megamcp.environments e on e.id = r.environment where r.id = h.rollout;
    s := megamcp.document_place(h.rollout, h.server);
    version := s.version;
    deltas := s.deltas;
    delta_bytes := s.delta_bytes;
    if version is null or version = any (known) then
        return;
    end if;
    content := coalesce((select b.content from megamcp.document_blobs b where b.hash = s.hash),
                        (select d.content from megamcp.documents d where d.rollout = h.rollout and d.server = h.server));
    if s.deltas > 0 then
        select array_agg(d.position order by d.version), array_agg(d.removed order by d.version),
               array_agg(d.added order by d.version)
          into positions, removed, added
          from megamcp.document_deltas d where d.rollout = h.rollout and d.server = h.server;
    end if;
end $$;

-- A content that will be pointed at by the row that this transaction writes next.
create or replace function megamcp.document_keep(p_content bytea) returns bytea
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    found_hash bytea := sha256(p_content);
begin
    -- A row that is locked makes others wait, so it is touched now and then only; the reaper leaves young ones alone.
    if not exists (select 1 from megamcp.document_blobs b
                    where b.hash = found_hash and b.created_at > clock_timestamp() - interval '1 minute') then
        insert into megamcp.document_blobs as b (hash, content) values (found_hash, p_content)
            on conflict (hash) do update set created_at = excluded.created_at;
    end if;
    return found_hash;
end $$;

-- What the environment's document starts as. The first to say so decides; `p_content` is not looked at later.
create or replace function megamcp.document_base(token text, p_content bytea) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.open_handle(token);
    s record;
begin
    select x.environment, x.role into s
      from megamcp.rollouts r join megamcp.servers x on x.environment = r.environment and x.name = h.server
     where r.id = h.rollout and x.kind = 'document';
    if not found or h.mode not in ('r', 'w') or s.role is distinct from session_user then
        perform megamcp.refuse('MM401', 'handle_foreign', 'The state handle was made for another tool server.');
    end if;
    if not exists (select 1 from megamcp.document_bases b where b.environment = s.environment and b.server = h.server) then
        insert into megamcp.document_bases (environment, server, version, hash)
        values (s.environment, h.server, nextval('megamcp.document_seq'), megamcp.document_keep(p_content))
            on conflict (environment, server) do nothing;
    end if;
end $$;

-- The call's change, on top of `expected`, in the order in which it is applied. Gives the new version.
create or replace function megamcp.document_splice(token text, expected bigint, p_positions integer[], p_removed integer[],
    p_added bytea[]) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.document_call(token, true);
    s record := megamcp.document_place(h.rollout, h.server);
    made bigint;
    bytes bigint := 0;
begin
    if s.version is distinct from expected then
        perform megamcp.refuse('MM423', 'transaction_lost', 'The document is not the one that this change was made to.');
    end if;
    for i in 1 .. cardinality(p_positions) loop
        made := nextval('megamcp.document_seq');
        insert into megamcp.document_deltas (rollout, server, version, position, removed, added)
        values (h.rollout, h.server, made, p_positions[i], p_removed[i], p_added[i]);
        bytes := bytes + octet_length(p_added[i]);
    end loop;
    if s.own then
        update megamcp.documents d
           set version = made, deltas = d.deltas + cardinality(p_positions), delta_bytes = d.delta_bytes + bytes
         where d.rollout = h.rollout and d.server = h.server;
    else
        insert into megamcp.documents (rollout, server, version, hash, deltas, delta_bytes)
        values (h.rollout, h.server, made, s.hash, cardinality(p_positions), bytes);
    end if;
    return made;
end $$;

-- The same, by the whole content: where many splices have gathered.
create or replace function megamcp.document_replace(token text, expected bigint, p_content bytea) returns bigint
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.handle := megamcp.document_call(token, true);
    s record := megamcp.document_place(h.rollout, h.server);
    made bigint := nextval('megamcp.document_seq');
begin
    if s.version is distinct from expected then
        perform megamcp.refuse('MM423', 'transaction_lost', 'The document is not the one that this change was made to.');
    end if;
    delete from megamcp.document_deltas d where d.rollout = h.rollout and d.server = h.server;
    insert into megamcp.documents as d (rollout, server, version, content)
    values (h.rollout, h.server, made, p_content)
        on conflict (rollout, server) do update
           set version = excluded.version, hash = null, content = excluded.content, deltas = 0, delta_bytes = 0;
    return made;
end $$;

revoke all on function megamcp.document_call(text, boolean), megamcp.document_place(text, text),
    megamcp.document_head(text, bigint[]), megamcp.document_keep(bytea), megamcp.document_base(text, bytea),
    megamcp.document_splice(text, bigint, integer[], integer[], bytea[]), megamcp.document_replace(text, bigint, bytea) from public;

-- The check of a state handle, and how a refusal is said. The same text in the control plane and in every database of a
-- rollout's own (megamcp/state/clones/sql/calls.sql): both have the type megamcp.handle and the key in megamcp.keys.

create or replace function megamcp.refuse(state text, code text, message text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    raise exception using errcode = state, message = message,
        detail = json_build_object('code', code, 'message', message)::text;
end $$;

-- v1.<rollout>.<server>.<epoch>.<mode>.<nonce>.<deadline ms>.<key hex>.<fingerprint hex>.<point>.<mac hex>
create or replace function megamcp.open_handle(token text) returns megamcp.handle
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    part text[] := string_to_array(token, '.');
    signed text;
    mac bytea;
    h megamcp.handle;
begin
    if token is null or length(token) > 4096 or array_length(part, 1) is distinct from 11 or part[1] <> 'v1'
       or part[11] !~ '^[0-9a-f]{64}$' then
        perform megamcp.refuse('MM401', 'handle_forged', 'This is not a state handle of this gateway.');
    end if;
    signed := left(token, length(token) - 65);
    select sha256(k.outer_pad || sha256(k.inner_pad || convert_to(signed, 'UTF8'))) into mac
      from megamcp.keys k where k.name = 'handle';
    if mac is distinct from decode(part[11], 'hex') then
        perform megamcp.refuse('MM401', 'handle_forged', 'The state handle''s signature is wrong.');
    end if;
    h.rollout := part[2];
    h.server := part[3];
    h.epoch := part[4]::integer;
    h.mode := part[5];
    h.nonce := part[6]::uuid;
    h.deadline := to_timestamp(part[7]::double precision / 1000);
    h.key := case when part[8] = '' then null else convert_from(decode(part[8], 'hex'), 'UTF8') end;
    h.fingerprint := decode(part[9], 'hex');
    h.point := nullif(part[10], '');
    return h;
end $$;

-- Functions that every `schema` state shares. Schema megamcp and sequence megamcp.layer_seq exist already.
-- Safe to run again. Nothing here knows a state: tables, counters and triggers live in s_<hash>.
-- A binding is text `{0,chain}|head|seed|clock in µs since epoch|w or r|mac`, kept in the transaction-local setting
-- megamcp.binding. Anybody may set that setting; only bind() can make the mac, which also covers backend and transaction.

create sequence if not exists megamcp.stamp_seq as bigint cache 64;

create table if not exists megamcp.secrets (
  only_row boolean primary key default true check (only_row),
  secret bytea not null
);
revoke all on megamcp.secrets from public;
insert into megamcp.secrets (secret)
select sha256(convert_to(string_agg(gen_random_uuid()::text, ''), 'UTF8')) from generate_series(1, 8)
on conflict do nothing;

-- Declared immutable so that a session's cached plans hold it as a constant: one row, written once. Any session may have
-- its plans printed, so each function that asks for it has `debug_print_plan` off.
create or replace function megamcp.secret() returns bytea
language plpgsql immutable security definer parallel safe set search_path = pg_catalog, pg_temp as $body$
begin
  return (select s.secret from megamcp.secrets s);
end $body$;
revoke all on function megamcp.secret() from public;

-- Names this database among those of its cluster. A copy made by CREATE DATABASE has the same name, roles and passwords.
create or replace function megamcp.deployment() returns text
language plpgsql stable security definer set search_path = pg_catalog, pg_temp set debug_print_plan = off as $body$
begin
  return left(encode(sha256('deployment'::bytea || megamcp.secret()), 'hex'), 8);
end $body$;
revoke all on function megamcp.deployment() from public;

create or replace function megamcp.mac(body text) returns text
language plpgsql stable security definer parallel restricted
set search_path = pg_catalog, pg_temp set debug_print_plan = off as $body$
begin
  return encode(sha256(megamcp.secret() || convert_to(
    body, 'UTF8') || int4send(pg_backend_pid()) || timestamptz_send(transaction_timestamp())
    || megamcp.secret()), 'hex');
end $body$;
revoke all on function megamcp.mac(text) from public;

-- Name of a setting that holds what was verified when a statement began, for the triggers of its rows. Who can't read the
-- secret can't guess it, and PostgreSQL lists no such setting: so nobody can write it, though anybody may write settings.
create or replace function megamcp.kept(state text, what text) returns text
language plpgsql immutable security definer parallel restricted
set search_path = pg_catalog, pg_temp set debug_print_plan = off as $body$
begin
  return 'megamcp.k' || left(encode(sha256(
    megamcp.secret() || convert_to(concat_ws(' ', 'kept', state, what), 'UTF8') || megamcp.secret()), 'hex'), 40);
end $body$;
revoke all on function megamcp.kept(text, text) from public;

create or replace function megamcp.bind(chain bigint[], head bigint, seed bigint, clock timestamptz, writable boolean)
returns void language plpgsql volatile set search_path = pg_catalog, pg_temp as $body$
declare
  layers bigint[] := array_prepend(0::bigint, array_remove(chain, 0::bigint));
  body text;
begin
  if writable and head is null then
    raise exception 'a writable binding needs a head layer' using errcode = '22004';
  end if;
  if writable and head < (select max(layer) from unnest(layers) as u(layer)) then
    raise exception 'layer % is not the head of its chain', head
      using errcode = '22023', detail = 'A newer layer of the chain is frozen on top of it.';
  end if;
  if writable and not (head = any (layers)) then
    layers := layers || head;
  end if;
  body := layers::text || '|' || coalesce(head, 0) || '|' || seed || '|'
    || (extract(epoch from clock) * 1000000)::bigint || '|' || case when writable then 'w' else 'r' end;
  perform set_config('megamcp.binding', body || '|' || megamcp.mac(body), true);
  perform set_config('megamcp.now', '', true);
end $body$;
revoke all on function megamcp.bind(bigint[], bigint, bigint, timestamptz, boolean) from public;

-- The binding without its mac, or 42501 (25006 when it must be writable and is not). The mac is computed in line:
-- this runs once for every row that is written.
create or replace function megamcp.verified(must_write boolean) returns text
language plpgsql stable security definer parallel restricted
set search_path = pg_catalog, pg_temp set debug_print_plan = off as $body$
declare
  given text := coalesce(current_setting('megamcp.binding', true), '');  -- unset is null in a new session
  body text := left(given, -65);
begin
  if encode(sha256(megamcp.secret() || convert_to(
      body, 'UTF8') || int4send(pg_backend_pid()) || timestamptz_send(transaction_timestamp())
      || megamcp.secret()), 'hex') is distinct from right(given, 64) then
    raise exception 'no rollout is bound to this transaction'
      using errcode = '42501', hint = 'Call the tool through the gateway; bindings end with their transaction.';
  end if;
  if must_write and split_part(body, '|', 5) <> 'w' then
    raise exception 'this call may only read the rollout''s state'
      using errcode = '25006', hint = 'Leave read_only out where the tool is registered.';
  end if;
  return body;
end $body$;
revoke all on function megamcp.verified(boolean) from public;

-- The chain that a scan compares each row's layer with. A short one names base several times: an array of up to 130 bytes
-- is packed where PostgreSQL keeps it for the statement, and unpacked for each row (50 ns, of 150 that a base row costs).
-- Both functions compute the mac in line: they run for every table of every statement, and a call within costs 4 µs of 7.
create or replace function megamcp.chain_with_base() returns bigint[]
language plpgsql stable security definer parallel restricted
set search_path = pg_catalog, pg_temp set debug_print_plan = off as $body$
declare
  given text := coalesce(current_setting('megamcp.binding', true), '');
  body text := left(given, -65);
  layers bigint[];
begin
  if encode(sha256(megamcp.secret() || convert_to(
      body, 'UTF8') || int4send(pg_backend_pid()) || timestamptz_send(transaction_timestamp())
      || megamcp.secret()), 'hex') is distinct from right(given, 64) then
    body := megamcp.verified(false);  -- raises
  end if;
  layers := split_part(body, '|', 1);
  if cardinality(layers) < 14 then
    return '{0,0,0,0,0,0,0,0,0,0,0,0,0}'::bigint[] || layers;
  end if;
  return layers;
end $body$;
revoke all on function megamcp.chain_with_base() from public;

-- The chain without base, for probes of a delta: a probe sorts the array, so the shorter the better.
create or replace function megamcp.chain() returns bigint[]
language plpgsql stable security definer parallel restricted
set search_path = pg_catalog, pg_temp set debug_print_plan = off as $body$
declare
  given text := coalesce(current_setting('megamcp.binding', true), '');
  body text := left(given, -65);
begin
  if encode(sha256(megamcp.secret() || convert_to(
      body, 'UTF8') || int4send(pg_backend_pid()) || timestamptz_send(transaction_timestamp())
      || megamcp.secret()), 'hex') is distinct from right(given, 64) then
    body := megamcp.verified(false);  -- raises
  end if;
  return (split_part(body, '|', 1)::bigint[])[2:];
end $body$;
revoke all on function megamcp.chain() from public;

create or replace function megamcp.head() returns bigint
language plpgsql stable security definer parallel restricted
set search_path = pg_catalog, pg_temp set debug_print_plan = off as $body$
begin
  return split_part(megamcp.verified(true), '|', 2)::bigint;
end $body$;
revoke all on function megamcp.head() from public;

-- 32 pseudo-random bytes of (seed, draw). Not secret: equal seeds and draws give equal bytes, by design.
create or replace function megamcp.prf(seed bigint, draw bigint) returns bytea
language sql immutable parallel safe
return sha256('\x6d6567616d6370'::bytea || int8send(seed) || int8send(draw));

-- DETAIL of a NOT NULL or CHECK violation as PostgreSQL words it; values over 64 characters are cut.
create or replace function megamcp.failing_row(variadic shown text[]) returns text
language sql immutable parallel safe set search_path = pg_catalog, pg_temp
return 'Failing row contains (' || (
  select string_agg(case when v is null then 'null' when octet_length(v) <= 64 then v else left(v, 64) || '...' end, ', '
                    order by n)
  from unnest(shown) with ordinality as u(v, n)) || ').';

-- The value as its type's output function prints it (a cast to text differs for boolean and char(n)). IS NULL would ask
-- the fields of a composite value.
create or replace function megamcp.shown(value anyelement) returns text
language plpgsql stable parallel safe set search_path = pg_catalog, pg_temp as $body$
begin
  return case when value is distinct from null then format('%s', value) end;
end $body$;

-- True for every row of a delta, at a price: what a policy hashes looks dear row by row, what it probes does not, so the
-- planner hashes a rollout's own rows for scans only. (A hash of 50,000 own rows costs 25 ms a statement.)
do $body$
begin
  if (select r.rolsuper from pg_roles r where r.rolname = current_user) then
    create or replace function megamcp.dear(layer bigint, first_layer bigint) returns boolean
      language internal immutable strict parallel safe cost 4 as 'int8ge';
  else
    create or replace function megamcp.dear(layer bigint, first_layer bigint) returns boolean
      language plpgsql immutable strict parallel safe cost 4 as 'begin return layer >= first_layer; end';
  end if;
end $body$;
revoke all on function megamcp.dear(bigint, bigint) from public;

-- Operator classes for delta indexes led by the key: the built-in order under a family of its own, so that the planner
-- finds such an index for `key = x` but never takes it for ORDER BY, where it would wade through other rollouts' rows.
-- Needs a superuser; without one, states make do with the indexes led by the layer (deep chains are slower then).
do $body$
declare
  one text;
  two text;
begin
  if exists (select from pg_opfamily f where f.opfname = 'integer_equal' and f.opfnamespace = 'megamcp'::regnamespace)
     or not (select r.rolsuper from pg_roles r where r.rolname = current_user) then
    return;
  end if;
  create operator family megamcp.integer_equal using btree;
  foreach one in array array['int2', 'int4', 'int8'] loop
    execute format('create operator class megamcp.%1$s_equal for type pg_catalog.%1$s using btree
      family megamcp.integer_equal as operator 1 <, operator 2 <=, operator 3 =, operator 4 >=, operator 5 >,
      function 1 bt%1$scmp(%1$s, %1$s), function 4 btequalimage(oid)', one);
  end loop;
  foreach one in array array['int2', 'int4', 'int8'] loop
    foreach two in array array['int2', 'int4', 'int8'] loop
      if one <> two then
        execute format('alter operator family megamcp.integer_equal using btree add operator 1 <(%1$s, %2$s),
          operator 2 <=(%1$s, %2$s), operator 3 =(%1$s, %2$s), operator 4 >=(%1$s, %2$s), operator 5 >(%1$s, %2$s),
          function 1 (%1$s, %2$s) btint%3$s%4$scmp(%1$s, %2$s)', one, two, substr(one, 4), substr(two, 4));
      end if;
    end loop;
  end loop;
  create operator class megamcp.text_equal for type text using btree as operator 1 <, operator 2 <=, operator 3 =,
    operator 4 >=, operator 5 >, function 1 bttextcmp(text, text), function 2 bttextsortsupport(internal),
    function 4 btvarstrequalimage(oid);
  create operator class megamcp.uuid_equal for type uuid using btree as operator 1 <, operator 2 <=, operator 3 =,
    operator 4 >=, operator 5 >, function 1 uuid_cmp(uuid, uuid), function 4 btequalimage(oid);
  create operator class megamcp.date_equal for type date using btree as operator 1 <, operator 2 <=, operator 3 =,
    operator 4 >=, operator 5 >, function 1 date_cmp(date, date), function 4 btequalimage(oid);
  create operator class megamcp.numeric_equal for type numeric using btree as operator 1 <, operator 2 <=, operator 3 =,
    operator 4 >=, operator 5 >, function 1 numeric_cmp(numeric, numeric);
end $body$;

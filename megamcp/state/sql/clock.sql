-- Counters, clock and chance of one state; {s} is its hidden schema, {v} its visible one (quoted).

-- name: core
create table {s}."~counters" (
  layer bigint not null, name text not null, number int not null, value bigint not null, primary key (layer, name)
);
insert into {s}."~counters" values (0, 'random', 0, 0), (0, 'clock', 1, 0);

create function {s}."~read"(_number int, _name text) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $body$
declare
  _bound text := megamcp.verified(false);
  _raw text := current_setting('megamcp.c' || _number, true);
begin
  if split_part(_raw, ':', 1) = split_part(_bound, '|', 2) then
    return split_part(_raw, ':', 2)::bigint;
  end if;
  return (select c.value from {s}."~counters" c
          where c.name = _name and c.layer = any (split_part(_bound, '|', 1)::bigint[]) order by c.layer desc limit 1);
end $body$;

create function {s}."~store"(_number int, _name text, _value bigint) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $body$
declare
  _bound text := megamcp.verified(false);
  _head text := split_part(_bound, '|', 2);
  _raw text := current_setting('megamcp.c' || _number, true);
  _done text;
begin
  if split_part(_raw, ':', 1) is distinct from _head then
    if split_part(_bound, '|', 5) = 'w' and not current_setting('transaction_read_only')::boolean then
      if _raw <> '' then  -- never believed: the setting is the tool's to forge, the layer that it names another's
        raise exception 'a transaction draws numbers for one rollout only' using errcode = '42501';
      end if;
      insert into {s}."~counters" as c (layer, name, number, value) values (_head::bigint, _name, _number, _value)
      on conflict (layer, name) do update set value = excluded.value;
    end if;
  end if;
  _done := set_config('megamcp.c' || _number, _head || ':' || _value, true);
  return _value;
end $body$;

create function {s}."~flush"() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $body$
declare
  _raw text := current_setting('megamcp.c' || new.number, true);
  _done text;
begin
  if split_part(_raw, ':', 1) = new.layer::text then
    _done := set_config('megamcp.c' || new.number, '', true);  -- the next draw starts from the table again
    if split_part(_raw, ':', 2)::bigint <> (select c.value from {s}."~counters" c
                                            where c.layer = new.layer and c.name = new.name) then
      update {s}."~counters" c set value = split_part(_raw, ':', 2)::bigint
      where c.layer = new.layer and c.name = new.name;
    end if;
  end if;
  return null;
end $body$;
create constraint trigger "~flush" after insert or update on {s}."~counters"
  deferrable initially deferred for each row execute function {s}."~flush"();

create function {s}."~draw"() returns bytea
language plpgsql security definer set search_path = pg_catalog, pg_temp as $body$
begin
  return megamcp.prf(split_part(megamcp.verified(false), '|', 3)::bigint,
                     {s}."~store"(0, 'random', {s}."~read"(0, 'random') + 1));
end $body$;

create function {s}."~now"() returns bigint
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $body$
begin
  return set_config('megamcp.now', (split_part(megamcp.verified(false), '|', 4)::bigint
                                    + {s}."~read"(1, 'clock'))::text, true)::bigint;
end $body$;

-- Microseconds since the epoch that the environment's clock shows; cheap enough to be evaluated once a row.
create function {v}.now() returns timestamptz language sql stable
return 'epoch'::timestamptz + interval '1 microsecond'
  * coalesce(nullif(current_setting('megamcp.now', true), '')::bigint, {s}."~now"());

create function {v}.megamcp_advance_clock(microseconds bigint) returns timestamptz
language plpgsql security definer set search_path = pg_catalog, pg_temp as $body$
declare
  _done bigint;
begin
  if microseconds < 0 then
    raise exception 'the clock can''t go back' using errcode = '22023';
  end if;
  perform megamcp.verified(true);
  _done := {s}."~store"(1, 'clock', {s}."~read"(1, 'clock') + microseconds);
  _done := {s}."~now"();
  return {v}.now();
end $body$;

-- CURRENT_DATE and its kin can't be shadowed; texts are rewritten to call these, whose names are theirs.
create function {v}."current_date"() returns date language sql stable return {v}.now()::date;
create function {v}."current_time"() returns timetz language sql stable return {v}.now()::timetz;
create function {v}."current_time"(digits integer) returns timetz language sql stable
return pg_catalog.timetz({v}.now()::timetz, digits);
create function {v}."current_timestamp"() returns timestamptz language sql stable return {v}.now()::timestamptz;
create function {v}."current_timestamp"(digits integer) returns timestamptz language sql stable
return pg_catalog.timestamptz({v}.now()::timestamptz, digits);
create function {v}."localtime"() returns time language sql stable return {v}.now()::time;
create function {v}."localtime"(digits integer) returns time language sql stable
return pg_catalog."time"({v}.now()::time, digits);
create function {v}."localtimestamp"() returns timestamp language sql stable return {v}.now()::timestamp;
create function {v}."localtimestamp"(digits integer) returns timestamp language sql stable
return pg_catalog."timestamp"({v}.now()::timestamp, digits);

-- 32 pseudo-random bytes: what the SDK's Random draws from.
create function {v}.megamcp_draw() returns bytea language sql volatile return {s}."~draw"();

create function {v}.random() returns double precision language sql volatile
return (('x' || encode(substr({s}."~draw"(), 1, 7), 'hex'))::bit(56) >> 3)::bigint::double precision / 9007199254740992;

create function {s}."~below"(_span numeric) returns numeric language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp as $body$
declare
  _bytes bytea := {s}."~draw"();
  _wide numeric := 0;
begin
  for _i in 0..23 loop
    _wide := _wide * 256 + get_byte(_bytes, _i);
  end loop;
  return mod(_wide, _span);
end $body$;
create function {v}.random(min integer, max integer) returns integer language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp as $body$
begin
  if min > max then raise exception 'lower bound must be less than or equal to upper bound' using errcode = '22023'; end if;
  return ({s}."~below"(max::numeric - min + 1) + min)::integer;
end $body$;
create function {v}.random(min bigint, max bigint) returns bigint language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp as $body$
begin
  if min > max then raise exception 'lower bound must be less than or equal to upper bound' using errcode = '22023'; end if;
  return ({s}."~below"(max::numeric - min + 1) + min)::bigint;
end $body$;
create function {v}.random(min numeric, max numeric) returns numeric language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp as $body$
declare
  _scale int := greatest(scale(min), scale(max));
begin
  if min > max then raise exception 'lower bound must be less than or equal to upper bound' using errcode = '22023'; end if;
  return round({s}."~below"((max - min) * 10::numeric ^ _scale + 1) / 10::numeric ^ _scale + min, _scale);
end $body$;
create function {v}.random_normal(mean double precision default 0, stddev double precision default 1)
returns double precision language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
declare
  _a double precision := 1 - {v}.random();
  _b double precision := {v}.random();
begin
  return mean + stddev * sqrt(-2 * ln(_a)) * cos(2 * pi() * _b);
end $body$;

create function {s}."~uuid"(_bytes bytea, _version int) returns uuid language sql immutable
return encode(set_byte(set_byte(_bytes, 6, (get_byte(_bytes, 6) & 15) | (_version << 4)),
                       8, (get_byte(_bytes, 8) & 63) | 128), 'hex')::uuid;
create function {v}.gen_random_uuid() returns uuid language sql volatile
return {s}."~uuid"(substr({s}."~draw"(), 1, 16), 4);
create function {v}.uuidv4() returns uuid language sql volatile return {v}.gen_random_uuid();
create function {v}.uuidv7(shift interval default interval '0') returns uuid language sql volatile
return {s}."~uuid"(substr(int8send((extract(epoch from {v}.now() + shift) * 1000)::bigint), 3, 6)
                   || substr({s}."~draw"(), 1, 10), 7);

-- name: sequences
-- The name may be quoted or carry the schema of the views: both forms are what regclass output gives.
create function {s}."~sequence"(name text) returns text language plpgsql immutable set search_path = pg_catalog, pg_temp as $body$
declare
  _parts text[] := parse_ident(name);
begin
  if cardinality(_parts) = 1 or (cardinality(_parts) = 2 and _parts[1] in ({schema}, 'public')) then
    return _parts[cardinality(_parts)];
  end if;
  return null;
end $body$;
create function {s}."~missing"(name text) returns bigint language plpgsql as $body$
begin
  raise exception 'relation "%" does not exist', name using errcode = '42P01';
end $body$;
create function {v}.nextval(sequence text) returns bigint language sql volatile
return case {s}."~sequence"(sequence) {next} else {s}."~missing"(sequence) end;
create function {v}.nextval(sequence regclass) returns bigint language sql volatile return {v}.nextval(sequence::text);
create function {v}.setval(sequence text, value bigint, is_called boolean default true) returns bigint language sql volatile
return case {s}."~sequence"(sequence) {set} else {s}."~missing"(sequence) end;
create function {v}.setval(sequence regclass, value bigint, is_called boolean default true) returns bigint
language sql volatile return {v}.setval(sequence::text, value, is_called);
-- What the call itself drew or set: a call is what PostgreSQL calls a session here.
create function {s}."~drawn"(setting text) returns text language sql stable set search_path = pg_catalog, pg_temp
return nullif(split_part(current_setting(setting, true), ':', case when current_setting(setting, true) like '%:%:%' then 3 else 2 end), '');
create function {v}.currval(sequence text) returns bigint language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp as $body$
declare
  _setting text := case {s}."~sequence"(sequence) {setting} end;
  _value text := {s}."~drawn"(_setting);
begin
  if _setting is null then
    return {s}."~missing"(sequence);
  elsif _value is null then
    raise exception 'currval of sequence "%" is not yet defined in this session', {s}."~sequence"(sequence) using errcode = '55000';
  end if;
  return _value::bigint;
end $body$;
create function {v}.currval(sequence regclass) returns bigint language sql volatile return {v}.currval(sequence::text);
create function {v}.lastval() returns bigint language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
declare
  _value text := {s}."~drawn"('megamcp.c' || nullif(current_setting('megamcp.last', true), ''));
begin
  if _value is null then
    raise exception 'lastval is not yet defined in this session' using errcode = '55000';
  end if;
  return _value::bigint;
end $body$;
create function {v}.pg_get_serial_sequence(table_name text, column_name text) returns text language plpgsql stable as $body$
declare
  _table regclass := table_name::regclass;  -- views have columns, but own no sequence
begin
  if not exists (select from pg_attribute where attrelid = _table and attname = column_name and not attisdropped) then
    raise exception 'column "%" of relation "%" does not exist', column_name,
      (select relname from pg_class where oid = _table) using errcode = '42703';
  end if;
  return (select format('%I.%I', {schema}::text, sequence) from (values {owned}) o(of_table, of_column, sequence)
          where of_table = (select relname from pg_class where oid = _table) and of_column = column_name);
end $body$;

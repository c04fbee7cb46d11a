-- Marks, sums and the way back. Everything here runs under the database's lock.

-- The parts (after, upto] of the log that make the state at `after` the one at `upto`, which is in a segment. What was
-- undone in between is left out where `after` is on the path of `upto`; else it is all that happened from the one to the other.
create function megamcp.spans(after bigint, segment bigint, upto bigint) returns int8multirange
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    at bigint := segment;
    top bigint := upto;
    found_spans int8multirange := '{}';
    s megamcp.segments;
begin
    loop
        select x.* into s from megamcp.segments x where x.id = at;
        exit when s.start is null or after > top;
        if after >= s.start then
            return found_spans + int8multirange(int8range(after, top, '(]'));
        end if;
        found_spans := found_spans + int8multirange(int8range(s.start, top, '(]'));
        top := s.origin;
        at := s.parent;
    end loop;
    return int8multirange(int8range(after, upto, '(]'));
end $$;

-- The end of the log: no position that was used is above.
create function megamcp.head() returns bigint
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select greatest((select max(l.id) from megamcp.log l), (select max(m.position) from megamcp.marks m),
                    (select s.start from megamcp.segments s order by s.id desc limit 1))
$$;

-- Rows added minus rows removed in parts of the log, row by row: n copies of an image more (n > 0) or less.
create function megamcp.net(spans int8multirange) returns table (relation oid, image text, n bigint)
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select x.relation, x.image, sum(x.n)::bigint
      from unnest(net.spans) r (span)
      join megamcp.log l on l.id >= lower(r.span) and l.id < upper(r.span),
           lateral (select a.image, 1 as n from unnest(l.added) a (image)
                    union all
                    select a.image, -1 from unnest(l.removed) a (image)) i,
           lateral (select l.relation, i.image, i.n) x
     group by x.relation, x.image
    having sum(x.n) <> 0
$$;

-- A row's hash: 128 bits of sha256(table, image), as two signed halves. Sums of it are modulo 2^128.
create function megamcp.high(hash bytea) returns bigint
language sql immutable return pg_catalog.int8(pg_catalog.substr(hash, 1, 8));
create function megamcp.low(hash bytea) returns bigint
language sql immutable return pg_catalog.int8(pg_catalog.substr(hash, 9, 8));

create function megamcp.modulo(sum numeric) returns numeric
language sql immutable set search_path = pg_catalog, pg_temp return
    mod(mod(sum, 340282366920938463463374607431768211456) + 340282366920938463463374607431768211456,
        340282366920938463463374607431768211456);

-- (`offset 0` keeps the planner from hashing twice; sums of bigint are cheap, of numeric they aren't.)
create function megamcp.net_sum(after bigint, upto bigint) returns numeric
language sql stable set search_path = pg_catalog, pg_temp as $$
    with t as materialized (
        select t.oid, t.oid::regclass::text || chr(31) as name from megamcp.tables t where t.oid = t.root
    )
    select coalesce(sum(s.n * (s.high * 18446744073709551616 + s.low)), 0)
      from (select x.n, sum(megamcp.high(h.hash)) as high, sum(megamcp.low(h.hash)) as low
              from (select l.relation, i.image, 1 as n from megamcp.log l, unnest(l.added) i (image)
                     where l.id > net_sum.after and l.id <= net_sum.upto
                    union all
                    select l.relation, i.image, -1 from megamcp.log l, unnest(l.removed) i (image)
                     where l.id > net_sum.after and l.id <= net_sum.upto) x
              join t on t.oid = x.relation,
              lateral (select sha256(convert_to(t.name || x.image, 'UTF8')) as hash offset 0) h
             group by x.n) s
$$;

-- The sum of all rows, read from the tables. Each is locked by its name and then compared with its oid, so that
-- nothing else (a view with functions in it) can be read in its place with our rights.
create function megamcp.whole_sum() returns numeric
language plpgsql volatile set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD' set timezone = 'UTC'
set intervalstyle = 'postgres' set extra_float_digits = 1 set bytea_output = 'hex' set xmloption = 'content'
set lc_monetary = 'C' as $$
declare
    t record;
    part numeric;
    total numeric := 0;
begin
    for t in select x.oid, x.kind, x.oid::regclass::text as name from megamcp.tables x where x.oid = x.root order by x.oid loop
        execute format('lock table only %s in access share mode', t.name);
        if to_regclass(t.name) is distinct from t.oid then
            raise exception using errcode = '40001', message = format('table %s changed meanwhile', t.name);
        end if;
        execute format($q$
            select coalesce(sum(megamcp.high(h.hash)), 0) * 18446744073709551616
                   + coalesce(sum(megamcp.low(h.hash)), 0)
              from %s %s x, lateral (select sha256(convert_to(%L || %s, 'UTF8')) as hash offset 0) h$q$,
            case when t.kind = 'r' then 'only' else '' end, t.name, t.name || chr(31), megamcp.image(t.oid, 'x')) into part;
        total := total + part;
    end loop;
    return megamcp.modulo(total);
end $$;

create function megamcp.sequence_values() returns jsonb
language sql volatile set search_path = pg_catalog, pg_temp as $$
    select coalesce(jsonb_object_agg(c.oid, jsonb_build_array(d.last_value, d.is_called)), '{}')
      from pg_class c
      join pg_namespace n on n.oid = c.relnamespace,
           lateral pg_get_sequence_data(c.oid) d
     where c.relkind = 'S' and c.relpersistence <> 't'
       and n.nspname not in ('pg_catalog', 'information_schema', 'megamcp')
$$;

-- A position that can be come back to; the last one where nothing has happened since.
create function megamcp.mark(out "position" bigint, out written boolean, out exact boolean, out sum numeric,
    out call bigint)
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    last megamcp.marks;
    since record;
    sequences jsonb := megamcp.sequence_values();
    here bigint := (select h.segment from megamcp.here h);
begin
    call := (select coalesce(max(c.id), 0) from megamcp.calls c);
    select m.* into last from megamcp.marks m order by m.position desc limit 1;
    written := exists (select from megamcp.log l where l.id > last.position) or sequences is distinct from last.sequences;
    exact := not exists (select from megamcp.log l where l.id > last.position and l.barrier is not null);
    if not written and here = last.segment and call = last.call then
        position := last.position;
        sum := last.sum;
        return;
    end if;
    position := nextval(pg_get_serial_sequence('megamcp.log', 'id'));
    if here <> last.segment then    -- come back to an older mark since
        select m.sum, s.start into since from megamcp.segments s join megamcp.marks m on m.position = s.origin
         where s.id = here;
    else
        select last.sum as sum, last.position as start into since;
    end if;
    if since.sum is not null and not exists (select from megamcp.log l where l.id > since.start and l.barrier is not null) then
        sum := megamcp.modulo(since.sum + megamcp.net_sum(since.start, position));
    end if;
    insert into megamcp.marks (position, previous, segment, call, sequences, sum)
    values (position, last.position, here, call, sequences, sum);
end $$;

-- The digest read from the tables. It is kept with the last mark where nothing has happened since.
create function megamcp.digest() returns numeric
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    found_sum numeric := megamcp.whole_sum();
begin
    update megamcp.marks m set sum = found_sum
     where m.position = (select max(x.position) from megamcp.marks x) and m.sum is null
       and not exists (select from megamcp.log l where l.id > m.position);
    return found_sum;
end $$;

create function megamcp.reachable(mark bigint) returns boolean
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select exists (select from megamcp.marks m where m.position = mark)
       and not exists (select from megamcp.log l where l.id > mark and l.barrier is not null)
$$;

create function megamcp.set_sequences(sequences jsonb) returns void
language sql volatile set search_path = pg_catalog, pg_temp as $$
    select setval(s.key::oid::regclass, (s.value ->> 0)::bigint, (s.value ->> 1)::boolean) from jsonb_each(sequences) s
$$;

create function megamcp.restore_sequences(mark bigint) returns void
language sql volatile set search_path = pg_catalog, pg_temp as $$
    select megamcp.set_sequences(m.sequences) from megamcp.marks m where m.position = mark
$$;

-- The rows of images. A function, so that no cast of the user's own takes part.
create function megamcp.rows_of(images text[], shape anyelement) returns setof anyelement
language plpgsql stable set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD' set timezone = 'UTC'
set intervalstyle = 'postgres' set extra_float_digits = 1 set bytea_output = 'hex' set xmloption = 'content'
set lc_monetary = 'C' as $$
declare
    image text;
    one shape%type;
begin
    foreach image in array images loop
        one := record_in(textout(image), pg_typeof(shape)::oid, -1);
        return next one;
    end loop;
end $$;

-- The best unique index over plain columns that are never null: what tells rows apart, else null.
create function megamcp.row_key(relation oid) returns oid
language sql stable set search_path = pg_catalog, pg_temp as $$
    select i.indexrelid
      from pg_index i
      join pg_class x on x.oid = i.indexrelid
      join pg_am m on m.oid = x.relam
     where i.indrelid = relation and i.indisunique and i.indisvalid and m.amname = 'btree'
       and i.indpred is null and i.indexprs is null
       and not exists (select from unnest(i.indkey[0:i.indnkeyatts - 1]) k (attnum)
                         join pg_attribute a on a.attrelid = relation and a.attnum = k.attnum
                        where not a.attnotnull or a.attgenerated <> '')
     order by i.indisprimary desc, i.indnkeyatts, i.indexrelid limit 1
$$;

create function megamcp.key_columns(relation oid) returns name[]
language sql stable set search_path = pg_catalog, pg_temp as $$
    select array_agg(a.attname order by k)
      from pg_index i, generate_series(0, i.indnkeyatts - 1) k
      join pg_attribute a on a.attrelid = relation
     where i.indexrelid = megamcp.row_key(relation) and a.attnum = i.indkey[k]
$$;

-- Condition that finds the row of `d` in `t`, by the operators of the index; null where the table has no key.
create function megamcp.same_key(relation oid, t text, d text) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
    select string_agg(format('%s.%I operator(%I.%s) %s.%I', t, a.attname, n.nspname, o.oprname, d, a.attname), ' and ')
      from pg_index i,
           lateral (select i.indkey[k] as attnum, i.indclass[k] as opclass from generate_series(0, i.indnkeyatts - 1) k) k
      join pg_attribute a on a.attrelid = relation and a.attnum = k.attnum
      join pg_opclass c on c.oid = k.opclass
      join pg_amop p on p.amopfamily = c.opcfamily and p.amopstrategy = 3
                    and p.amoplefttype = c.opcintype and p.amoprighttype = c.opcintype
      join pg_operator o on o.oid = p.amopopr
      join pg_namespace n on n.oid = o.oprnamespace
     where i.indexrelid = megamcp.row_key(relation)
$$;

-- Takes rows out of a table and puts others in. Runs with the rights of the database's hand, since indexes, checks and
-- domains of the table may call functions of the user's.
create function megamcp.apply(relation oid, doomed text[], wanted text[]) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD' set timezone = 'UTC'
set intervalstyle = 'postgres' set extra_float_digits = 1 set bytea_output = 'hex' set xmloption = 'content'
set lc_monetary = 'C' set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off as $$
declare
    name text := relation::regclass::text;
    one text := case when (select c.relkind from pg_class c where c.oid = relation) = 'r' then 'only ' else '' end || name;
    key text := megamcp.same_key(relation, 't', 'd');
    columns text := (select string_agg(quote_ident(a.attname), ', ' order by a.attnum) from pg_attribute a
                      where a.attrelid = relation and a.attnum > 0 and not a.attisdropped and a.attgenerated = '');
begin
    if doomed is not null and key is not null then
        execute format('delete from %s t using megamcp.rows_of($1, null::%s) d where %s', one, name, key) using doomed;
    elsif doomed is not null then
        set local enable_hashjoin = on;
        execute format($q$
            delete from %1$s t using (
                select x.place, x.at from (
                    select r.tableoid as place, r.ctid as at, i.image, row_number() over (partition by i.image) as n
                      from %1$s r, lateral (select %2$s as image offset 0) i
                     where i.image = any ($1)) x
                join (select d.image, count(*) as copies from unnest($1) d (image) group by d.image) d
                  on d.image = x.image and x.n <= d.copies) y
             where t.tableoid = y.place and t.ctid = y.at$q$, one, megamcp.image(relation, 'r')) using doomed;
    end if;
    if wanted is not null then
        execute format('insert into %s %s overriding system value select %s from megamcp.rows_of($1, null::%s) d',
                       name, '(' || columns || ')', columns, name) using wanted;
    end if;
end $$;

-- The net rows by relation: `less` are there less often at the end than at the beginning, `more` more often.
create function megamcp.plan(spans int8multirange, out relation oid, out less text[], out more text[])
returns setof record language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select n.relation,
           array_agg(n.image) filter (where n.n < 0),
           array_agg(n.image) filter (where n.n > 0)
      from (select x.relation, x.image, x.n from megamcp.net(plan.spans) x, generate_series(1, abs(x.n))) n
     group by n.relation order by n.relation
$$;

-- A new segment of the path of calls that starts at a mark: what came after it is off the path.
-- `landed`: the state is the mark's already.
create function megamcp.leap(mark bigint, landed boolean) returns void
language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
    next bigint;
begin
    insert into megamcp.segments (parent, origin, call, start)
    select m.segment, m.position, m.call, case when landed then nextval(pg_get_serial_sequence('megamcp.log', 'id')) end
      from megamcp.marks m where m.position = mark
    returning id into next;
    update megamcp.here set segment = next;
end $$;

-- How to get to a mark from here.
create function megamcp.way_back(mark bigint) returns int8multirange
language sql stable security definer set search_path = pg_catalog, pg_temp as
    $$ select megamcp.spans(mark, h.segment, megamcp.head()) from megamcp.here h $$;

-- The state is the origin's from here on.
create function megamcp.land() returns void
language sql volatile security definer set search_path = pg_catalog, pg_temp as $$
    update megamcp.segments s set start = nextval(pg_get_serial_sequence('megamcp.log', 'id'))
      from megamcp.here h where s.id = h.segment
$$;

-- Back to a mark, by appending: the hand's changes are logged like all others. Sequences follow after its commit.
create function megamcp.rewind(mark bigint) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    p record;
    back int8multirange := megamcp.way_back(mark);
    head bigint := megamcp.head();
begin
    if not megamcp.reachable(mark) then
        raise exception using errcode = 'MM410', message = 'position is not reachable';
    end if;
    perform megamcp.leap(mark, false);
    for p in select * from megamcp.plan(back) loop
        perform megamcp.apply(p.relation, p.more, p.less);
    end loop;
    if exists (select from megamcp.net(back + int8multirange(int8range(head, 9223372036854775806, '(]')))) then
        raise exception using errcode = 'MM500', message = 'the rows could not be put back exactly',
            hint = 'A trigger or rule that is ENABLE ALWAYS or REPLICA may have changed them.';
    end if;
    perform megamcp.land();
end $$;

create function megamcp.end_call(nonce uuid) returns boolean
language sql volatile set search_path = pg_catalog, pg_temp as $$
    select coalesce(bool_or(pg_terminate_backend(l.pid, 2000)), false)
      from (select megamcp.call_lock(nonce) as key) k
      join pg_lock_status() l on l.locktype = 'advisory' and l.objsubid = 1 and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
       and l.classid::bigint = (k.key >> 32) & 4294967295 and l.objid::bigint = k.key & 4294967295
$$;

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
        exit when after > top;
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
language sql stable set search_path = pg_catalog, pg_temp as $$
    select greatest((select max(l.id) from megamcp.log l), (select max(m.position) from megamcp.marks m),
                    (select s.start from megamcp.segments s order by s.id desc limit 1))
$$;

-- Rows added minus rows removed in parts of the log: n copies of a row more (n > 0) or less. Of its image only the hash
-- and a place, since images may be long: entry * 2048 + its number on the side `removed`, or 1024 more on `added`.
create function megamcp.net(spans int8multirange)
returns table (relation oid, hash bytea, n bigint, place bigint, bytes integer)
language sql stable set search_path = pg_catalog, pg_temp set enable_memoize = off as $$
    select x.relation, x.hash, sum(x.n)::bigint, max(x.place), max(x.bytes)
      from (select l.relation, sha256(convert_to(i.image, 'UTF8')) as hash, i.n, l.id * 2048 + i.at as place,
                   octet_length(i.image) as bytes
              from unnest(net.spans) r (span)
              join megamcp.log l on l.id >= lower(r.span) and l.id < upper(r.span),
                   lateral (select a.image, -1 as n, a.at - 1 as at from unnest(l.removed) with ordinality a (image, at)
                            union all
                            select a.image, 1, a.at + 1023 from unnest(l.added) with ordinality a (image, at)) i
            offset 0) x
     group by x.relation, x.hash
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

-- The sum of all rows and of the shape (shape.sql), read from the tables. Each is locked by its name and then compared with its oid, so that
-- nothing else (a view with functions in it) can be read in its place with our rights.
create function megamcp.whole_sum() returns numeric
language plpgsql volatile set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD' set timezone = 'UTC'
set intervalstyle = 'postgres' set extra_float_digits = 1 set bytea_output = 'hex' set xmloption = 'content'
set lc_monetary = 'C' as $$
declare
    t record;
    part numeric;
    total numeric := megamcp.shape_sum();
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
    out call bigint, out bytes bigint)
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
        bytes := last.bytes;
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
    bytes := last.bytes + coalesce((select sum(coalesce(pg_column_size(l.removed), 0) + coalesce(pg_column_size(l.added), 0))
                                      from megamcp.log l where l.id > last.position), 0);
    insert into megamcp.marks (position, previous, segment, call, bytes, sequences, sum)
    values (position, last.position, here, call, bytes, sequences, sum);
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
language sql stable set search_path = pg_catalog, pg_temp as $$
    select exists (select from megamcp.marks m, megamcp.here h where m.position = mark and mark >= h.trimmed)
       and not exists (select from megamcp.log l where l.id > mark and l.barrier is not null)
$$;

-- What a copy made now would be: `head` and `call` as they are, and whether it stands at a mark just as it is.
create function megamcp.standing(mark bigint, out head bigint, out call bigint, out there boolean)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select megamcp.head(), (select coalesce(max(c.id), 0) from megamcp.calls c),
           exists (select from megamcp.marks m, megamcp.here h join megamcp.segments s on s.id = h.segment
                    where m.position = mark and m.sequences = megamcp.sequence_values()
                      and not exists (select from megamcp.log l
                                       where l.id > case when s.id = m.segment then m.position
                                                         when s.origin = m.position then s.start end)
                      and (s.id = m.segment or s.origin = m.position and s.start is not null))
$$;

create function megamcp.set_sequences(sequences jsonb) returns void
language sql volatile set search_path = pg_catalog, pg_temp as $$
    select setval(s.key::oid::regclass, (s.value ->> 0)::bigint, (s.value ->> 1)::boolean) from jsonb_each(sequences) s
$$;

create function megamcp.restore_sequences(mark bigint) returns void
language sql volatile set search_path = pg_catalog, pg_temp as $$
    select megamcp.set_sequences(m.sequences) from megamcp.marks m where m.position = mark
$$;

-- What the hand has to do, in portions: of the log it sees what is here and no more. Images are where they were logged
-- (`places`), or came from elsewhere, as UTF-8 in pieces; of what goes from a keyless table there are hashes.
create table megamcp.moves (
    n bigint,
    piece integer default 0,            -- the first one says it all, the others have bytes only
    relation oid,
    goes boolean,
    places bigint[],
    hashes bytea[],
    lengths integer[],
    bytes bytea,
    primary key (n, piece)
);
alter table megamcp.moves alter bytes set storage external;

create function megamcp.clear_moves() returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    if exists (select from megamcp.moves) then
        truncate megamcp.moves;
    end if;
end $$;

create function megamcp.portions(relation oid, goes boolean) returns setof bigint
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select m.n from megamcp.moves m where m.relation = portions.relation and m.goes = portions.goes order by m.n
$$;

create function megamcp.move(n bigint, out relation oid, out goes boolean, out hashes bytea[])
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select m.relation, m.goes, m.hashes from megamcp.moves m where m.n = move.n and m.piece = 0
$$;

create function megamcp.moved_images(n bigint) returns text[]
language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
    first megamcp.moves := (select x from megamcp.moves x where x.n = moved_images.n and x.piece = 0);
    bytes bytea;
    length integer;
    start integer := 1;
    found_images text[] := '{}';
begin
    if first.lengths is null then
        return megamcp.images(first.places);
    end if;
    bytes := (select string_agg(x.bytes, '' order by x.piece) from megamcp.moves x where x.n = moved_images.n);
    foreach length in array first.lengths loop
        found_images := found_images || convert_from(substr(bytes, start, length), 'UTF8');
        start := start + length;
    end loop;
    return found_images;
end $$;

-- The rows of a portion. A function, so that no cast of the user's own takes part.
create function megamcp.rows_of(n bigint, shape anyelement) returns setof anyelement
language plpgsql stable set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD' set timezone = 'UTC'
set intervalstyle = 'postgres' set extra_float_digits = 1 set bytea_output = 'hex' set xmloption = 'content'
set lc_monetary = 'C' as $$
declare
    image text;
    one shape%type;
begin
    foreach image in array megamcp.moved_images(n) loop
        one := record_in(textout(image), pg_typeof(shape)::oid, -1);
        return next one;
    end loop;
end $$;

-- A value as JSON; a long one is told by what its text is.
create function megamcp.told(value anyelement) returns json
language plpgsql stable as $$
declare
    words text := pg_catalog.concat(value);
begin
    if pg_catalog.octet_length(words) <= megamcp.longest_told() then
        return pg_catalog.to_json(value);
    end if;
    return pg_catalog.json_build_object('long', true, 'bytes', pg_catalog.octet_length(words),
        'sha256', pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(words, 'UTF8')), 'hex'));
end $$;
create function megamcp.longest_told() returns integer language sql immutable return 65536;

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

-- `only` what is in the table itself, unless it is partitioned.
create function megamcp.one(relation oid) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
    select case when c.relkind = 'r' then 'only ' else '' end || c.oid::regclass from pg_class c where c.oid = relation
$$;

-- Puts a portion of rows into a table or takes it out of it. Runs with the rights of the database's hand, since indexes,
-- checks and domains of the table may call functions of the user's.
create function megamcp.carry_out(n bigint) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    m record := megamcp.move(n);
begin
    if not m.goes then
        perform megamcp.put(n, m.relation);
    elsif m.hashes is null then
        perform megamcp.take_by_key(n, m.relation);
    else
        perform megamcp.take_by_hash(m.relation, m.hashes);
    end if;
end $$;

create function megamcp.put(n bigint, relation oid) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    columns text := (select string_agg(quote_ident(a.attname), ', ' order by a.attnum) from pg_attribute a
                      where a.attrelid = relation and a.attnum > 0 and not a.attisdropped and a.attgenerated = '');
begin
    execute format('insert into %s %s overriding system value select %s from megamcp.rows_of($1, null::%1$s) d',
                   relation::regclass, '(' || columns || ')', columns) using n;
end $$;

create function megamcp.take_by_key(n bigint, relation oid) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off as $$
begin
    execute format('delete from %s t using megamcp.rows_of($1, null::%s) d where %s', megamcp.one(relation),
                   relation::regclass, megamcp.same_key(relation, 't', 'd')) using n;
end $$;

-- Reads the whole table, so it is given many at once.
create function megamcp.take_by_hash(relation oid, hashes bytea[]) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD' set timezone = 'UTC'
set intervalstyle = 'postgres' set extra_float_digits = 1 set bytea_output = 'hex' set xmloption = 'content'
set lc_monetary = 'C' set enable_nestloop = off set enable_mergejoin = off as $$
begin
    execute format($q$
        delete from %1$s t using (
            select x.place, x.at from (
                select i.place, i.at, i.hash, row_number() over (partition by i.hash) as n
                  from (select r.tableoid as place, r.ctid as at, sha256(convert_to(%2$s, 'UTF8')) as hash from %1$s r
                        offset 0) i
                 where i.hash = any ($1)) x
            join (select d.hash, count(*) as copies from unnest($1) d (hash) group by d.hash) d
              on d.hash = x.hash and x.n <= d.copies) y
         where t.tableoid = y.place and t.ctid = y.at$q$, megamcp.one(relation), megamcp.image(relation, 'r')) using hashes;
end $$;

-- Tables whose rows can't be found by a key.
create function megamcp.keyless() returns oid[]
language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(array_agg(t.oid), '{}') from megamcp.tables t
     where t.oid = t.root and megamcp.same_key(t.oid, 't', 'd') is null
$$;

-- The net rows, by table, in portions: first all that have to go, then all that have to come. Where to find their images
-- (`images`), or their hashes for what goes from a keyless table. Backward: from the end of the spans to their beginning.
create function megamcp.plan(spans int8multirange, backward boolean, keyless oid[])
returns table (relation oid, goes boolean, places bigint[], hashes bytea[])
language sql stable set search_path = pg_catalog, pg_temp as $$
    select x.relation, x.goes, case when not x.bare then array_agg(x.place) end, case when x.bare then array_agg(x.hash) end
      from (select c.*, (row_number() over w - 1) / case when c.bare then 100000 else 1000 end as chunk,
                   case when c.bare then 0 else sum(c.bytes) over w / megamcp.entry_bytes() end as part
              from (select n.relation, n.place, n.hash, n.bytes, g.goes, g.goes and n.relation = any (plan.keyless) as bare
                      from megamcp.net(plan.spans) n, generate_series(1, abs(n.n)),
                           lateral (select (n.n > 0) = plan.backward as goes) g) c
            window w as (partition by c.relation, c.goes, c.bare order by c.place rows unbounded preceding)) x
     group by x.relation, x.goes, x.bare, x.chunk, x.part
     order by x.relation, x.goes desc, x.chunk, x.part
$$;

-- What is at places of the log.
create function megamcp.images(places bigint[]) returns text[]
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    e record;
    spot bigint;
    removed text[];
    added text[];
    found_images text[] := '{}';
begin
    for e in select p.place >> 11 as id, array_agg(p.place & 2047) as spots from unnest(places) p (place) group by 1 loop
        select l.removed, l.added into removed, added from megamcp.log l where l.id = e.id;
        foreach spot in array e.spots loop
            found_images := found_images || case when spot < 1024 then removed[spot + 1] else added[spot - 1023] end;
        end loop;
    end loop;
    return found_images;
end $$;

-- A new segment of the path of calls that starts at a mark, whose state this is: what came after it is off the path.
create function megamcp.leap(mark bigint) returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    next bigint;
begin
    insert into megamcp.segments (parent, origin, call, start)
    select m.segment, m.position, m.call, nextval(pg_get_serial_sequence('megamcp.log', 'id'))
      from megamcp.marks m where m.position = mark
    returning id into next;
    update megamcp.here set segment = next, hand = null;
end $$;

-- How to get to a mark from here.
create function megamcp.way_back(mark bigint) returns int8multirange
language sql stable set search_path = pg_catalog, pg_temp as
    $$ select megamcp.spans(mark, h.segment, megamcp.head()) from megamcp.here h $$;

-- Whether nothing is left to undo. Asked by the hand before it commits, so that nothing is changed where the answer is no;
-- and by the superuser afterwards, since a user's code may run in the hand's session until the very end of its COMMIT.
create function megamcp.is_back(mark bigint) returns boolean
language sql stable security definer set search_path = pg_catalog, pg_temp as
    $$ select megamcp.reachable(mark) and not exists (select from megamcp.net(megamcp.way_back(mark))) $$;

-- What parts of the log sum up to, by table: equal for equal changes, in whatever database.
create function megamcp.sums(spans int8multirange) returns table (relation oid, high numeric, low numeric)
language sql stable set search_path = pg_catalog, pg_temp as $$
    select n.relation, sum(n.n::numeric * megamcp.high(n.hash)), sum(n.n::numeric * megamcp.low(n.hash))
      from megamcp.net(sums.spans) n group by n.relation order by n.relation
$$;

-- What is up to a mark is given up: first the word that it is there, so that who is on the way there at the moment finds out.
create function megamcp.begin_trim(mark bigint) returns boolean
language sql volatile set search_path = pg_catalog, pg_temp as $$
    update megamcp.here h set trimmed = mark
     where mark > h.trimmed and exists (select from megamcp.marks m where m.position = mark) returning true
$$;

-- Some of it, without a lock that anybody waits for; how much. The marks that sums begin at stay.
create function megamcp.trim(most integer) returns bigint
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
declare
    h megamcp.here := (select x from megamcp.here x);
    gone bigint;
begin
    delete from megamcp.log l
     where l.id = any (array(select x.id from megamcp.log x where x.id <= h.trimmed order by x.id limit most));
    get diagnostics gone = row_count;
    if gone = 0 then
        delete from megamcp.marks m
         where m.position < h.trimmed and m.position <> 0
           and m.position is distinct from (select s.origin from megamcp.segments s where s.id = h.segment);
    end if;
    return gone;
end $$;

create function megamcp.end_call(nonce uuid) returns boolean
language sql volatile set search_path = pg_catalog, pg_temp as $$
    select coalesce(bool_or(pg_terminate_backend(l.pid, 2000)), false)
      from (select megamcp.call_lock(nonce) as key) k
      join pg_lock_status() l on l.locktype = 'advisory' and l.objsubid = 1 and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
       and l.classid::bigint = (k.key >> 32) & 4294967295 and l.objid::bigint = k.key & 4294967295
$$;

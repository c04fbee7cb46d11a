-- The undo log: what every statement removed from and added to every table, as text.
--
-- A table is a multiset of rows, so what happened between two positions is a sum: the rows added minus the rows
-- removed. To undo is to subtract it. The sum doesn't depend on the order of the entries, and must not: where triggers
-- change rows from within a statement, the inner change is logged before the outer one.
--
-- A row's image is record_out of the whole row under fixed settings, with null in the place of generated columns (but
-- for stored ones of a domain, which may not take null), so that equal rows have equal images and record_in gives the
-- row back. Never `row::text`: a user may define that cast, and these functions run with our rights. Partitions log in
-- the shape and the name of their root.

create schema megamcp;

-- One entry a statement and thousand rows, or fewer where rows are long: but for its last row, each side of an entry
-- is shorter than `entry_bytes`. Whoever reads the log reads an entry at a time, so this bounds the memory of it all.
-- `barrier`: something that can't be undone row by row (DDL, TRUNCATE).
create function megamcp.entry_bytes() returns bigint language sql immutable return 4194304;
create table megamcp.log (
    id bigint generated always as identity primary key,
    relation oid,
    removed text[],
    added text[],
    barrier text
);
create index on megamcp.log (id) where barrier is not null;

-- Positions that can be come back to.
create table megamcp.marks (
    position bigint primary key,
    previous bigint,
    segment bigint not null,
    call bigint not null,               -- the last one before it
    bytes bigint not null default 0,    -- that the log had grown by up to here, whatever was trimmed since
    sequences jsonb not null,           -- oid -> [last_value, is_called]
    sum numeric                         -- 128-bit sum of all rows' hashes; null where nobody has computed it
);

-- A user's tables, and the relation under which each one's changes are logged.
create view megamcp.tables as
select c.oid, coalesce(pg_catalog.pg_partition_root(c.oid), c.oid) as root, c.relkind as kind, c.relpersistence as persistence,
       c.relkind = 'r' and exists (
         select from pg_catalog.pg_inherits i where c.oid in (i.inhrelid, i.inhparent)) as inherits
  from pg_catalog.pg_class c
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where c.relkind in ('r', 'p') and c.relpersistence <> 't'
   and n.nspname not in ('pg_catalog', 'information_schema', 'megamcp', 'pg_toast');

-- The settings under which values become text and text becomes values.
create function megamcp.canonical() returns text
language sql immutable set search_path = pg_catalog, pg_temp return
    'set search_path = pg_catalog, pg_temp set datestyle = ''ISO, YMD'' set timezone = ''UTC'' '
    'set intervalstyle = ''postgres'' set extra_float_digits = 1 set bytea_output = ''hex'' '
    'set xmloption = ''content'' set lc_monetary = ''C''';

-- Expression: the image of a row of the relation's shape that is called `alias`.
create function megamcp.image(relation oid, alias text) returns text
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
    select 'textin(record_out(row('
           || coalesce(string_agg(case when a.attgenerated = '' or a.attgenerated = 's' and t.typtype = 'd'
                                       then alias || '.' || quote_ident(a.attname) else 'null' end,
                                  ', ' order by a.attnum), '')
           || ')))'
      from pg_attribute a join pg_type t on t.oid = a.atttypid
     where a.attrelid = relation and a.attnum > 0 and not a.attisdropped;
end;

-- Changes wait for whoever holds the database: so the log stands still under the lock, also for a client that came
-- another way than it should. The database's own hand works on behalf of the one who has the lock: that one session of it,
-- since whatever runs there may give the role another password and come again.
create function megamcp.gate() returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if session_user = current_database() || '_hand' and pg_backend_pid() = (select h.hand from megamcp.here h) then
        return;
    end if;
    perform pg_advisory_xact_lock_shared(7723);
end $$;

create function megamcp.log_barrier(what text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform megamcp.gate();
    insert into megamcp.log (barrier) values (what);
end $$;

create function megamcp.log_truncate() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform megamcp.log_barrier('TRUNCATE');
    return null;
end $$;

-- Text of the trigger function of one table.
create function megamcp.log_function(relation oid, root oid, inherits boolean) returns text
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    -- Row by row and not by an aggregate: nothing but one entry of it is in memory, or in temporary files.
    side text := $q$
        for image in select %1$s from %2$s x loop
            if n_%2$s >= 1000 or bytes >= megamcp.entry_bytes() then
                insert into megamcp.log (relation, %2$s) values (%3$s, images_%2$s);
                images_%2$s := '{}';
                n_%2$s := 0;
                bytes := 0;
            end if;
            images_%2$s := images_%2$s || image;
            n_%2$s := n_%2$s + 1;
            bytes := bytes + octet_length(image);
        end loop;
        bytes := 0;$q$;
begin
    -- Row by row where tables inherit: a parent's transition table has children's rows without their own columns, and
    -- nobody's has a row that MERGE moves to another partition.
    if inherits then
        return format($f$
begin
    perform megamcp.gate();
    insert into megamcp.log (relation, removed, added)
    values (%s, case when tg_op <> 'INSERT' then array[%s] end, case when tg_op <> 'DELETE' then array[%s] end);
    return null;
end $f$, root, megamcp.image(root, 'old'), megamcp.image(root, 'new'));
    end if;
    return format($f$
declare
    image text;
    images_removed text[] := '{}';
    images_added text[] := '{}';
    n_removed integer := 0;
    n_added integer := 0;
    bytes bigint := 0;
begin
    perform megamcp.gate();
    if tg_op <> 'INSERT' then%s
    end if;
    if tg_op <> 'DELETE' then%s
    end if;
    if n_removed + n_added > 0 then
        insert into megamcp.log (relation, removed, added)
        values (%s, nullif(images_removed, '{}'), nullif(images_added, '{}'));
    end if;
    return null;
end $f$, format(side, megamcp.image(root, 'x'), 'removed', root), format(side, megamcp.image(root, 'x'), 'added', root), root);
end $$;

-- Puts the log's triggers on every table that lacks them, and takes away the functions of tables that are gone.
create function megamcp.watch() returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    t record;
    f record;
    body text;
    fires text;
begin
    for t in select x.*, x.oid::regclass as name, format('megamcp.%I', 'log_' || x.oid) as function
               from megamcp.tables x where x.kind = 'r' order by x.oid loop
        if t.persistence = 'u' then
            raise exception using errcode = '0A000', message = format('table %s is UNLOGGED', t.name),
                detail = 'After a crash of the server it would be empty, and a checkpoint of it untrue.',
                hint = 'Leave UNLOGGED out.';
        end if;
        body := megamcp.log_function(t.oid, t.root, t.inherits);
        if body is distinct from (select p.prosrc from pg_proc p where p.oid = to_regprocedure(t.function || '()')) then
            execute format('create or replace function %s() returns trigger language plpgsql security definer %s as %L',
                           t.function, megamcp.canonical(), body);
            execute format('revoke all on function %s() from public', t.function);
        end if;
        fires := case when t.inherits then 'row' else 'statement' end;
        if (select count(*) from pg_trigger g
             where g.tgrelid = t.oid and g.tgenabled = 'A' and starts_with(g.tgname, 'megamcp_')
               and g.tgqual is null and (g.tgtype & 1 = 1) = (t.inherits and g.tgname <> 'megamcp_truncate')
               and g.tgfoid = case when g.tgname = 'megamcp_truncate' then 'megamcp.log_truncate()'::regprocedure
                                   else to_regprocedure(t.function || '()') end) = 4 then
            continue;
        end if;
        for f in select g.tgname from pg_trigger g join pg_proc p on p.oid = g.tgfoid
                  where g.tgrelid = t.oid and not g.tgisinternal
                    and (p.pronamespace = 'megamcp'::regnamespace or starts_with(g.tgname, 'megamcp_')) loop
            execute format('drop trigger %I on %s', f.tgname, t.name);
        end loop;
        execute format($e$
            create trigger megamcp_insert after insert on %1$s %3$s for each %2$s execute function %6$s();
            create trigger megamcp_update after update on %1$s %4$s for each %2$s execute function %6$s();
            create trigger megamcp_delete after delete on %1$s %5$s for each %2$s execute function %6$s();
            create trigger megamcp_truncate after truncate on %1$s for each statement execute function megamcp.log_truncate();
            alter table only %1$s enable always trigger megamcp_insert, enable always trigger megamcp_update,
                enable always trigger megamcp_delete, enable always trigger megamcp_truncate$e$,
            t.name, fires,
            case when not t.inherits then 'referencing new table as added' end,
            case when not t.inherits then 'referencing old table as removed new table as added' end,
            case when not t.inherits then 'referencing old table as removed' end,
            t.function);
    end loop;
    for f in select p.oid::regprocedure as name from pg_proc p
              where p.pronamespace = 'megamcp'::regnamespace and p.proname ~ '^log_\d+$'
                and not exists (select from megamcp.tables x where 'log_' || x.oid = p.proname) loop
        execute format('drop function %s', f.name);
    end loop;
end $$;

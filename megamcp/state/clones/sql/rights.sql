-- What a client of the database may see and do besides its own objects. Catalogs are per database, so all of this is
-- done once, in the source, and is in every clone of it.

-- Views that show other databases' sessions: the same view, of this database's own login alone.
do $do$
declare
    v record;
    own text := '(select a.pid from pg_stat_get_activity(null) a '
                'join pg_database d on d.oid = a.datid and d.datname = current_database() '
                'join pg_authid u on u.oid = a.usesysid and u.rolname = session_user)';
begin
    set local allow_system_table_mods = on;
    for v in
        select c.oid, c.relname as name, c.oid::regclass as full_name, pg_get_viewdef(c.oid) as definition,
               string_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' order by a.attnum) as columns,
               bool_or(a.attname = 'pid') as has_pid, bool_or(a.attname = 'datname') as has_datname
          from pg_class c
          join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
         where c.relkind = 'v' and c.relnamespace = 'pg_catalog'::regnamespace
           and (c.relname in ('pg_locks', 'pg_stat_activity', 'pg_stat_ssl', 'pg_stat_gssapi', 'pg_stat_replication',
                              'pg_stat_wal_receiver', 'pg_stat_subscription', 'pg_stat_subscription_stats',
                              'pg_stat_database', 'pg_stat_database_conflicts', 'pg_stat_replication_slots',
                              'pg_replication_slots', 'pg_prepared_xacts', 'pg_stat_recovery_prefetch')
                or c.relname like 'pg\_stat\_progress\_%')
         group by c.oid
    loop
        execute format($f$create function megamcp.%I() returns table (%s) language sql stable security definer
            set search_path = pg_catalog, pg_temp as %L$f$, 'see_' || v.name, v.columns,
            format('select * from (%s) v where %s', rtrim(v.definition, '; '),
                   case when v.has_pid then 'v.pid in ' || own
                        when v.has_datname then 'v.datname = current_database()'
                        else 'false' end));
        execute format('create or replace view %s as select * from megamcp.%I()', v.full_name, 'see_' || v.name);
    end loop;
    set local allow_system_table_mods = off;
end $do$;

revoke all on all tables in schema megamcp from public;
revoke all on all functions in schema megamcp from public;
grant usage on schema megamcp to public;
grant execute on function megamcp.call_begin(text, text, text), megamcp.call_finish(text, text, text, text, boolean),
    megamcp.call_fail(text, text, text, text), megamcp.query_begin(text), megamcp.enter(bytea), megamcp.leave(bytea)
    to public;

-- asyncpg ends each use of a pooled connection with pg_advisory_unlock_all(). Agents have no advisory locks of their own,
-- and the one that megamcp.enter took for them has to stay until the transaction is over: so it does nothing for them.
-- PostgreSQL calls its own functions by their number and not by what the catalog says, hence another under the old name.
alter function pg_catalog.pg_advisory_unlock_all() rename to mm_unlock_all;
revoke all on function pg_catalog.mm_unlock_all() from public;
create function pg_catalog.pg_advisory_unlock_all() returns void
language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
begin
    if has_function_privilege('pg_catalog.mm_unlock_all()', 'execute') then
        perform pg_catalog.mm_unlock_all();
    end if;
end $$;

-- Functions that reach what the views hide, other sessions, the server's files, or our lock.
do $do$
declare
    f record;
begin
    for f in
        select p.oid::regprocedure as name from pg_proc p
         where p.pronamespace = 'pg_catalog'::regnamespace
           and p.proname <> 'pg_advisory_unlock_all'
           and (p.proname ~ '^(pg_advisory_|pg_try_advisory_|lo_|pg_stat_get_(activity|backend_|db_|progress_|wal_|replication|subscription|snapshot)|pg_ls_|pg_read_)'
                or p.proname in ('pg_cancel_backend', 'pg_terminate_backend', 'pg_lock_status', 'pg_blocking_pids',
                                 'pg_safe_snapshot_blocking_pids', 'pg_isolation_test_session_is_blocked', 'pg_prepared_xact',
                                 'pg_get_replication_slots', 'pg_show_replication_origin_status', 'pg_stat_file',
                                 'pg_logical_emit_message', 'pg_replication_origin_session_setup', 'loread', 'lowrite',
                                 'pg_log_backend_memory_contexts', 'pg_get_backend_memory_contexts',
                                 'pg_stat_reset', 'pg_stat_reset_shared', 'pg_promote', 'pg_export_snapshot'))
           and p.prorettype <> 'trigger'::regtype
           -- Types' own functions must stay.
           and not exists (select from pg_type t where p.oid in (t.typinput, t.typoutput, t.typreceive, t.typsend))
    loop
        execute format('revoke all on function %s from public', f.name);
    end loop;
    for f in
        select p.oid::regprocedure as name from pg_proc p
         where p.pronamespace = 'megamcp'::regnamespace and starts_with(p.proname, 'see_')
    loop
        execute format('grant execute on function %s to public', f.name);
    end loop;
end $do$;

revoke all on pg_catalog.pg_largeobject_metadata from public;

-- Every rollout works as mm_owner, and a role may give itself settings, which are the cluster's: nobody reads them.
do $do$
declare
    v record;
begin
    set local allow_system_table_mods = on;
    for v in
        select c.oid::regclass as name, pg_get_viewdef(c.oid) as definition,
               string_agg(case when a.attname in ('rolconfig', 'useconfig')
                               then format('case when v.%I = session_user then v.%I end as %I',
                                           case a.attname when 'rolconfig' then 'rolname' else 'usename' end, a.attname,
                                           a.attname)
                               else format('v.%I', a.attname) end, ', ' order by a.attnum) as columns
          from pg_class c
          join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
         where c.oid in ('pg_catalog.pg_roles'::regclass, 'pg_catalog.pg_user'::regclass)
         group by c.oid
    loop
        execute format('create or replace view %s as select %s from (%s) v', v.name, v.columns, rtrim(v.definition, '; '));
    end loop;
    set local allow_system_table_mods = off;
end $do$;
revoke all on pg_catalog.pg_db_role_setting from public;

-- What runs as a hand may be code of the user's. These only read, or do what the login may do itself.
grant execute on function megamcp.carry_out(bigint), megamcp.put(bigint, oid), megamcp.take_by_key(bigint, oid),
    megamcp.take_by_hash(oid, bytea[]), megamcp.portions(oid, boolean), megamcp.move(bigint), megamcp.moved_images(bigint),
    megamcp.rows_of(bigint, anyelement), megamcp.told(anyelement), megamcp.longest_told(), megamcp.one(oid),
    megamcp.row_key(oid), megamcp.key_columns(oid), megamcp.same_key(oid, text, text), megamcp.image(oid, text),
    megamcp.is_back(bigint) to mm_hands;

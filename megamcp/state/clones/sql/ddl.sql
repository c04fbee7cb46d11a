-- What DDL means for the log: a barrier, and triggers on what is new. Also what DDL may not touch.
--
-- The functions switch event triggers off for their own DDL; a user can't (the setting is the superuser's).

-- Commands that would reach out of the database, or hand out rights that are ours.
create function megamcp.before_ddl() returns event_trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set event_triggers = off as $$
begin
    raise exception using errcode = '42501', message = format('%s is not allowed here', tg_tag),
        hint = 'Extensions, languages and the like belong to the environment''s own SQL files.';
end $$;

-- A role that anything in here names (a grant, a policy, default rights) can't be dropped. So nothing may name the roles of
-- other databases, which end with these.
create function megamcp.foreign_role() returns name
language sql stable set search_path = pg_catalog, pg_temp as $$
    select r.rolname from pg_shdepend s join pg_roles r on r.oid = s.refobjid
     where s.dbid = (select d.oid from pg_database d where d.datname = current_database())
       and s.refclassid = 'pg_authid'::regclass
       and r.rolname not in ('mm_owner', 'mm_hands', session_user) and not r.rolsuper
       and not (select me.rolsuper from pg_roles me where me.rolname = session_user)
     limit 1
$$;

create function megamcp.after_ddl() returns event_trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set event_triggers = off as $$
declare
    stranger name := megamcp.foreign_role();
begin
    if stranger is not null then
        raise exception using errcode = '42501', message = format('role "%s" is not of this database', stranger),
            hint = 'Grant to public or to mm_owner: a rollout has no other roles.';
    end if;
    if exists (select from pg_event_trigger_ddl_commands() c
                where c.schema_name = 'megamcp' or c.object_identity = 'megamcp' and c.object_type = 'schema') then
        raise exception using errcode = '42501', message = 'schema megamcp belongs to the gateway';
    end if;
    if exists (select from pg_event_trigger_ddl_commands() c where c.schema_name is distinct from 'pg_temp') then
        perform megamcp.log_barrier(tg_tag);
        perform megamcp.watch();
    elsif exists (select from pg_event_trigger_ddl_commands() c join pg_inherits i on i.inhrelid = c.objid) then
        perform megamcp.watch();    -- a temporary child: its rows are not its parent's
    end if;
end $$;

create function megamcp.after_drop() returns event_trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set event_triggers = off as $$
begin
    if exists (select from pg_event_trigger_dropped_objects() d where d.schema_name = 'megamcp'
                  and d.object_type not in ('trigger')) then
        raise exception using errcode = '42501', message = 'schema megamcp belongs to the gateway';
    end if;
    if exists (select from pg_event_trigger_dropped_objects() d where not d.is_temporary) then
        perform megamcp.log_barrier(tg_tag);
        perform megamcp.watch();
    end if;
end $$;

create function megamcp.after_rewrite() returns event_trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set event_triggers = off as $$
begin
    perform megamcp.log_barrier(tg_tag);
end $$;

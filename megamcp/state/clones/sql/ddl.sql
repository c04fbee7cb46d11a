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
-- other databases, which end with these. Nor a policy its own login: a copy has another.
create function megamcp.foreign_role() returns name
language sql stable set search_path = pg_catalog, pg_temp as $$
    select r.rolname from pg_shdepend s join pg_roles r on r.oid = s.refobjid
     where s.dbid = (select d.oid from pg_database d where d.datname = current_database())
       and s.refclassid = 'pg_authid'::regclass
       and r.rolname not in ('mm_owner', 'mm_hands') and not r.rolsuper
       and not (r.rolname = session_user and s.deptype <> 'r')    -- what it owns or was granted is mm_owner's in a copy
       and not (select me.rolsuper from pg_roles me where me.rolname = session_user)
     limit 1
$$;

-- Temporary objects go with their session, and what uses them goes with them, with no event: a column of a table, say.
-- When sessions end is ours to say (every checkpoint that is a copy ends some), so nothing that lasts may use them.
create function megamcp.demand_lasting() returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    own oid := pg_my_temp_schema();
    lost record;
begin
    if own = 0 then
        return;
    end if;
    select pg_describe_object(d.classid, d.objid, d.objsubid) as user, pg_describe_object(d.refclassid, d.refobjid, 0) as used
      into lost
      from (select 'pg_class'::regclass, c.oid from pg_class c where c.relnamespace = own
            union all select 'pg_type'::regclass, t.oid from pg_type t where t.typnamespace = own
            union all select 'pg_proc'::regclass, p.oid from pg_proc p where p.pronamespace = own
            union all select 'pg_operator'::regclass, o.oid from pg_operator o where o.oprnamespace = own
            union all select 'pg_collation'::regclass, o.oid from pg_collation o where o.collnamespace = own) t (class, oid)
      join pg_depend d on d.refclassid = t.class and d.refobjid = t.oid,
           lateral (select coalesce(
               case d.classid when 'pg_class'::regclass then d.objid end,
               (select x.adrelid from pg_attrdef x where d.classid = 'pg_attrdef'::regclass and x.oid = d.objid),
               (select x.conrelid from pg_constraint x where d.classid = 'pg_constraint'::regclass and x.oid = d.objid),
               (select x.tgrelid from pg_trigger x where d.classid = 'pg_trigger'::regclass and x.oid = d.objid),
               (select x.ev_class from pg_rewrite x where d.classid = 'pg_rewrite'::regclass and x.oid = d.objid),
               (select x.polrelid from pg_policy x where d.classid = 'pg_policy'::regclass and x.oid = d.objid)) as oid) c
      left join pg_class r on r.oid = c.oid
     where case when r.oid is not null then r.relpersistence <> 't'
                else coalesce(
                    (select x.typnamespace from pg_type x where d.classid = 'pg_type'::regclass and x.oid = d.objid),
                    (select x.pronamespace from pg_proc x where d.classid = 'pg_proc'::regclass and x.oid = d.objid),
                    (select x.typnamespace from pg_constraint k join pg_type x on x.oid = k.contypid
                      where d.classid = 'pg_constraint'::regclass and k.oid = d.objid), own) <> own end
     limit 1;
    if found then
        raise exception using errcode = '0A000', message = format('%s would use %s', lost.user, lost.used),
            detail = 'That is temporary: when this session ends, PostgreSQL would take away both.',
            hint = 'Make what it uses permanent, or make both temporary.';
    end if;
end $$;

create function megamcp.after_ddl() returns event_trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set event_triggers = off as $$
declare
    stranger name := megamcp.foreign_role();
begin
    if stranger is not null then
        raise exception using errcode = '42501', message = format('role "%s" can''t be named here', stranger),
            hint = 'Name public or mm_owner, as which the login works: copies of a rollout have other logins.';
    end if;
    perform megamcp.demand_lasting();
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

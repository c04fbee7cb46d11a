-- What a state is besides its rows: one text an object, for all that changes what a later statement does or how it fails.
--
-- Left out: owners and comments, what only changes speed (plain indexes, statistics, storage), sequences' values, and what
-- matters to roles that no rollout has. Everything is named in full and in an order that doesn't tell how it came about, so
-- that what was made and dropped again leaves nothing.

create view megamcp.spaces as
select n.oid, n.nspname as name, n.nspacl as acl, n.nspowner as owner from pg_catalog.pg_namespace n
 where n.nspname not in ('pg_catalog', 'information_schema', 'megamcp', 'pg_toast') and n.nspname !~ '^pg_(toast_)?temp_';

-- What the owner and everybody may do. Whose an object is changes when a database is copied: that is one and the same here.
create function megamcp.rights_of(acl aclitem[], kind "char", owner oid) returns text
language sql stable set search_path = pg_catalog, pg_temp as $$
    select string_agg(distinct x.holder || ' ' || x.privilege_type, ', ' order by x.holder || ' ' || x.privilege_type)
      from (select case when a.grantee = 0 then 'public' when r.rolname = 'mm_owner' or a.grantee = owner then 'owner' end
                   as holder, a.privilege_type
              from aclexplode(coalesce(acl, acldefault(kind, owner))) a left join pg_roles r on r.oid = a.grantee) x
$$;

create function megamcp.shape() returns setof text
language sql stable set search_path = pg_catalog, pg_temp as $$
    with relations as (
        select c.* from pg_class c join megamcp.spaces s on s.oid = c.relnamespace where c.relpersistence <> 't'
    )
    select jsonb_build_array('schema', s.name, megamcp.rights_of(s.acl, 'n', s.owner))::text from megamcp.spaces s
    union all
    select jsonb_build_array('relation', c.oid::regclass::text, c.relkind, c.relrowsecurity, c.relforcerowsecurity,
               case when c.relkind in ('v', 'm') then pg_get_viewdef(c.oid) end,
               case when c.relkind = 'v' then (select array_agg(o order by o) from unnest(c.reloptions) o) end,
               case when c.relkind = 'm' then c.relispopulated end,
               case when c.relkind = 'p' then pg_get_partkeydef(c.oid) end, pg_get_expr(c.relpartbound, c.oid),
               nullif(c.reloftype, 0)::regtype::text,
               (select array_agg(i.inhparent::regclass::text order by i.inhseqno) from pg_inherits i where i.inhrelid = c.oid),
               megamcp.rights_of(c.relacl, case when c.relkind = 'S' then 's' else 'r' end::"char", c.relowner))::text
      from relations c where c.relkind in ('r', 'p', 'v', 'm', 'c', 'S', 'f')
    union all
    select jsonb_build_array('column', c.oid::regclass::text, row_number() over (partition by c.oid order by a.attnum), a.attname,
               format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, a.attgenerated,
               pg_get_expr(d.adbin, d.adrelid), nullif(a.attcollation, 0)::regcollation::text,
               case when a.attacl is not null then megamcp.rights_of(a.attacl, 'c', c.relowner) end)::text
      from relations c
      join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
      left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
     where c.relkind in ('r', 'p', 'v', 'm', 'c', 'f')
    union all
    select jsonb_build_array('constraint', nullif(k.conrelid, 0)::regclass::text, nullif(k.contypid, 0)::regtype::text,
               k.conname, pg_get_constraintdef(k.oid))::text
      from pg_constraint k join megamcp.spaces s on s.oid = k.connamespace
      left join pg_class c on c.oid = k.conrelid
     where k.contype <> 't' and c.relpersistence is distinct from 't'
    union all
    select jsonb_build_array('index', pg_get_indexdef(i.indexrelid), i.indisvalid, i.indimmediate)::text
      from pg_index i join relations c on c.oid = i.indrelid
     where i.indisunique or i.indisexclusion or i.indexprs is not null or i.indpred is not null
    union all
    select jsonb_build_array('trigger', pg_get_triggerdef(t.oid), t.tgenabled)::text
      from pg_trigger t join relations c on c.oid = t.tgrelid
     where not t.tgisinternal and not starts_with(t.tgname, 'megamcp_')
    union all
    select jsonb_build_array('rule', pg_get_ruledef(r.oid), r.ev_enabled)::text
      from pg_rewrite r join relations c on c.oid = r.ev_class where r.rulename <> '_RETURN'
    union all
    select jsonb_build_array('policy', c.oid::regclass::text, p.polname, p.polcmd, p.polpermissive,
               (select array_agg(distinct coalesce(o.rolname, 'public')) from unnest(p.polroles) x (role)
                  left join pg_roles o on o.oid = x.role where x.role = 0 or o.rolname = 'mm_owner'),
               pg_get_expr(p.polqual, p.polrelid), pg_get_expr(p.polwithcheck, p.polrelid))::text
      from pg_policy p join relations c on c.oid = p.polrelid
    union all
    select jsonb_build_array('function', p.oid::regprocedure::text, p.prokind,
               case when p.prokind <> 'a' then pg_get_functiondef(p.oid) end,
               case when p.prokind = 'a' then (
                   select to_jsonb(a) - 'aggfnoid' from (
                       select x.aggfnoid, x.aggkind, x.aggtransfn::regprocedure::text as transition,
                              x.aggfinalfn::regprocedure::text as final, x.aggtranstype::regtype::text as state,
                              x.aggsortop::regoperator::text as sort, x.agginitval as initial, x.aggmtransfn::regprocedure::text
                              as moving, x.aggcombinefn::regprocedure::text as combine
                         from pg_aggregate x where x.aggfnoid = p.oid) a) end,
               megamcp.rights_of(p.proacl, 'f', p.proowner))::text
      from pg_proc p join megamcp.spaces s on s.oid = p.pronamespace
    union all
    select jsonb_build_array('type', t.oid::regtype::text, t.typtype,
               (select array_agg(e.enumlabel order by e.enumsortorder) from pg_enum e where e.enumtypid = t.oid),
               case when t.typtype = 'd' then format_type(t.typbasetype, t.typtypmod) end, t.typnotnull,
               t.typdefault, nullif(t.typcollation, 0)::regcollation::text,
               (select jsonb_build_array(r.rngsubtype::regtype::text, nullif(r.rngcollation, 0)::regcollation::text,
                                         r.rngcanonical::regprocedure::text, r.rngsubdiff::regprocedure::text)
                  from pg_range r where r.rngtypid = t.oid),
               megamcp.rights_of(t.typacl, 'T', t.typowner))::text
      from pg_type t join megamcp.spaces s on s.oid = t.typnamespace where t.typtype in ('e', 'd', 'r')
    union all
    select jsonb_build_array('sequence', c.oid::regclass::text, q.seqtypid::regtype::text, q.seqstart, q.seqincrement, q.seqmax,
               q.seqmin, q.seqcache, q.seqcycle)::text
      from pg_sequence q join relations c on c.oid = q.seqrelid
    union all
    select jsonb_build_array('cast', c.castsource::regtype::text, c.casttarget::regtype::text, c.castfunc::regprocedure::text,
               c.castcontext, c.castmethod)::text
      from pg_cast c where c.oid >= 16384
    union all
    select jsonb_build_array('operator', o.oid::regoperator::text, o.oprcode::regprocedure::text)::text
      from pg_operator o where o.oid >= 16384
    union all
    select jsonb_build_array('default rights', s.name, d.defaclobjtype,
               megamcp.rights_of(d.defaclacl, d.defaclobjtype, d.defaclrole))::text
      from pg_default_acl d left join megamcp.spaces s on s.oid = d.defaclnamespace
    union all
    select jsonb_build_array('other', i.type, i.identity)::text
      from (select 'pg_opclass'::regclass, oid from pg_opclass union all select 'pg_opfamily'::regclass, oid from pg_opfamily
            union all select 'pg_collation'::regclass, oid from pg_collation
            union all select 'pg_conversion'::regclass, oid from pg_conversion
            union all select 'pg_ts_config'::regclass, oid from pg_ts_config
            union all select 'pg_ts_dict'::regclass, oid from pg_ts_dict
            union all select 'pg_transform'::regclass, oid from pg_transform) o (class, oid),
           lateral pg_identify_object(o.class, o.oid, 0) i
     where o.oid >= 16384
$$;

-- Of 128-bit hashes, as that of rows is: no row's text begins with this.
create function megamcp.shape_sum() returns numeric
language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(sum(megamcp.high(h.hash)), 0) * 18446744073709551616 + coalesce(sum(megamcp.low(h.hash)), 0)
      from megamcp.shape() x, lateral (select sha256(convert_to(chr(30) || x, 'UTF8')) as hash offset 0) h
$$;

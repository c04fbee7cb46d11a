-- What `catalog` reads of a schema ($1 its name). Run with an empty search path: every name carries its schema.

-- name: columns
select c.relname, a.attname, format_type(a.atttypid, a.atttypmod) as type, a.attnotnull, a.attidentity::text as identity,
       a.attgenerated::text as generated, pg_get_expr(d.adbin, d.adrelid) as expression,
       (select 'megamcp.' || o.opcname from pg_opclass o where o.opcnamespace = 'megamcp'::regnamespace and o.opcname = case b.typname
          when 'varchar' then 'text' else b.typname end || '_equal') as equal_class,
       (with recursive below(id, typmod, n) as (
          select a.atttypid, a.atttypmod, 0
          union all select x.typbasetype, x.typtypmod, n + 1 from below join pg_type x on x.oid = below.id where x.typtype = 'd')
        select format_type(id, typmod) from below order by n desc limit 1) as base_type,
       case when a.attcollation <> t.typcollation then quote_ident(cn.nspname) || '.' || quote_ident(co.collname) end as collation,
       (select s.relname from pg_depend p join pg_class s on s.oid = p.objid and s.relkind = 'S'
        where p.refobjid = c.oid and p.refobjsubid = a.attnum and p.deptype = 'i' and p.classid = 'pg_class'::regclass limit 1) as sequence
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
join pg_type t on t.oid = a.atttypid join pg_type b on b.oid = coalesce(nullif(t.typbasetype, 0), t.oid)
left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
left join pg_collation co on co.oid = a.attcollation left join pg_namespace cn on cn.oid = co.collnamespace
where c.relnamespace = $1::text::regnamespace and c.relkind = 'r' order by c.oid, a.attnum

-- name: indexes
select c.relname as table, i.relname as name, x.indisunique, x.indisprimary, x.indnullsnotdistinct, am.amname as method,
       pg_get_expr(x.indpred, x.indrelid) as predicate, x.indnkeyatts, coalesce(k.condeferrable, false) as deferrable,
       coalesce(k.condeferred, false) as deferred, k.oid is not null as is_constraint,
       array(select pg_get_indexdef(x.indexrelid, n, true) from generate_series(1, x.indnatts) n) as items,
       array(select case when o.opcdefault then '' else quote_ident(n.nspname) || '.' || quote_ident(o.opcname) end
             from unnest(x.indclass::oid[]) with ordinality u(id, n2) join pg_opclass o on o.oid = u.id
             join pg_namespace n on n.oid = o.opcnamespace order by n2) as opclasses,
       x.indoption::int2[] as options,
       array(select coalesce(a.attname, '') from unnest(x.indkey::int2[]) with ordinality k(attnum, n)
             left join pg_attribute a on a.attrelid = x.indrelid and a.attnum = k.attnum and k.attnum > 0 order by n) as columns
from pg_index x join pg_class i on i.oid = x.indexrelid join pg_class c on c.oid = x.indrelid join pg_am am on am.oid = i.relam
left join pg_constraint k on k.conindid = x.indexrelid and k.contype in ('p', 'u')
where c.relnamespace = $1::text::regnamespace and c.relkind = 'r' order by x.indexrelid

-- name: checks
select c.relname as table, n.conname as name, pg_get_expr(n.conbin, n.conrelid) as expression
from pg_constraint n join pg_class c on c.oid = n.conrelid
where c.relnamespace = $1::text::regnamespace and n.contype = 'c' order by n.conname collate "C"

-- name: foreign_keys
select n.conname as name, c.relname as table, p.relname as parent, n.confupdtype::text as on_update, n.confdeltype::text as on_delete,
  n.confmatchtype = 'f' as match_full, n.condeferrable as deferrable, n.condeferred as deferred,
  array(select a.attname from unnest(n.conkey) with ordinality k(num, o) join pg_attribute a on a.attrelid = n.conrelid and a.attnum = k.num order by o) as columns,
  array(select a.attname from unnest(n.confkey) with ordinality k(num, o) join pg_attribute a on a.attrelid = n.confrelid and a.attnum = k.num order by o) as parent_columns,
  array(select a.attname from unnest(n.confdelsetcols) with ordinality k(num, o) join pg_attribute a on a.attrelid = n.conrelid and a.attnum = k.num order by o) as set_columns
from pg_constraint n join pg_class c on c.oid = n.conrelid join pg_class p on p.oid = n.confrelid
where c.relnamespace = $1::text::regnamespace and n.contype = 'f' order by n.oid

-- name: sequences
select c.relname as name, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcycle, o.owner, o.owner_column
from pg_sequence s join pg_class c on c.oid = s.seqrelid
left join lateral (
  select t.relname as owner, a.attname::text as owner_column from pg_depend p join pg_class t on t.oid = p.refobjid
  join pg_attribute a on a.attrelid = t.oid and a.attnum = p.refobjsubid
  where p.objid = c.oid and p.classid = 'pg_class'::regclass and p.refclassid = 'pg_class'::regclass
    and p.deptype in ('a', 'i') limit 1) o on true
where c.relnamespace = $1::text::regnamespace order by c.oid

-- name: triggers
select t.tgname::text as name, c.relname::text as table, t.tgtype::int as kind, p.oid::regprocedure::text as function,
  pg_get_triggerdef(t.oid) as definition,
  array(select a.attname::text from unnest(t.tgattr::int2[]) k(num) join pg_attribute a on a.attrelid = c.oid and a.attnum = k.num) as columns
from pg_trigger t join pg_class c on c.oid = t.tgrelid join pg_proc p on p.oid = t.tgfoid
where c.relnamespace = $1::text::regnamespace and c.relkind = 'r' and not t.tgisinternal order by t.tgname collate "C", t.oid

-- name: remakes
select c.oid::bigint as oid, 'view' as kind, c.relname::text as name,
  format('create view %I.%I (%s) %s as %s', n.nspname, c.relname,
    (select string_agg(quote_ident(a.attname), ', ' order by a.attnum) from pg_attribute a where a.attrelid = c.oid and a.attnum > 0),
    case when c.reloptions is null then '' else 'with (' || array_to_string(c.reloptions, ', ') || ')' end,
    rtrim(pg_get_viewdef(c.oid), ';')) as definition
from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = $1::text and c.relkind = 'v'
union all
select p.oid::bigint, 'function', p.oid::regprocedure::text, pg_get_functiondef(p.oid)
from pg_proc p join pg_language l on l.oid = p.prolang  -- internal: the constructors of a range type
where p.pronamespace = $1::text::regnamespace and p.prokind = 'f' and l.lanname <> 'internal' and not (p.oid = any ($2::oid[]))
order by 1

-- name: row_class
select 'megamcp.' || o.opcname from pg_opclass o where o.opcnamespace = 'megamcp'::regnamespace and o.opcname = 'int8_equal'

-- name: staging
-- Columns of a table ($2, in the order of $3) that rows are copied to first: of a built-in type, or text for what the
-- environment made itself (cast tells to what). A domain over a built-in type is that type with its length.
with recursive d as (
  select t.oid as domain, t.typbasetype as base, t.typtypmod as mod from pg_type t where t.typtype = 'd' and t.typnamespace = $1::text::regnamespace
  union all
  select d.domain, t.typbasetype, coalesce(nullif(d.mod, -1), t.typtypmod) from d join pg_type t on t.oid = d.base where t.typtype = 'd'
)
select a.attname as name, a.attgenerated <> '' as generated,
  case when b.oid is null then 'text' else format_type(b.oid, coalesce(d.mod, a.atttypmod)) end as staged,
  case when b.oid is null then format_type(a.atttypid, a.atttypmod) end as cast
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and ($3::text[] is not null or a.attgenerated = '')
left join d on d.domain = a.atttypid and not exists (select from pg_type x where x.oid = d.base and x.typtype = 'd')
left join pg_type b on b.oid = coalesce(d.base, a.atttypid) and b.typnamespace = 'pg_catalog'::regnamespace
where c.relnamespace = $1::text::regnamespace and c.relname = $2 and c.relkind = 'r' and ($3::text[] is null or a.attname = any ($3))
order by case when $3 is null then a.attnum else array_position($3::text[], a.attname::text) end

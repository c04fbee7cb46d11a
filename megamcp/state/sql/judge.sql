-- What a state can't take, as (construct, object, reason, hint). $1 schema, $2 the state's own functions.

-- name: judge
with recursive c as (select c.* from pg_class c where c.relnamespace = $1::text::regnamespace),
used(relname, attname, declared, modifier, typ) as (  -- the types of columns, and what these are made of
  select c.relname, a.attname, a.atttypid, a.atttypmod, a.atttypid from c
  join pg_attribute a on a.attrelid = c.oid and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped
  union
  select u.relname, u.attname, u.declared, u.modifier, part.typ from used u join pg_type t on t.oid = u.typ cross join lateral (
    select t.typbasetype where t.typtype = 'd'
    union all select t.typelem where t.typelem <> 0 and t.typcategory = 'A'
    union all select r.rngsubtype from pg_range r where t.oid in (r.rngtypid, r.rngmultitypid)
    union all select a.atttypid from pg_attribute a join pg_class k on k.oid = a.attrelid
      where a.attrelid = t.typrelid and k.relkind = 'c' and a.attnum > 0 and not a.attisdropped) part(typ)
),
domains(typ, base) as (
  select t.oid, t.typbasetype from pg_type t where t.typtype = 'd'
  union select d.typ, t.typbasetype from domains d join pg_type t on t.oid = d.base where t.typtype = 'd'
),
keyed(name, typ) as (
  select i.relname, a.atttypid from pg_index x join c on c.oid = x.indrelid join pg_class i on i.oid = x.indexrelid
  join pg_attribute a on a.attrelid = i.oid and a.attnum <= x.indnkeyatts where x.indisunique
  union select n.conname, a.atttypid from pg_constraint n join c on c.oid = n.conrelid
  join pg_attribute a on a.attrelid = c.oid and a.attnum = any (n.conkey) where n.contype = 'f'
)
select 'materialised view', relname::text, 'it would hold one rollout''s rows for all', 'Make it a plain view.' from c where relkind = 'm'
union all select 'security_barrier view that takes writes', relname, 'PostgreSQL forgets its condition where it writes through it into a view with triggers', 'Leave security_barrier out: who writes the SQL here is the environment''s own server.'
  from c where relkind = 'v' and pg_relation_is_updatable(c.oid, false) & 20 <> 0
   and exists (select from pg_options_to_table(c.reloptions) o where o.option_name = 'security_barrier' and o.option_value::boolean)
union all select 'foreign or partitioned table', relname, 'its rows can''t be kept by layer', 'Make it a plain table.' from c where relkind in ('f', 'p') or relispartition
union all select 'table without columns', relname, 'its rows can''t be told apart', 'Give it a column.'
  from c where relkind = 'r' and not exists (select from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped)
union all select 'row-level security', relname, 'it would be lost under the view', 'Filter in the tool server.' from c where relrowsecurity and relkind = 'r'
union all select w.construct, c.relname || '.' || t.tgname, w.reason, w.hint
  from pg_trigger t join c on c.oid = t.tgrelid cross join lateral (values
    (t.tgconstraint <> 0, 'constraint trigger', 'when it fires can''t be told from a view', 'Make it a plain AFTER trigger.'),
    (t.tgoldtable is not null or t.tgnewtable is not null, 'trigger with transition tables', 'a view has none', 'Use a row trigger.'),
    (t.tgtype & 32 <> 0, 'TRUNCATE trigger', 'rows leave one by one', 'Leave it out.'),
    (t.tgtype & 64 <> 0, 'INSTEAD OF trigger', 'what it would do beside the state''s own is not known', 'Leave the view to PostgreSQL, or write the tables.'),
    (t.tgtype & 1 = 0 and exists (select from pg_constraint n where n.conrelid = c.oid and n.contype = 'f'
        and (n.confdeltype in ('c', 'n', 'd') or n.confupdtype in ('c', 'n', 'd'))),
      'statement trigger on a table that foreign keys act on', 'PostgreSQL fires it once for all actions of a command', 'Use a row trigger.'),
    (t.tgenabled <> 'O', 'trigger that is not simply enabled', 'it would fire', 'Drop it, or enable it.'),
    (t.tgname like 'RI\_%' or t.tgname like '~%', 'trigger name', 'it would sort among the state''s own', 'Rename it.'),
    (t.tgtype & 1 = 1 and exists (select from pg_attribute a where a.attrelid = c.oid and a.attgenerated = 'v'),
      'row trigger on a table with a virtual generated column', 'its value is missing in NEW and OLD', 'Make the column STORED.'),
    (exists (select from pg_attribute a where a.attrelid = c.oid and a.attgenerated <> '' and a.attnum = any (t.tgattr)),
      'UPDATE OF a generated column', 'which columns it hangs on is not followed', 'Name those columns.')
  ) w(found, construct, reason, hint) where w.found and not t.tgisinternal
union all select 'rule', c.relname || '.' || r.rulename, 'rules rewrite statements', 'Do it in the tool server.'
  from pg_rewrite r join c on c.oid = r.ev_class where r.rulename <> '_RETURN'
union all select 'default of a view''s column', c.relname || '.' || a.attname, 'the view is made anew', 'Give the table''s column the default.'
  from pg_attrdef d join c on c.oid = d.adrelid and c.relkind = 'v' join pg_attribute a on a.attrelid = c.oid and a.attnum = d.adnum
union all select 'exclusion constraint', c.relname || '.' || n.conname, 'it has no index over a chain', 'Check it in the tool server.'
  from pg_constraint n join c on c.oid = n.conrelid where n.contype = 'x'
union all select 'WITHOUT OVERLAPS or PERIOD', c.relname || '.' || n.conname, 'it has no index over a chain', 'Check it in the tool server.'
  from pg_constraint n join c on c.oid = n.conrelid where n.conperiod
union all select 'constraint not valid or not enforced', c.relname || '.' || n.conname, 'base rows may break it', 'Validate it.'
  from pg_constraint n join c on c.oid = n.conrelid where not n.convalidated
union all select 'unique index with an operator class', i.relname::text, 'its equality may differ from =', 'Use the default operator class.'
  from pg_index x join c on c.oid = x.indrelid join pg_class i on i.oid = x.indexrelid
  where x.indisunique and exists (select from unnest(x.indclass::oid[]) u(id) join pg_opclass o on o.oid = u.id
    where not o.opcdefault and not exists (select from pg_amop e join pg_opclass d on d.opcfamily = e.amopfamily
      where e.amopstrategy = 3 and e.amoplefttype = o.opcintype and e.amoprighttype = o.opcintype and d.opcdefault
        and d.opcintype = o.opcintype and d.opcmethod = o.opcmethod and e.amopopr in (select s.amopopr from pg_amop s
          where s.amopfamily = o.opcfamily and s.amopstrategy = 3 and s.amoplefttype = o.opcintype and s.amoprighttype = o.opcintype)))
union all select 'key over a domain of an enum', k.name, 'PostgreSQL has no = for its values', 'Use the enum, with a CHECK.'
  from keyed k join domains d on d.typ = k.typ join pg_type e on e.oid = d.base and e.typtype = 'e'
union all select 'non-deterministic collation', c.relname || '.' || a.attname, 'equal values may differ in bytes', 'Use a deterministic collation.'
  from pg_attribute a join c on c.oid = a.attrelid join pg_collation o on o.oid = a.attcollation where not o.collisdeterministic and a.attnum > 0
union all select 'column type ' || format_type(u.declared, u.modifier), u.relname || '.' || u.attname,
  case when t.typtype = 'c' then 'it is the row of a table or view, which is made anew' else 'values of ' || format_type(t.oid, null) || ' can''t be kept exactly' end,
  'Use a built-in scalar, an enum, a domain, a range, a composite type of its own, or an array of these.'
  from used u join pg_type t on t.oid = u.typ
  where t.typtype not in ('b', 'c', 'd', 'e', 'm', 'r') or t.typname ~ '^reg' or t.typname in ('pg_snapshot', 'txid_snapshot', 'xid', 'xid8', 'cid', 'tid', 'xml')
     or (t.typtype = 'c' and exists (select from pg_class r where r.oid = t.typrelid and r.relkind <> 'c'))
union all select 'aggregate, window function or procedure', p.oid::regprocedure::text, 'only plain functions are taken', 'Do it in the tool server.'
  from pg_proc p where p.pronamespace = $1::text::regnamespace and p.prokind <> 'f'
union all select 'function', p.oid::regprocedure::text, 'only SQL and PL/pgSQL functions are taken', 'Do it in the tool server.'
  from pg_proc p join pg_language l on l.oid = p.prolang
  where p.pronamespace = $1::text::regnamespace and l.lanname not in ('sql', 'plpgsql', 'internal') and not (p.oid = any ($2::oid[]))

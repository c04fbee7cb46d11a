-- Two databases compared by what is in them: for states that no one log connects. Each is asked for hashes; rows that differ
-- are fetched at the end, so what is read over the wire is in proportion to the difference.

-- Tables with what two of them must have in common for their rows to be equal.
create function megamcp.comparable() returns table (relation oid, schema name, name name, label text, key name[])
language sql stable set search_path = pg_catalog, pg_temp as $$
    select t.oid, n.nspname, c.relname,
           coalesce((select jsonb_agg(jsonb_build_array(a.attname, format_type(a.atttypid, a.atttypmod)) order by a.attnum)
                       from pg_attribute a
                      where a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = '')::text, ''),
           megamcp.key_columns(t.oid)
      from megamcp.tables t join pg_class c on c.oid = t.oid join pg_namespace n on n.oid = c.relnamespace
     where t.oid = t.root
$$;

-- Of each row the hash of its key (of the whole row, where there is none) and the hash of all of it; its image too, where
-- the key's hash is one of those wanted, and then of no others. Locked by its name and then compared with its oid, as in `whole_sum`.
create function megamcp.hashed(relation oid, key name[], label text, wanted bytea[] default null)
returns table (k bytea, h bytea, image text)
language plpgsql volatile set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD' set timezone = 'UTC'
set intervalstyle = 'postgres' set extra_float_digits = 1 set bytea_output = 'hex' set xmloption = 'content'
set lc_monetary = 'C' as $$
declare
    name text := relation::regclass::text;
    keys text := (select 'textin(record_out(row(' || string_agg(format('x.%I', c), ', ' order by n) || ')))'
                    from unnest(key) with ordinality k (c, n));
begin
    execute format('lock table only %s in access share mode', name);
    if to_regclass(name) is distinct from relation then
        raise exception using errcode = '40001', message = format('table %s changed meanwhile', name);
    end if;
    return query execute format($q$
        select y.k, substr(sha256(convert_to(%L || y.image, 'UTF8')), 1, 16), case when $1 is not null then y.image end
          from (select substr(sha256(convert_to(%s, 'UTF8')), 1, 16) as k, i.image
                  from %s x, lateral (select %s as image offset 0) i offset 0) y
         where $1 is null or y.k = any ($1)$q$,
        label, coalesce(keys, 'i.image'), megamcp.one(relation), megamcp.image(relation, 'x')) using wanted;
end $$;

-- What PostgreSQL grants to everyone and no login of a state needs: taken from all but the database's owner, in this
-- database alone. Only a superuser can; what stays open with another control login is in docs/security.md.
--
-- Advisory locks would hold up other rollouts and the gateway; pg_locks names those that are held. (Unlocking stays:
-- drivers do it when a connection goes back to its pool.) Ending backends of
-- the same role would end other rollouts' calls. Large objects would be state outside of every rollout.
do $$
declare
    _function regprocedure;
begin
    if not (select r.rolsuper from pg_roles r where r.rolname = current_user) then
        return;
    end if;
    for _function in
        select p.oid from pg_proc p
         where p.pronamespace = 'pg_catalog'::regnamespace
           and (p.proname ~ '^pg_(try_)?advisory_(xact_)?lock' or p.proname ~ '^lo_' or p.proname in (
                'loread', 'lowrite', 'pg_terminate_backend', 'pg_cancel_backend', 'pg_lock_status', 'pg_stat_get_activity',
                'pg_blocking_pids', 'pg_safe_snapshot_blocking_pids', 'pg_logical_emit_message', 'pg_export_snapshot',
                'pg_notify', 'pg_get_multixact_members', 'currtid2'))
    loop
        execute format('revoke execute on function %s from public', _function);
        execute format('grant execute on function %s to pg_database_owner', _function);
    end loop;
    revoke select on pg_locks, pg_stat_activity, pg_largeobject_metadata from public;
    grant select on pg_locks, pg_stat_activity, pg_largeobject_metadata to pg_database_owner;
end $$;

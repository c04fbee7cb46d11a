-- Last of all: from here on the schema megamcp can't be changed any more.
create event trigger megamcp_before_ddl on ddl_command_start
    when tag in ('CREATE EXTENSION', 'ALTER EXTENSION', 'DROP EXTENSION', 'CREATE LANGUAGE', 'CREATE FOREIGN DATA WRAPPER',
                 'CREATE SERVER', 'CREATE SUBSCRIPTION', 'CREATE PUBLICATION', 'SECURITY LABEL')
    execute function megamcp.before_ddl();
create event trigger megamcp_after_ddl on ddl_command_end execute function megamcp.after_ddl();
create event trigger megamcp_after_drop on sql_drop execute function megamcp.after_drop();
create event trigger megamcp_after_rewrite on table_rewrite execute function megamcp.after_rewrite();
-- For the hand too, in whose session a user's code may run DDL while rows are put back.
alter event trigger megamcp_before_ddl enable always;
alter event trigger megamcp_after_ddl enable always;
alter event trigger megamcp_after_drop enable always;
alter event trigger megamcp_after_rewrite enable always;

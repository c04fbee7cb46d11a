"""Alembic's entry: runs the revisions on the connection that `megamcp.migrate` hands over."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table_schema="megamcp", transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()

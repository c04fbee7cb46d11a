"""Databases of the state clusters, and where checkpoints stand in them."""

from pathlib import Path

from alembic import op

revision = "0003"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    script = Path(__file__).parent.parent / "sql" / "0003_databases.sql"
    # Several statements at once need the driver itself: prepared statements take one.
    driver = op.get_bind().connection.dbapi_connection
    driver.run_async(lambda connection: connection.execute(script.read_text(encoding="utf-8")))


def downgrade() -> None:
    raise NotImplementedError("restore a dump from before the upgrade instead")

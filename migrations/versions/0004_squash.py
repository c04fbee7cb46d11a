"""Squashing of chains, and what is known of layers that nothing shows any more."""

from pathlib import Path

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    script = Path(__file__).parent.parent / "sql" / "0004_squash.sql"
    # Several statements at once need the driver itself: prepared statements take one.
    driver = op.get_bind().connection.dbapi_connection
    driver.run_async(lambda connection: connection.execute(script.read_text(encoding="utf-8")))


def downgrade() -> None:
    raise NotImplementedError("layers that were squashed can't be taken apart: restore a backup instead")

"""Authorization of tool servers: grants and consents under way, sealed."""

from pathlib import Path

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    script = Path(__file__).parent.parent / "sql" / "0008_oauth.sql"
    # Several statements at once need the driver itself: prepared statements take one.
    driver = op.get_bind().connection.dbapi_connection
    driver.run_async(lambda connection: connection.execute(script.read_text(encoding="utf-8")))


def downgrade() -> None:
    raise NotImplementedError("restore a backup instead")

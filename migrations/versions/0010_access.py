"""Keys, and whose rollouts and environments are."""

from pathlib import Path

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    script = Path(__file__).parent.parent / "sql" / "0010_access.sql"
    # Several statements at once need the driver itself: prepared statements take one.
    driver = op.get_bind().connection.dbapi_connection
    driver.run_async(lambda connection: connection.execute(script.read_text(encoding="utf-8")))


def downgrade() -> None:
    raise NotImplementedError("restore a backup instead")

"""The control plane: environments, rollouts, checkpoints, pins, journal."""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    script = Path(__file__).parent.parent / "sql" / "0001_control_plane.sql"
    # Several statements at once need the driver itself: prepared statements take one.
    driver = op.get_bind().connection.dbapi_connection
    driver.run_async(lambda connection: connection.execute(script.read_text(encoding="utf-8")))


def downgrade() -> None:
    raise NotImplementedError("the first revision can't be undone: drop the schema megamcp instead")

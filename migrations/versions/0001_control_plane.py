"""The control plane: environments, rollouts, checkpoints, pins, journal."""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    script = Path(__file__).parent.parent / "sql" / "0001_control_plane.sql"
    op.get_bind().exec_driver_sql(script.read_text(encoding="utf-8"))


def downgrade() -> None:
    raise NotImplementedError("the first revision can't be undone: drop the schema megamcp instead")

"""The epoch from which on a database is its rollout's: what the deed says that its first call brings."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("alter table megamcp.databases add epoch integer")  # null: bound inside already


def downgrade() -> None:
    op.execute("alter table megamcp.databases drop epoch")

"""What the handshake with a sandbox's process found, whole: a server's capabilities beside its instructions."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("images", "sandboxes"):
        op.execute(f"alter table megamcp.{table} rename instructions to about")
        op.execute(
            f"update megamcp.{table} set about = json_build_object('instructions', about) where modern is not null"
        )


def downgrade() -> None:
    for table in ("images", "sandboxes"):
        op.execute(f"update megamcp.{table} set about = about::json ->> 'instructions' where modern is not null")
        op.execute(f"alter table megamcp.{table} rename about to instructions")

"""Where each gateway process is reached by the others: requests that only it can go on with are handed to it."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        create table megamcp.peers (
            id text primary key,
            owner bigint not null,              -- the process's mark: it lives while the advisory lock is held
            address text not null               -- unix:/path of a socket, or http://host:port
        )
        """
    )


def downgrade() -> None:
    op.execute("drop table megamcp.peers")

"""The clone engine: state kind `database` inside PostgreSQL clusters.

Each rollout has a PostgreSQL 18 database of its own, a file copy of a source (`Cluster.clone`). Inside it, every
change is logged, so that the database can be marked and brought back to a mark (`Inside`), and calls are recorded
exactly once. What a clone is for (rollouts, checkpoints, leases) is the control plane's business, not this package's.

    cluster = Cluster("embedded", dsn)
    await cluster.open()
    await cluster.build("mm_src_shop", ddl=…, seeds=[…], keys=Keys(*Signer.pads(secret)))
    await cluster.clone("mm_src_shop", "mm_db_1", login="mm_u_1", password=…)
    async with cluster.hold("mm_db_1", patience_s=5) as inside:
        mark = await inside.mark()
"""

from megamcp.state.clones.access import place
from megamcp.state.clones.cluster import Cluster
from megamcp.state.clones.contents import compare
from megamcp.state.clones.fitness import demand
from megamcp.state.clones.inside import Inside
from megamcp.state.clones.types import CallRow, Disk, Keys, Mark, Standing

__all__ = ["CallRow", "Cluster", "Disk", "Inside", "Keys", "Mark", "Standing", "compare", "demand", "place"]

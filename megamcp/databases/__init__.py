"""State kind `database`: which database a rollout's calls go to, and how it follows the rollout's moves.

`megamcp.state.clones` knows what happens inside clusters; here is what belongs to rollouts. The control plane is the
truth and databases follow it: a rollback is a row first, and carried out inside before the next call; a copy is
a row first, and made afterwards. So nothing that is cut off leaves a database that a rollout would use in a wrong
condition (`Keeper` tidies up what is left).
"""

from megamcp.databases.clusters import Clusters
from megamcp.databases.door import Door
from megamcp.databases.freezing import Freezer, columns
from megamcp.databases.heads import Databases, Place, Point
from megamcp.databases.keeper import Keeper
from megamcp.databases.reads import Reads, Spot
from megamcp.databases.underway import not_made

__all__ = [
    "Clusters",
    "Databases",
    "Door",
    "Freezer",
    "Keeper",
    "Place",
    "Point",
    "Reads",
    "Spot",
    "columns",
    "not_made",
]

"""Sandboxes of rollouts (state kind `process`): which there are, what they were frozen to, where each rollout stands.

The keeper (`sandboxes`) runs and freezes them; here is the journal of what should be there, and its order with
checkpoints, forks and rollbacks.
"""

from megamcp.sandboxed.boxes import Boxes
from megamcp.sandboxed.freezer import BoxFreezer
from megamcp.sandboxed.host import Host
from megamcp.sandboxed.tender import Tender
from megamcp.sandboxed.trees import FileChanges, Trees

__all__ = ["BoxFreezer", "Boxes", "FileChanges", "Host", "Tender", "Trees"]

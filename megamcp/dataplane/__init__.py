"""The MCP side of the gateway: one endpoint a rollout, both protocol eras, tool servers behind it.

What belongs here: bytes between an agent and a tool server, and the processes of tool servers. What does not:
SQL, leases, checkpoints; those are reached through `ports.ControlPort`.
"""

from megamcp.dataplane.plane import Dataplane
from megamcp.dataplane.ports import ControlPort, Limits

__all__ = ["ControlPort", "Dataplane", "Limits"]

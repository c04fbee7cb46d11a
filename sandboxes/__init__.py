"""Sandboxes: processes of a rollout's own that can be frozen, started again from what was frozen, and compared.

One *keeper* a host owns every sandbox, mount, layer and image on it (`python -m sandboxes`); it is the only part that
may need root. A gateway talks to it by `Client`. Three runtimes do the work behind one protocol (`runtime.Runtime`).
Nothing here knows rollouts, MCP or PostgreSQL, and nothing imports `megamcp`.
"""

from sandboxes.client import Client
from sandboxes.types import Exited, FileChange, Frozen, Info, Kind, Limits, Pipes, Report, SandboxError, Spec

__all__ = [
    "Client",
    "Exited",
    "FileChange",
    "Frozen",
    "Info",
    "Kind",
    "Limits",
    "Pipes",
    "Report",
    "SandboxError",
    "Spec",
]

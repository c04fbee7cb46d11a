"""What several files of this folder use."""

from typing import Any

JSON = {"content-type": "application/json"}

# (method, path below a rollout, a body that is right)
OPERATIONS: list[tuple[str, str, Any]] = [
    ("GET", "", None),
    ("POST", "/renew", {}),
    ("POST", "/checkpoints", {}),
    ("GET", "/checkpoints", None),
    ("POST", "/rollback", {"checkpoint": "cp_none"}),
    ("GET", "/diff", None),
    ("GET", "/digest", None),
    ("POST", "/query", {"sql": "select 1"}),
    ("GET", "/events", None),
    ("POST", "/scores", {"name": "reward", "value": 1}),
    ("GET", "/tools", None),
    ("POST", "/call", {"tool": "items"}),
]

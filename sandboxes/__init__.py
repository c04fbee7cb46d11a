"""Sandboxes: processes of a rollout's own that can be frozen, started again from what was frozen, and compared.

One *keeper* a host owns every sandbox, mount, layer and image on it (`python -m sandboxes`); it is the only part that
may need root. A gateway talks to it by `Client`. Three runtimes do the work behind one protocol (`runtime.Runtime`).
Nothing here knows rollouts, MCP or PostgreSQL, and nothing imports `megamcp`. This file imports nothing: forked servers
load it too.
"""

"""The digest of a rollout: one hash over the effective state of all its servers.

A server's part is the hash of the content it was loaded with and a 128-bit sum of what differs from that. So equal
states have equal digests, whatever way led there.
"""

import hashlib
import json
from collections.abc import Mapping

from megamcp import state
from megamcp.environments import LoadedEnvironment, LoadedServer

UNTOUCHED = "0" * 32

NOTHING = hashlib.sha256().hexdigest()
"""Digest of an empty folder."""

OPAQUE = "opaque"
"""Begins the sum of a state that is more than what can be compared: the memory of a process."""

Sums = Mapping[str, str | None]
"""Server -> sum as 32 hex digits, or of files their digest. Missing: nothing was written. None: not known without
reading all of the state."""


def files_sum(digest: str | None, *, memory: bool) -> str | None:
    """Of a sandbox: its files, and whether that is all of it."""
    return f"{OPAQUE} {digest}" if memory else digest


def add(total: str | None, delta: int) -> str:
    """A sum, moved on."""
    return f"{(int(total or '0', 16) + delta) % state.MODULUS:032x}"


def part_of(server: LoadedServer, sums: Sums) -> str | None:
    """A server's part of the digest. None where its sum isn't known."""
    content = server.schema.hash if server.schema else server.database or server.files
    total = sums.get(server.name, (server.files or NOTHING) if server.process else UNTOUCHED)
    if total is None or total.startswith(OPAQUE):
        return None
    return hashlib.sha256(f"{content} {total}".encode()).hexdigest()


def digest_of(environment: LoadedEnvironment, sums: Sums) -> str | None:
    """The digest. None where a server's sum isn't known (a database after DDL) or isn't all of it (memory)."""
    parts = {server.name: part_of(server, sums) for server in environment.servers if server.stateful}
    if None in parts.values():
        return None
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

"""The fork server: Python servers that are warmed once and forked for each sandbox and image."""

from sandboxes.forkserver.runtime import ForkServer

__all__ = ["ForkServer"]

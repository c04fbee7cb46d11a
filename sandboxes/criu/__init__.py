"""Sandboxes for any program: runc containers whose processes CRIU writes to disk and reads back.

`runc` runs the two programs, `bundle` says what a container is, `packages` gets a server from npm or PyPI into a
template, `runtime` puts them together.
"""

from sandboxes.criu.runtime import Criu

__all__ = ["Criu"]

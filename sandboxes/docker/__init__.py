"""Sandboxes as containers of a Docker engine, for hosts where nothing else can be had: files are kept, memory isn't."""

from sandboxes.docker.runtime import Containers

__all__ = ["Containers"]

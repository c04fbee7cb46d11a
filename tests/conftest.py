"""Fixtures that every layer may use."""

from megamcp.testing import *  # noqa: F403

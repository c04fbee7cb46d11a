"""MegaMCP: an MCP gateway that gives every rollout its own state, which can be checkpointed, forked and rolled back."""

__version__ = "0.1.0"

"""A tool server without tools: its state is reached by raw logins only."""

from megamcp.sdk import Server

server = Server("vault")

"""The fork server: Python servers that are warmed once and forked for each sandbox and image.

The keeper uses `runtime`; a server's own process runs `driver`, with nothing but the standard library.
"""

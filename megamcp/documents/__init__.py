"""State kind `document`: one JSON document a rollout and server.

content (how a document is kept), canonical (its digest), difference (between two), keeper (the gateway's side: what
checkpoints keep). A tool server's side is in `megamcp.sdk`.
"""

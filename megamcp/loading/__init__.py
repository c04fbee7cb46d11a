"""Files of SQL that environments are made from: read in pieces, never as one text, so that size costs time, not memory.

`script` says what a file is (its hash, its format) and reads its bytes; `split` cuts them into statements and rows of
COPY; `dumps` says what a statement of pg_dump's means here; `copying` reads COPY commands; `export` makes an
environment's folder from a PostgreSQL that is there. Nothing here runs an environment's SQL: that is the states'.
"""

from megamcp.loading.script import Script, as_script

__all__ = ["Script", "as_script"]

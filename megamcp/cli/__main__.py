"""`python -m megamcp.cli`: the command line, where no `megamcp` is on the path."""

from megamcp.cli import main

main()

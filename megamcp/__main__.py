"""`python -m megamcp` is the command `megamcp`."""

from megamcp.cli import main

if __name__ == "__main__":
    main()

"""Runs in a container: evaluates each line that it is sent, and answers with the value or the error on a line."""

import os
import socket
import sys
from pathlib import Path

memory: list[str] = []
names = {"Path": Path, "memory": memory, "os": os, "socket": socket, "sys": sys}

for line in sys.stdin:
    try:
        sys.stdout.write(f"{eval(line, names)!r}\n")
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}\n")
    sys.stdout.flush()

"""Becomes another program that dies with the gateway: `python _launch.py GATEWAY_PID COMMAND…`.

A server whose event loop is blocked does not notice that its stdin was closed, so the kernel is asked to kill it
when its parent is gone (PR_SET_PDEATHSIG outlives exec). Done here and not between fork and exec in the gateway,
where only async-signal-safe code may run. Descriptors besides stdin, stdout and stderr are closed: uvloop leaves the
child a second one of each pipe, which would keep the pipe open when the child closes it. Imports nothing of the
package: it runs with `-I -S`.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    gateway, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != gateway:
            # The gateway died before the request reached the kernel.
            raise SystemExit(0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} can't be run: {error.strerror}")


main()

"""The thread that a server's code runs in: it has given up every right that it doesn't need, for good, and so has all
that it starts.

One thread serves the calls of a burst; it is ended before a fork. What it keeps for itself (`threading.local`) doesn't
outlive a call, so that nobody can tell where bursts begin and end.
"""

import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence

from sandboxes.confine import kernel, seccomp

DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))

_own_values = ctypes.pythonapi.PyThreadState_GetDict
_own_values.restype = ctypes.c_void_p


class ToolThread:
    """Handles one line at a time. `ended` is written to after each: an eventfd."""

    def __init__(self, handle: Callable[[bytes], None], confine: Callable[[], None], ended: int) -> None:
        self._handle = handle
        self._confine = confine
        self._ended = ended
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tool", daemon=True)
        self._thread.start()

    def give(self, line: bytes) -> None:
        """Only when it has ended the last one."""
        self._lines.put(line)

    def join(self) -> None:
        """Ends it. Only when it has nothing to do."""
        self._lines.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._confine()
        except OSError as error:
            sys.stderr.write(f"this thread can't be confined: {error}\n")
            sys.stderr.flush()
            os._exit(1)
        while (line := self._lines.get()) is not None:
            self._handle(line)
            del line
            if (values := _own_values()) is not None:
                ctypes.cast(values, ctypes.py_object).value.clear()
            os.eventfd_write(self._ended, 1)


def confine(readable: Sequence[str], writable: Sequence[str], *, network: bool) -> None:
    """This thread, for good. Raises OSError."""
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.landlock(list(readable), [*writable, *DEVICES], network=network)
    seccomp.install()

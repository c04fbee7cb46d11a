"""Stopping a tool that runs in a thread: from another one, when its client has left the call.

An `async def` tool is cancelled. Into any other an exception is raised, at the next step that Python takes in it; one
that waits inside of a system call notices when that returns. What takes no notice is not stopped here.
"""

import asyncio
import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator

Stop = Callable[[], None]

_REMEMBERED = 64


class Interrupted(BaseException):
    """Raised in a tool whose call was cancelled."""


STOPPED = (Interrupted, asyncio.CancelledError)
"""What a tool that was stopped raises."""


class Interrupts:
    """The calls of one conversation, of which one runs at a time. `stop` may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: bytes | None = None
        self._stop: Stop | None = None
        self._stopped: deque[bytes] = deque(maxlen=_REMEMBERED)
        """Calls that were to be stopped, also those that have not begun."""

    @contextlib.contextmanager
    def running(self, call: bytes) -> Iterator[Callable[[Stop], None]]:
        """Around a call; gives what is told how to stop it. Raises `Interrupted` where it was stopped before."""
        with self._lock:
            if call in self._stopped:
                raise Interrupted
            self._running = call
        try:
            yield self._started
        finally:
            with self._lock:
                self._running = self._stop = None
            _raise_in(threading.get_ident(), None)  # it may have been asked for a moment too late

    def _started(self, stop: Stop) -> None:
        with self._lock:
            self._stop = stop
            stopped = self._running in self._stopped
        if stopped:
            stop()

    def stop(self, call: bytes) -> None:
        """Nothing where it has ended."""
        with self._lock:
            if call in self._stopped:
                return
            self._stopped.append(call)
            if self._running == call and self._stop is not None:
                self._stop()


def stops_thread() -> Stop:
    """Raises `Interrupted` in the thread that calls this."""
    thread = threading.get_ident()
    return lambda: _raise_in(thread, Interrupted)


def stops_task() -> Stop:
    """Cancels the task that calls this."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            loop.call_soon_threadsafe(task.cancel)

    return stop


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """None takes back what was not raised yet."""
    raised = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)

"""What the data plane is doing, for whoever watches it: log lines, metrics and traces know it by this.

One `Doing` goes with each message and each call, as a context variable: tasks that a call makes have the same one. The
seam is `Watcher`; the module counts nothing, and writes and sends nothing.
"""

import time
from contextvars import ContextVar
from typing import Protocol

from megamcp.dataplane import wire


class Clock:
    """Adds up the seconds spent inside its `with` blocks."""

    __slots__ = ("_began", "seconds", "used")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.used = False
        self._began = 0.0

    def __enter__(self) -> None:
        self.used = True
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Doing:
    """A message, or a tool call; what isn't known of it is None. `tool` is the listed name of one that exists."""

    __slots__ = ("began", "environment", "journal", "queue", "request", "rollout", "server", "tool", "upstream")

    def __init__(self, rollout: str | None = None, request: str | None = None) -> None:
        self.rollout = rollout
        self.request = request
        """The client's JSON-RPC id."""
        self.environment: str | None = None
        self.server: str | None = None
        self.tool: str | None = None
        self.began = time.perf_counter()
        self.queue = Clock()
        self.upstream = Clock()
        self.journal = Clock()


_doing: ContextVar[Doing | None] = ContextVar("megamcp_doing", default=None)


def doing() -> Doing | None:
    """What the running task is doing, where that is known."""
    return _doing.get()


def begin(rollout: str | None = None, request: str | None = None) -> Doing:
    """Something new begins in this task."""
    new = Doing(rollout, request)
    _doing.set(new)
    return new


def begin_call(rollout: str) -> Doing:
    """A tool call begins, in the message that this task is at."""
    message = _doing.get()
    return begin(rollout, message.request if message is not None else None)


def current() -> Doing:
    """What the running task is doing; nothing in particular where nobody said."""
    return _doing.get() or begin()


class Watcher(Protocol):
    """Told of calls. Raises nothing, and takes microseconds: it is on the way of each."""

    def ended(self, call: Doing, reply: wire.Reply | None, error: BaseException | None) -> None:
        """A call has its reply, or has failed."""
        ...


class Blind:
    """Watches nothing."""

    def ended(self, call: Doing, reply: wire.Reply | None, error: BaseException | None) -> None:
        pass

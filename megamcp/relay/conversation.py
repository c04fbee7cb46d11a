"""Who owes whom an answer: follows both directions of one connection far enough to know when nothing is under way.

Invariant: `idle` is true exactly when each message that was passed on has been answered, the last ReadyForQuery said
that no transaction is open, and no message without its Sync could have opened one. Three habits of PostgreSQL make
this more than counting: after an error in an extended query it ignores everything up to the next Sync, Query and
FunctionCall included; while it takes COPY data it ignores Sync and Flush; data after a failed COPY is ignored.

Refused is what can't be followed: a Sync behind COPY data that hasn't come to its end. No client library does that.
Holds letters, not bytes; only Parse and Close are kept whole until they are answered. Moves nothing by itself.
"""

from collections import deque
from typing import Final

from megamcp.relay.memory import Memory
from megamcp.relay.messages import Client, ProtocolViolation, Server

_EXTENDED: Final = frozenset((Client.PARSE, Client.BIND, Client.DESCRIBE, Client.EXECUTE, Client.CLOSE))
_ENDING: Final = frozenset((Client.SYNC, Client.QUERY, Client.FUNCTION_CALL))
_COPY_ENDS: Final = frozenset((Client.COPY_DONE, Client.COPY_FAIL))
_ANSWERS: Final = {
    Server.PARSE_COMPLETE: Client.PARSE,
    Server.BIND_COMPLETE: Client.BIND,
    Server.CLOSE_COMPLETE: Client.CLOSE,
    Server.ROW_DESCRIPTION: Client.DESCRIBE,
    Server.NO_DATA: Client.DESCRIBE,
    Server.COMMAND_COMPLETE: Client.EXECUTE,
    Server.EMPTY_QUERY: Client.EXECUTE,
    Server.PORTAL_SUSPENDED: Client.EXECUTE,
}


class Conversation:
    """What one backend still owes one client."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._owed: deque[tuple[int, bytes]] = deque()
        self._unsynced = False  # messages of an extended query were sent, and no Sync after them
        self._skipping = False  # an extended query failed, and its Sync hasn't been sent yet
        self._copying = False  # the backend takes COPY data
        self._status = ord("I")
        self._data = False  # COPY data was sent, and nothing after it

    @property
    def idle(self) -> bool:
        return not (self._owed or self._unsynced or self._skipping or self._copying) and self._status == ord("I")

    @property
    def answered(self) -> bool:
        """Nothing that was passed on waits for an answer, but for what only a Sync will be told."""
        return not self._owed

    @property
    def is_read(self) -> bool:
        """Whether the backend will read a query that is sent now."""
        return not (self._skipping or self._copying)

    @property
    def in_transaction(self) -> bool:
        """By the last ReadyForQuery."""
        return self._status != ord("I")

    @property
    def copying(self) -> bool:
        """The backend takes nothing but COPY data."""
        return self._copying

    @property
    def will_be_ready(self) -> bool:
        """A ReadyForQuery comes without anything more from the client, and no transaction was open before."""
        busy = self._unsynced or self._skipping or self._copying
        return bool(self._owed) and not busy and self._status == ord("I")

    @property
    def waiting_for_client(self) -> bool:
        """Nothing is owed, whatever is open."""
        return not self._owed or self._copying

    def sent(self, kind: int, whole: bytes = b"") -> None:
        """A client's message goes to the backend. `whole` is asked for Parse and Close only.

        Raises ProtocolViolation.
        """
        if kind == Client.COPY_DATA:
            self._data = True
            return
        if kind == Client.SYNC:
            if self._data and (self._copying or self._owed):
                # Ignored if the data is good, not ignored if the COPY has failed on it: the relay can't know in time.
                raise ProtocolViolation("the relay can't pass a Sync on within COPY data; end the data first")
            if not self._copying:
                self._skipping = self._unsynced = self._data = False
                self._owed.append((kind, b""))
            return
        if kind == Client.FLUSH:
            return
        self._data = self._copying and kind not in _COPY_ENDS  # no data, but it ends the COPY or comes after its end
        if self._skipping:
            return
        if kind in _EXTENDED:
            self._unsynced = True
            self._owed.append((kind, whole))
        elif kind in _ENDING:
            self._unsynced = False
            if kind == Client.QUERY:
                self._memory.forget(b"")
            self._owed.append((kind, b""))
        elif kind in _COPY_ENDS:
            if self._copying:
                self._copying = False
            elif self._owed:
                self._owed.append((kind, b""))  # sent ahead of the answer that says whether it will be read

    def received(self, kind: int, body: bytes = b"") -> None:
        """A backend's message. `body` is asked for ReadyForQuery, CommandComplete only."""
        if kind == Server.READY:
            self._ready(body[0])
            return
        self._drop_strays()
        if kind == Server.ERROR:
            self._failed()
        elif kind == Server.COPY_IN:
            self._copy_in()
        else:
            if kind == Server.COMMAND_COMPLETE:
                self._memory.completed(body)
            if self._owed and self._owed[0][0] == _ANSWERS.get(kind):
                asked, whole = self._owed.popleft()
                if asked == Client.PARSE:
                    self._memory.parsed(whole)
                elif asked == Client.CLOSE:
                    self._memory.closed(whole)

    def _ready(self, status: int) -> None:
        self._status = status
        self._copying = False
        while self._owed and self._owed.popleft()[0] not in _ENDING:
            pass
        self._drop_strays()

    def _drop_strays(self) -> None:
        """An end of COPY data that no COPY reads is ignored."""
        while self._owed and self._owed[0][0] in _COPY_ENDS:
            self._owed.popleft()

    def _failed(self) -> None:
        self._copying = False
        if self._owed and self._owed[0][0] in _EXTENDED:
            while self._owed and self._owed[0][0] != Client.SYNC:
                self._owed.popleft()
            self._skipping = not self._owed

    def _copy_in(self) -> None:
        """What was sent behind the COPY already is read as a part of it."""
        if not self._owed:
            return
        self._copying = True
        asking = self._owed.popleft()
        while self._owed and self._owed[0][0] in (Client.SYNC, *_COPY_ENDS) and self._copying:
            self._copying = self._owed.popleft()[0] == Client.SYNC
        self._data = self._data or (self._copying and bool(self._owed))
        if asking[0] == Client.EXECUTE and not any(kind in _ENDING for kind, _ in self._owed):
            self._unsynced = True
        self._owed.appendleft(asking)

"""One client and its backend of the moment: passing on, marking transactions, moving to another backend.

Nothing of a client reaches a backend before `megamcp.enter` has answered there, and `megamcp.leave` is called when
the client's last transaction has ended. So whoever holds the lock that `enter` waits for knows that no transaction is
open, and may end the backend: the session then finds the next one by itself, and the client, which gets its
answers byte for byte, doesn't notice. While a transaction is open nothing is hidden: the backend's end is the client's.

`leave` waits `_LINGER_S` for the client's next message, which spares a busy client two round trips per transaction; and
it is not put off longer than `_HOLD_S`, however fast transactions follow each other or fill a pipeline.

All but the search for a backend runs in callbacks, without a task. Memory is bounded: each side waits for the other.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from megamcp.relay import backend as backends
from megamcp.relay import messages
from megamcp.relay.backend import Backend, Route
from megamcp.relay.conversation import Conversation
from megamcp.relay.discards import ANSWER, Discards, is_fatal
from megamcp.relay.farewells import AWAY, BUSY, LOST, TOO_MUCH
from megamcp.relay.login import Turned
from megamcp.relay.memory import WHOLE_LIMIT, Memory
from megamcp.relay.messages import Client, ProtocolViolation, Server
from megamcp.relay.search import found
from megamcp.relay.wire import Wire

_log = logging.getLogger(__name__)

_LINGER_S: Final = 0.001
_HOLD_S: Final = 0.05
_OWN_LIMIT: Final = 1 << 20  # bytes of a message that is read and not passed on
_LOOK_LIMIT: Final = 4 << 20  # bytes of all rows of a look
_PASSING: Final = frozenset(("57014", "55P03", "40001", "40P01"))
_KEPT_WHOLE: Final = frozenset((Client.PARSE, Client.CLOSE, Client.QUERY))
_KEPT_TOO: Final = frozenset((Client.BIND, Client.EXECUTE))  # while a DISCARD ALL is prepared
_READ_WHOLE: Final = frozenset((Server.READY, Server.PARAMETER_STATUS, Server.COMMAND_COMPLETE))
_BULK: Final = frozenset((Server.DATA_ROW, Server.COPY_DATA))  # they say nothing about what is owed
_ANY_TIME: Final = frozenset((Server.NOTIFICATION, Server.PARAMETER_STATUS))


class Errand(StrEnum):
    """What the relay itself asks of a backend between transactions."""

    ENTER = "enter"
    LOOK = "look"
    LEAVE = "leave"


@dataclass(slots=True)
class _Asked:
    errand: Errand
    error: Mapping[str, str] | None = None
    rows: list[bytes] = field(default_factory=list)
    size: int = 0
    begun: bool = False  # a part of the answer is here


class Session:
    """From the client's login to the end of its connection."""

    def __init__(
        self,
        client: Wire,
        resolve: Callable[[], Awaitable[Route]],
        parameters: Mapping[str, str],
        *,
        patience_s: float,
        connect_timeout_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._client = client
        self._resolve = resolve
        self._parameters = parameters
        self._patience_s = patience_s
        self._connect_timeout_s = connect_timeout_s
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._memory = Memory()
        self._talk = Conversation(self._memory)
        self._discards = Discards()
        self._alone = False  # what travels alone is under way
        self._at_first: dict[str, str] = {}  # what the first backend reported
        self._backend: Backend | None = None
        self._asked: deque[_Asked] = deque()
        self._inside = False
        self._entered = 0.0
        self._linger: asyncio.TimerHandle | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._search: asyncio.Task[None] | None = None
        self._held = bytearray()  # of the client, not passed on yet
        self._need = 1  # bytes that have to be held before it is worth a look
        self._rest = 0  # bytes of the message that is being passed on
        self._partial = b""  # of the backend, a message that is read whole
        self._skip = 0  # bytes of the backend's message that is being passed on
        self._told = False  # the client has seen why its backend ends
        self._ended = False
        self._heard = self._loop.time()

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self, key: bytes) -> None:
        """The first backend, and the client's first ReadyForQuery; or its end. Raises nothing."""
        self._patience = self._loop.call_later(self._patience_s, self._give_up)
        self._search = asyncio.current_task()
        backend = await self._found()
        if backend is None:
            return
        self._memory.reported, self._at_first = dict(backend.reported), backend.reported
        statuses = b"".join(messages.parameter_status(*pair) for pair in backend.reported.items())
        self._client.write(
            messages.authentication(0) + statuses + messages.message(Server.BACKEND_KEY, key) + messages.ready()
        )
        self._take(backend)
        self._client.attach(self)

    def _give_up(self) -> None:
        self.fail(*(BUSY if self._entering else AWAY))

    def fail(self, sqlstate: str, text: str, hint: str | None = None) -> None:
        """Ends the session with an error."""
        self._end(messages.error_response(sqlstate, text, hint=hint))

    def check_idle(self, now: float, idle_s: float) -> None:
        """Ends the session if the client did nothing for so long and nobody works for it."""
        waiting = self._client.full or (self._talk.waiting_for_client and not self._entering)
        if waiting and now - self._heard > idle_s:
            if self._inside and not self._talk.idle:
                self.fail("25P03", "terminating connection due to idle-in-transaction timeout of the relay")
            else:
                self.fail("57P05", "terminating connection due to idle-session timeout of the relay")

    async def cancel(self) -> None:
        """Cancels what the backend does for the client, if it does something. Raises OSError."""
        if self._backend is not None and self._inside and not self._talk.idle:
            await backends.cancel(self._backend)

    def _end(self, last: bytes = b"") -> None:
        if self._ended:
            return
        self._ended = True
        for handle in (self._linger, self._patience):
            if handle is not None:
                handle.cancel()
        if self._search is not None:
            self._search.cancel()
        if self._backend is not None:
            # Behind what is under way, so that a client that says good-bye at once still gets its work done.
            polite = not (self._rest or self._talk.copying)
            self._backend.wire.close(messages.message(Client.TERMINATE) if polite else b"")
            self._backend = None
        self._client.close(last)
        self._held.clear()
        self._on_end()

    # -- what happens on the wires ---------------------------------------------------------------------------------

    def data(self, wire: Wire, data: bytes) -> None:
        if self._ended:
            return
        if wire is self._client:
            self._heard = self._loop.time()
            self._held += data
            if len(self._held) >= self._need:
                self._pump()
        elif self._backend is not None and wire is self._backend.wire:
            self._from_backend(data)

    def writable(self, wire: Wire, yes: bool) -> None:
        if wire is not self._client:
            self._throttle()
        elif self._backend is not None:
            self._heard = self._loop.time()
            self._backend.wire.read(yes)

    def lost(self, wire: Wire) -> None:
        if wire is self._client:
            self._end()
            return
        if self._backend is None or wire is not self._backend.wire:
            return
        quiet = (not self._inside or self._talk.idle or self._discarded_by_its_end()) and not self._rest
        self._forget_backend()
        if not quiet:
            self._end(b"" if self._told else messages.error_response(*LOST[:2], hint=LOST[2]))
        elif self._memory.too_much:
            self.fail(*TOO_MUCH)
        elif self._held or self._memory.channels:
            self._look_for_backend()

    def _discarded_by_its_end(self) -> bool:
        """Whether all that was under way is a DISCARD ALL, which the end of its backend is as well: it is answered."""
        kind = self._discards.under_way
        if kind is None or self._skip or self._talk.in_transaction:
            return False
        changed = {k: v for k, v in self._at_first.items() if self._memory.reported.get(k) != v}
        self._memory.reported |= changed
        said = b"".join(messages.parameter_status(*pair) for pair in changed.items())
        if not self._memory.discarded:
            self._memory.completed(b"DISCARD ALL")
            said += ANSWER
        self._client.write(said + (messages.ready() if kind == Client.QUERY else b""))
        self._talk = Conversation(self._memory)
        return True

    def _forget_backend(self) -> None:
        self._backend = None
        self._alone = False
        self._discards.answered(self._memory.discarded)
        self._inside = False
        self._asked.clear()
        self._partial, self._skip = b"", 0
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _throttle(self) -> None:
        """Reads from the client what the backend takes, or what may be held until then."""
        full = self._backend is not None and self._backend.wire.full
        self._client.read(not full and len(self._held) <= WHOLE_LIMIT)

    # -- client to backend -----------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Passes on what the client sent, as far as it may."""
        try:
            self._pass_messages()
        except ProtocolViolation as error:
            self.fail("08P01", str(error))

    def _pass_messages(self) -> None:
        data, position, size, flush = bytes(self._held), 0, len(self._held), False
        self._need = 1
        while position < size:
            if self._rest:
                step = min(self._rest, size - position)
                self._rest -= step
                position += step
                continue
            if size - position < 5:
                self._need = 5
                break
            kind, length = data[position], int.from_bytes(data[position + 1 : position + 5], "big")
            messages.check_client_message(kind, length)
            whole = b""
            if (kind in _KEPT_WHOLE or (kind in _KEPT_TOO and self._discards.wary)) and length < WHOLE_LIMIT:
                if size - position <= length:
                    self._need = length + 1
                    break
                whole = data[position : position + 1 + length]
            if kind == Client.TERMINATE:
                self._pass_on(data[:position])
                self._end()
                return
            if not self._may_pass():
                break
            if self._discards.alone(kind, whole):
                flush = kind == Client.EXECUTE or not self._talk.answered
                if not self._talk.answered:
                    break
                self._alone = self._talk.is_read
            if self._talk.is_read:
                self._discards.sent(kind, whole)
            if kind in (Client.PARSE, Client.QUERY):
                self._memory.read(whole)
            self._talk.sent(kind, whole)
            self._rest = length + 1
        if position:
            self._pass_on(data[:position] if position < size else data)
            del self._held[:position]
        if flush:
            self._pass_on(messages.FLUSH)
        self._throttle()
        self._settle()

    def _pass_on(self, data: bytes) -> None:
        if data and self._backend is not None:
            self._backend.wire.write(data)

    def _may_pass(self) -> bool:
        if not self._inside:
            self._knock()
            return False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        return not (self._alone or (self._overdue and self._talk.will_be_ready))

    @property
    def _overdue(self) -> bool:
        return self._memory.discarded or self._loop.time() - self._entered > _HOLD_S

    @property
    def _entering(self) -> bool:
        return any(asked.errand is Errand.ENTER for asked in self._asked)

    def _knock(self) -> None:
        """Sees to it that the session gets in."""
        if self._patience is None:
            self._patience = self._loop.call_later(self._patience_s, self._give_up)
        if self._backend is None:
            self._look_for_backend()
        elif not self._entering:
            self._ask(Errand.ENTER)

    def _not_alone(self) -> None:
        """What travelled alone was answered. After a DISCARD ALL the session enters again, within its batch too."""
        self._alone = False
        self._discards.answered(self._memory.discarded)
        self._inside = self._inside and (self._talk.idle or not self._memory.discarded)

    def _settle(self) -> None:
        """If nothing is under way, the session goes out, now or in a moment."""
        if self._inside and self._linger is None and self._talk.idle and not self._rest:
            if self._overdue:
                self._go_out()
            else:
                self._linger = self._loop.call_later(_LINGER_S, self._go_out)

    def _go_out(self) -> None:
        self._linger = None
        self._inside = False
        if self._memory.stale:
            self._ask(Errand.LOOK)
        self._ask(Errand.LEAVE)
        if len(self._held) >= self._need:
            self._pump()

    # -- the relay's own errands -----------------------------------------------------------------------------------

    def _ask(self, errand: Errand) -> None:
        assert self._backend is not None
        self._asked.append(_Asked(errand))
        match errand:
            case Errand.ENTER:
                self._backend.wire.write(self._backend.gate.enter())
            case Errand.LEAVE:
                self._backend.wire.write(self._backend.gate.leave())
            case Errand.LOOK:
                self._backend.wire.write(self._memory.look())

    def _answered(self, asked: _Asked) -> None:
        error = asked.error and asked.error.get("C", "XX000")
        match asked.errand:
            case Errand.ENTER if not error:
                self._inside, self._entered, self._memory.discarded = True, self._loop.time(), False
                if self._patience is not None:
                    self._patience.cancel()
                    self._patience = None
                self._pump()
            case Errand.LOOK if error or asked.size > _LOOK_LIMIT:
                self._memory.unseen()
            case Errand.LOOK:
                self._memory.looked(asked.rows)
            case Errand.LEAVE if not error:
                pass
            case errand if error in _PASSING:  # cancelled, or by a timeout of the client's own
                self._ask(errand)
            case Errand.ENTER:
                text = (asked.error or {}).get("M", "")
                self.fail(
                    error or "XX000", f"The relay could not begin a transaction: {text}", "Connect again; RESET ROLE."
                )
            case Errand.LEAVE:
                self._drop_backend()

    def _drop_backend(self) -> None:
        """Whatever is wrong with the backend, between transactions another one does as well."""
        if self._backend is not None:
            wire = self._backend.wire
            wire.close()
            self.lost(wire)

    # -- backend to client -----------------------------------------------------------------------------------------

    def _from_backend(self, data: bytes) -> None:
        if self._partial:
            data, self._partial = self._partial + data, b""
        position, start, size = min(self._skip, len(data)), 0, len(data)
        self._skip -= position
        while size - position >= 5:
            kind = data[position]
            end = position + 1 + int.from_bytes(data[position + 1 : position + 5], "big")
            discarding = kind == Server.ERROR and self._discards.under_way is not None
            if discarding and end > size:
                break
            own = (bool(self._asked) or kind == Server.ERROR) and self._is_own(kind)
            own = own or (discarding and is_fatal(data[position + 5 : end]))
            if own or kind in _READ_WHOLE:
                if end - position > _OWN_LIMIT:
                    self.fail("08P01", "The backend sent a message that the relay can't take.")
                    return
                if end > size:
                    break
                body = data[position + 5 : end]
                if own:
                    if start < position:
                        self._client.write(data[start:position])
                    start = end
                    self._own(kind, body)
                    if self._ended or self._backend is None:
                        return
                elif kind == Server.PARAMETER_STATUS:
                    name, value = messages.strings(body, 2)
                    self._memory.reported[name.decode()] = value.decode(errors="surrogateescape")
                else:
                    self._talk.received(kind, body)
            elif kind not in _BULK:
                if kind == Server.ERROR:
                    self._told = is_fatal(data[position + 5 : position + 60])
                self._talk.received(kind)
            position = end
        if position > size:
            self._skip, position = position - size, size
        if start < position:
            self._client.write(data[start:position] if start or position < size else data)
        self._partial = data[position:]
        if self._alone and self._talk.answered:
            self._not_alone()
        self._settle()
        if self._held and len(self._held) >= self._need and (self._inside or not self._talk.idle):
            self._pump()

    def _is_own(self, kind: int) -> bool:
        """Whether a message is the relay's, not the client's."""
        if kind in _ANY_TIME:
            return False
        if self._asked:
            return kind != Server.READY or self._asked[0].begun  # else the client got its due late
        # An error that answers nothing: the backend says why it ends, between transactions.
        return kind == Server.ERROR and (not self._inside or self._talk.idle)

    def _own(self, kind: int, body: bytes) -> None:
        if not self._asked:
            _log.debug("a backend says that it ends: %s", messages.error_fields(body).get("C"))
            return
        asked = self._asked[0]
        asked.begun = True
        if kind == Server.ERROR:
            asked.error = messages.error_fields(body)
        elif kind == Server.DATA_ROW:
            asked.size += len(body)
            if asked.size <= _LOOK_LIMIT:
                asked.rows.append(body)
        elif kind == Server.READY:
            self._asked.popleft()
            self._answered(asked)

    # -- another backend -------------------------------------------------------------------------------------------

    def _look_for_backend(self) -> None:
        if self._search is None:
            self._search = self._loop.create_task(self._find())
            if self._patience is None:
                self._patience = self._loop.call_later(self._patience_s, self._give_up)

    async def _found(self) -> Backend | None:
        """A backend; None when the session has been ended instead."""
        try:
            return await found(self._resolve, self._parameters, self._memory, self._connect_timeout_s)
        except Turned as turned:
            self._search = None
            self._end(turned.response)
        except Exception:
            _log.exception("The search for a backend failed.")
            self._search = None
            self.fail("XX000", "The relay failed.")
        finally:
            self._search = None
        return None

    async def _find(self) -> None:
        backend = await self._found()
        if backend is None:
            return
        changed = {k: v for k, v in backend.reported.items() if self._memory.reported.get(k) != v}
        self._memory.reported |= changed
        self._client.write(b"".join(messages.parameter_status(*pair) for pair in changed.items()))
        self._take(backend)

    def _take(self, backend: Backend) -> None:
        self._backend = backend
        self._talk = Conversation(self._memory)
        self._told = False
        backend.wire.attach(self)
        if self._backend is backend:
            backend.wire.read(not self._client.full)
            if len(self._held) >= self._need:
                self._pump()
            elif self._patience is not None:
                self._patience.cancel()
                self._patience = None
            self._throttle()

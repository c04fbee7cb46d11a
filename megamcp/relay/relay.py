"""The listening side: who may come in, how many, and who may cancel whom."""

import asyncio
import hmac
import logging
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from megamcp import errors
from megamcp.relay import login, messages
from megamcp.relay.backend import Resolve
from megamcp.relay.login import Cancel, Greeting, Turned, turned
from megamcp.relay.messages import ProtocolViolation
from megamcp.relay.session import Session
from megamcp.relay.wire import Wire

_log = logging.getLogger(__name__)

_SWEEP_S: Final = 5.0
_TOLD: Final = (errors.Unavailable, errors.NoCapacity, errors.DeadlineExceeded, errors.UpstreamError)


@dataclass(slots=True)
class _Entry:
    session: Session
    key: bytes = field(repr=False)


class Relay:
    """A door to many databases, each of which may be moved while its clients stay connected.

    `resolve` is asked at each login and whenever a backend has gone. What it raises at a login looks like a wrong
    password, but for Unavailable, NoCapacity, DeadlineExceeded and UpstreamError: these are told as they are, so they
    must not depend on whether the login exists.
    `patience_s` is how long a client waits for its database to be reachable; `idle_s` how long a client may send
    nothing while nobody works for it; `startup_s` how long a login may take. Times are seconds.
    """

    def __init__(
        self,
        resolve: Resolve,
        *,
        max_clients: int = 1000,
        max_clients_per_login: int = 100,
        idle_s: float = 3600.0,
        connect_timeout_s: float = 5.0,
        patience_s: float = 60.0,
        startup_s: float = 10.0,
    ) -> None:
        self._resolve = resolve
        self._max_clients = max_clients
        self._max_per_login = max_clients_per_login
        self._max_logins = max(16, max_clients // 4)
        self._idle_s = idle_s
        self._connect_timeout_s = connect_timeout_s
        self._patience_s = patience_s
        self._startup_s = startup_s
        self._secret = secrets.token_bytes(32)
        self._servers: list[asyncio.Server] = []
        self._logins: dict[asyncio.Task[None], Wire] = {}  # oldest first
        self._starting: set[asyncio.Task[None]] = set()
        self._sessions: dict[int, _Entry] = {}
        self._by_login: Counter[tuple[str, str]] = Counter()
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def clients(self) -> int:
        """Clients that have logged in."""
        return len(self._sessions)

    async def listen(self, host: str, port: int, *, shared: bool = False) -> int:
        """Opens a door and returns its port. `shared`: other processes listen there too, and the kernel deals clients
        out among them; a client's cancel request may then miss the one that has it. Raises OSError."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Wire(self._accept), host, port, reuse_port=shared or None)
        self._servers.append(server)
        if self._sweeper is None:
            self._sweeper = loop.create_task(self._sweep())
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Ends all; clients are told. What is committed stays, what is open is rolled back by PostgreSQL."""
        self._closing = True
        for server in self._servers:
            server.close()
        tasks = [*self._logins, *self._starting, *([self._sweeper] if self._sweeper else [])]
        for task in tasks:
            task.cancel()
        for entry in list(self._sessions.values()):
            entry.session.fail("57P01", "terminating connection: the relay is shutting down")
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, wire: Wire) -> None:
        if self._closing:
            wire.close()
            return
        if len(self._logins) >= self._max_logins:
            # Who came first and still hasn't logged in makes room: nobody keeps others out by being slow.
            oldest = next(iter(self._logins))
            self._logins.pop(oldest).close()
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._receive(wire))
        self._logins[task] = wire
        task.add_done_callback(lambda task: self._logins.pop(task, None))

    async def _receive(self, wire: Wire) -> None:
        """One connection until it is a session, or gone."""
        try:
            async with asyncio.timeout(self._startup_s):
                greeting = await login.greeting(wire)
                if isinstance(greeting, Cancel):
                    await self._cancel(greeting)
                    wire.close()
                    return
                await self._authenticate(wire, greeting)
            self._admit(wire, greeting)
        except Turned as away:
            wire.close(away.response)
        except ProtocolViolation as error:
            wire.close(messages.error_response("08P01", str(error)))
        except TimeoutError:
            wire.close(messages.error_response("08P01", "The login took too long."))
        except errors.MegaMCPError as error:
            wire.close(messages.refusal(error))
        except OSError:
            wire.close()
        except Exception:
            _log.exception("A login failed.")
            wire.close(messages.error_response("XX000", "The relay failed."))
        except asyncio.CancelledError:
            wire.close()
            raise

    async def _authenticate(self, wire: Wire, greeting: Greeting) -> None:
        password: str | None = None
        try:
            route = await self._resolve(greeting.user, greeting.database)
            password = route.secret or route.password
        except _TOLD:
            raise
        except errors.MegaMCPError as error:
            _log.info("A login of the relay leads nowhere: %s", error.code)
        await login.authenticate(wire, greeting.user, password, self._secret)

    def _admit(self, wire: Wire, greeting: Greeting) -> None:
        who = (greeting.user, greeting.database)
        if len(self._sessions) >= self._max_clients:
            raise turned("53300", "sorry, too many clients already", "Try again when other clients have gone.")
        if self._by_login[who] >= self._max_per_login:
            raise turned("53300", f'too many connections for role "{greeting.user}"', "Use a smaller pool.")
        process = secrets.randbits(31)
        while process in self._sessions or not process:
            process = secrets.randbits(31)
        key = secrets.token_bytes(32 if greeting.protocol >= messages.PROTOCOL_3_2 else 4)

        def ended() -> None:
            self._sessions.pop(process, None)
            self._by_login[who] -= 1
            if not self._by_login[who]:
                del self._by_login[who]

        session = Session(
            wire,
            lambda: self._resolve(*who),
            greeting.parameters,
            patience_s=self._patience_s,
            connect_timeout_s=self._connect_timeout_s,
            on_end=ended,
        )
        self._sessions[process] = _Entry(session, key)
        self._by_login[who] += 1
        task = asyncio.get_running_loop().create_task(session.start(process.to_bytes(4, "big") + key))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _cancel(self, request: Cancel) -> None:
        entry = self._sessions.get(request.process)
        if entry is not None and hmac.compare_digest(entry.key, request.key):
            await entry.session.cancel()

    async def _sweep(self) -> None:
        pause = min(_SWEEP_S, self._idle_s / 4)
        while True:
            await asyncio.sleep(pause)
            now = asyncio.get_running_loop().time()
            for entry in list(self._sessions.values()):
                entry.session.check_idle(now, self._idle_s)

"""The data plane's door to the control plane: `dataplane.ports.ControlPort` over PostgreSQL.

A gateway process is an *instance*: one connection of its own that holds an advisory lock (so that others can tell that
it lives, and that calls whose outcome it owes aren't lost yet) and listens for cancellations from other processes and
for moves of rollouts.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg

from megamcp import outages, peers
from megamcp import store as sql
from megamcp.access.principal import CALLER, demand_sight, owner
from megamcp.databases import Databases, Door, Place
from megamcp.databases.journal import RECORD
from megamcp.dataplane.ports import (
    EnvironmentView,
    Intent,
    Recorded,
    RolloutView,
    SandboxTarget,
    StdioTarget,
)
from megamcp.demands import no_rollout
from megamcp.environments import Environments, LoadedEnvironment
from megamcp.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    Gone,
    MegaMCPError,
    NotFound,
    Unprocessable,
    UpstreamError,
)
from megamcp.handles import Mode, Signer, fingerprint
from megamcp.rollouts import Rollouts
from megamcp.sandboxed import Boxes
from megamcp.settings import Settings
from megamcp.store import Store
from megamcp.targets import Targets, stdio_target, variables

log = logging.getLogger(__name__)

PASSED_THROUGH_KEPT = 10_000  # views of rollouts, some 300 bytes each
_CANCELLED = (
    b'{"content":[{"type":"text","text":"The call was ended before it was done; nothing was changed."}],"isError":true}'
)


@dataclass(frozen=True, slots=True)
class _Intent(Intent):
    rollout: str = ""
    nonce: uuid.UUID | None = None


MOST_NOTIFIED = 7900
"""Bytes that a notification of PostgreSQL takes, with room for what wraps them."""


class Instance:
    """This process's mark in the database. Comes back by itself, under a new number, after an outage."""

    def __init__(self, dsn: str, address: str | None = None) -> None:
        self._dsn = dsn
        self._address = address
        self._connection: asyncpg.Connection | None = None
        self._held = asyncio.Event()
        self.owner = 0
        self.on_cancel: Callable[[str, str, str], object] | None = None
        self.on_move: Callable[[str, int | None], Awaitable[object]] | None = None
        self.on_held: Callable[[], object] | None = None
        self.on_session: Callable[[str, str, str], object] | None = None
        self.peer = secrets.token_hex(4)
        """This process's name among the others, for as long as it lives."""

    async def ready(self) -> None:
        """Returns once the mark is there."""
        await self._held.wait()

    async def hold(self) -> None:
        """Keep the mark until cancelled."""
        while True:
            try:
                lost = asyncio.Event()
                self._connection = await asyncpg.connect(
                    self._dsn, server_settings={"application_name": "megamcp instance"}
                )
                self._connection.add_termination_listener(lambda _, lost=lost: lost.set())
                owner = secrets.randbits(62) + 1
                await self._connection.execute("select pg_advisory_lock($1)", owner)
                self.owner = owner  # not before: what is owned by a number that nobody holds is taken for dead
                if self._address is not None:
                    await self._connection.execute(peers.APPEAR, self.peer, owner, self._address)
                heard = (
                    (sql.CANCELLATIONS, self._cancelled),
                    (sql.MOVES, self._moved),
                    (peers.SESSIONS, self._session_said),
                )
                for name, hear in heard:
                    await self._connection.add_listener(await self._connection.fetchval(sql.CHANNEL, name), hear)
                if self.on_held:
                    self.on_held()
                self._held.set()
                await lost.wait()
                log.warning("lost the instance connection; making a new one")
            except outages.DRIVER as error:
                log.warning("no instance connection: %s", error)
                await asyncio.sleep(0.2)
            finally:
                if self._connection and not self._connection.is_closed():
                    self._connection.terminate()

    def _cancelled(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        if self.on_cancel:
            with contextlib.suppress(ValueError, TypeError):
                self.on_cancel(*json.loads(payload))

    def _session_said(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        if self.on_session:
            with contextlib.suppress(ValueError, TypeError):
                peer, *said = json.loads(payload)
                if peer != self.peer:
                    self.on_session(*said)

    async def _moved(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        if self.on_move:
            with contextlib.suppress(ValueError, TypeError):
                await self.on_move(*json.loads(payload))


class Control:
    """See `dataplane.ports.ControlPort`; every method's contract is written there."""

    def __init__(
        self,
        *,
        store: Store,
        environments: Environments,
        rollouts: Rollouts,
        databases: Databases,
        boxes: Boxes,
        door: Door,
        signer: Signer,
        settings: Settings,
        targets: Targets,
        instance: Instance,
    ) -> None:
        self._store = store
        self._environments = environments
        self._rollouts = rollouts
        self._databases = databases
        self._boxes = boxes
        self._door = door
        self._signer = signer
        self._settings = settings
        self._targets = targets
        self._instance = instance
        self._views: dict[int, EnvironmentView] = {}
        self._passed_through: dict[str, RolloutView] = {}

    async def rollout(self, rollout_id: str) -> RolloutView:
        view = await self._live(rollout_id)
        demand_sight(rollout_id, view.tenant)
        return view

    async def _live(self, rollout_id: str) -> RolloutView:
        row = await self._store.row(sql.ROLLOUT_EPOCH, rollout_id)
        if row is None:
            raise no_rollout(rollout_id)
        if row["status"] != "open":
            demand_sight(rollout_id, row["tenant"])
            raise Gone(f"Rollout {rollout_id} is {row['status']}.", code=f"rollout_{row['status']}")
        return RolloutView(rollout_id, row["environment"], row["epoch"], row["tenant"])

    async def rollout_for_call(self, rollout_id: str) -> RolloutView:
        if known := self._passed_through.get(rollout_id):
            demand_sight(rollout_id, known.tenant)
            return known
        view = await self.rollout(rollout_id)
        environment = await self.environment(view.environment_id)
        if not any(server.exactly_once for server in environment.servers):
            # `call_intent` reads the rollout's row anyway, and it has the last word: asking first is a round trip more.
            if len(self._passed_through) >= PASSED_THROUGH_KEPT:
                del self._passed_through[next(iter(self._passed_through))]
            self._passed_through[rollout_id] = view
        return view

    async def environment(self, environment_id: int) -> EnvironmentView:
        if view := self._views.get(environment_id):
            return view
        loaded = await self._environments.by_id(environment_id)
        return self._views.setdefault(environment_id, self._view(loaded))

    async def environment_named(self, name: str) -> EnvironmentView:
        return await self.environment((await self._environments.find(name)).id)

    def _view(self, loaded: LoadedEnvironment) -> EnvironmentView:
        return EnvironmentView(
            id=loaded.id,
            name=loaded.name,
            version=loaded.hash,
            servers=tuple(self._targets.view(loaded, server) for server in loaded.servers),
        )

    async def open_for_session(self, environment: str, *, key: str | None) -> str:
        caller = CALLER.get()
        if caller is not None and caller.rollout is not None:
            raise Forbidden("This token is for one rollout, and opens no other.", code="forbidden")
        if key is None:
            rows = await self._rollouts.open(environment)
            return str(rows[0]["id"])
        loaded = await self._environments.find(environment)
        group = "key:" + hashlib.sha256((caller.id if caller else key).encode()).hexdigest()[:32]
        async with self._store.transaction() as connection:
            await connection.execute("select pg_advisory_xact_lock(hashtextextended($1, 7727))", f"{loaded.id} {group}")
            found = await connection.fetchval(sql.ROLLOUT_OF_KEY, group, loaded.id, owner()[0])
            if found:
                return str(found)
            rows = await self._rollouts.open_on(connection, loaded, group=group)
            return str(rows[0]["id"])

    async def session_ended(self, rollout_id: str) -> None:
        if CALLER.get() is not None:
            with contextlib.suppress(Gone, NotFound):
                await self.rollout(rollout_id)
                await self._rollouts.close(rollout_id)
            return
        await self._rollouts.close(rollout_id)

    def mint(
        self,
        rollout: RolloutView,
        server: str,
        *,
        tool: str,
        arguments: bytes,
        writable: bool,
        idempotency_key: str | None,
        deadline: float,
    ) -> str:
        return self._signer.mint(
            rollout=rollout.id,
            server=server,
            epoch=rollout.epoch,
            mode=Mode.WRITE if writable else Mode.READ,
            deadline=deadline,
            idempotency_key=idempotency_key,
            request=fingerprint(server, tool, arguments),
        )

    async def dedicated(self, rollout: RolloutView, server: str) -> StdioTarget | SandboxTarget:
        view = await self._live(rollout.id)  # the caller's may be of before a rollback
        loaded = await self._environments.by_id(view.environment_id)
        if (found := loaded.named(server)).process:
            name = await self._boxes.ready(view.id, found, loaded)
            return SandboxTarget(name, self._boxes, view.epoch, variables(found).secrets)
        login = await self._door.dsn(view.id, server)
        return stdio_target(loaded.server(server), loaded, login["dsn"], login["password"], view.epoch)

    async def database(self, rollout: RolloutView, server: str) -> str:
        return (await self._place(rollout, server)).dsn

    async def _place(self, rollout: RolloutView, server: str) -> Place:
        loaded = await self._environments.by_id(rollout.environment_id)
        return await self._databases.place(rollout.id, rollout.epoch, loaded.server(server), loaded)

    async def record_call(
        self,
        rollout: RolloutView,
        handle: str,
        *,
        tool: str,
        arguments: bytes,
        result: bytes,
        is_error: bool,
        began: float,
        done: bool = True,
    ) -> None:
        _, _, server, epoch, _, nonce, _, key, request, *_ = handle.split(".")
        recorded = await self._store.value(
            RECORD,
            rollout.id,
            server,
            tool,
            arguments.decode(),
            result.decode(),
            is_error,
            datetime.fromtimestamp(began, UTC),
            datetime.now(UTC),
            uuid.UUID(nonce),
            # The key of a call that failed is not kept: nothing was done, so a retry may do it.
            (bytes.fromhex(key).decode() or None) if done else None,
            bytes.fromhex(request),
            int(epoch),
            False,
        )
        if recorded is None:
            raise await self._moved_on(rollout.id)

    async def _moved_on(self, rollout: str) -> MegaMCPError:
        """Why a call's result is no longer the rollout's."""
        row = await self._store.row(sql.ROLLOUT_EPOCH, rollout)
        if row is None or row["status"] == "open":
            return Conflict("The rollout was rolled back while this call ran.", code="rolled_back")
        ended = "was released" if row["status"] == "closed" else "reached the end of its lease"
        return Gone(f"The rollout {ended} while this call ran.", code=f"rollout_{row['status']}")

    async def _end_inside(
        self, rollout: RolloutView, server: str, handle: str, tool: str, arguments: bytes, error: bytes | None
    ) -> Recorded | None:
        """`end_call` in the rollout's own database; what is recorded there goes to the journal too."""
        place = await self._place(rollout, server)
        nonce = uuid.UUID(handle.split(".")[5])
        told = (_CANCELLED if error is None else error).decode()
        for ended in (False, True):  # who drains the database ends this session too; what it did may be done again
            try:
                async with place.cluster.inside(place.name) as inside:
                    if error is not None:
                        await inside.tell([nonce], told)
                    await inside.end_call(nonce)
                    recorded, result, is_error = await inside.call_fail(
                        handle, tool, arguments.decode(), told, deed=place.deed
                    )
                break
            except outages.DRIVER as lost:
                if ended or not outages.lost(lost):
                    raise
            except (Conflict, NotFound) as closed:
                if closed.code not in ("database_sealed", "database_not_found"):
                    raise
                raise await self._moved_on(rollout.id) from closed
        with contextlib.suppress(Conflict, Gone):  # the rollout has moved on; what is said to the agent stays the same
            await self.record_call(
                rollout,
                handle,
                tool=tool,
                arguments=arguments,
                result=result.encode(),
                is_error=is_error,
                began=time.time(),
                done=recorded,
            )
        return Recorded(result.encode(), is_error) if recorded and result != told else None

    async def end_call(
        self, rollout: RolloutView, handle: str, *, tool: str, arguments: bytes, error: bytes | None
    ) -> Recorded | None:
        nonce = uuid.UUID(handle.split(".")[5])
        loaded = await self._environments.by_id(rollout.environment_id)
        server = handle.split(".")[2]
        if loaded.named(server).database:
            return await self._end_inside(rollout, server, handle, tool, arguments, error)
        if error is not None:
            # Told first: the tool server, whose connection is about to break, may be the one that records it.
            await self._store.value(sql.TELL_ENDED, [nonce], error.decode())
        # The backend ends before the lock is asked for: what it had not committed is gone by then.
        await self._store.value(sql.END_CALL, nonce)
        told = (_CANCELLED if error is None else error).decode()
        row = await self._store.row(sql.CALL_FAIL, handle, tool, arguments.decode(), told)
        if row is None or not row["recorded"] or row["result"] in (None, told):
            return None
        return Recorded(row["result"].encode(), row["is_error"])

    async def call_intent(
        self, rollout: RolloutView, server: str, *, tool: str, arguments: bytes, idempotency_key: str | None
    ) -> Intent:
        nonce = uuid.uuid4()
        give_up = time.monotonic() + self._settings.call_timeout_s
        request = fingerprint(server, tool, arguments)
        look_for_dead = 0.0
        while True:
            left = give_up - time.monotonic()
            try:
                row = await self._store.row(
                    sql.CALL_INTENT,
                    rollout.id,
                    server,
                    tool,
                    arguments.decode(),
                    nonce,
                    idempotency_key,
                    request,
                    self._instance.owner,
                )
            except (Gone, NotFound):
                self._passed_through.pop(rollout.id, None)
                raise
            assert row is not None
            match row["found_state"]:
                case None:
                    return _Intent(row["seq"], None, rollout.id, nonce)
                case "done" | "failed" if row["result"] is not None:
                    return _Intent(row["seq"], Recorded(row["result"].encode(), row["is_error"]), rollout.id)
                case "done" | "failed":
                    raise Unprocessable("The call was done, but its result is no longer kept.", code="result_expired")
                case "running":
                    if (now := time.monotonic()) > look_for_dead:
                        look_for_dead = now + 1
                        await self._store.value(sql.LOSE_INTENTS)
                    if left <= 0:
                        raise DeadlineExceeded(
                            "The first call with this idempotency key is still running.",
                            code="deadline_exceeded",
                        )
                    await asyncio.sleep(0.05)
                case _:
                    raise Conflict(
                        "The first call with this idempotency key was cut off: whether it took effect is unknown, so it"
                        " is not run again.",
                        code="outcome_unknown",
                        hint="Look at the tool's state, then call again with a new key.",
                    )

    async def call_outcome(
        self, intent: Intent, result: bytes, is_error: bool, *, answered: bool, sandbox: str | None = None
    ) -> int:
        assert isinstance(intent, _Intent)
        outcome = intent.rollout, intent.id, intent.nonce, result.decode(), is_error, answered
        if sandbox is None:
            current = await self._store.value(sql.CALL_OUTCOME, *outcome)
        else:
            current = await self._store.value(sql.CALL_OUTCOME_IN, *outcome, sandbox)
        if current is None:
            raise UpstreamError(
                "The sandbox of the tool server ended right after its answer, and what the call did with it.",
                code="tool_server_lost",
            )
        if not current:
            raise await self._moved_on(intent.rollout)
        return intent.id

    async def call_refused(self, intent: Intent, error: bytes) -> None:
        assert isinstance(intent, _Intent)
        await self._store.value(sql.CALL_REFUSED, intent.rollout, intent.id, intent.nonce, error.decode())

    @property
    def peer(self) -> str:
        return self._instance.peer

    async def peer_address(self, peer: str) -> str | None:
        address = await self._store.value(peers.PEER, peer)
        return str(address) if address is not None else None

    async def session_said(self, session: str, method: str, value: str) -> None:
        payload = json.dumps([self.peer, session, method, value])
        if len(payload) < MOST_NOTIFIED:
            await self._store.value(peers.TELL_SESSION, payload)

    async def cancel_elsewhere(self, rollout_id: str, session: str, request_id: str) -> None:
        await self._store.value(sql.TELL_CANCELLED, json.dumps([rollout_id, session, request_id]))

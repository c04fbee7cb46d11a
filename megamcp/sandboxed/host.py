"""This host's keeper of sandboxes: the one that the settings name, or one of our own, started when it is first needed.

Also the answers to what `auto` means here. What a keeper does is `sandboxes`' business.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path

from megamcp.definitions import Runtime
from megamcp.errors import MegaMCPError, NoCapacity, Unavailable, Unprocessable, UpstreamError
from megamcp.sandboxed.own import OwnKeeper
from megamcp.settings import Settings
from sandboxes.client import Client
from sandboxes.types import Exited, Kind, Report, SandboxError

log = logging.getLogger(__name__)

_COMING_BACK_S = 5.0
_TRY_EACH_S = 0.05


class Host:
    """The keeper, connected to when it is first needed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._own = contextlib.AsyncExitStack()
        self._client: Client | None = None
        self._name = ""
        self._reports: dict[Kind, Report] = {}
        self._opening = asyncio.Lock()
        self._missed_since: float | None = None
        self.on_exit: Callable[[Exited], Awaitable[object]] | None = None
        self.on_wanted: Callable[[str], Awaitable[object]] | None = None
        self.on_meeting: Callable[[Client, str], Awaitable[object]] | None = None
        """Told when the keeper was met: it may have fewer sandboxes than it had."""

    @property
    def opened(self) -> bool:
        """Whether anything has needed it yet."""
        return self._client is not None

    def keeps_memory(self, kind: Kind) -> bool:
        """Whether what a runtime freezes is more than files."""
        report = self._reports.get(kind)
        return report is not None and "memory" in report.features

    async def keeper(self) -> tuple[Client, str]:
        """Its client and its name. Raises `Unavailable`."""
        async with self._opening:
            if self._client is None:
                path = self._settings.sandbox_socket
                if path is None:
                    path = Path((await self._own.enter_async_context(OwnKeeper(self._settings))).socket)
                client = Client(str(path))
                client.on_exit, client.on_wanted, client.on_lost = self._exited, self._wanted, self._lost
                self._client = client
            if not self._name:
                with translated():
                    name = await self._greeted(self._client)
                    self._reports = {report.kind: report for report in await self._client.reports()}
                    if self.on_meeting is not None:
                        await self.on_meeting(self._client, name)
                self._name = name
            return self._client, self._name

    async def _greeted(self, client: Client) -> str:
        """The keeper's name. One that is started anew takes a moment; who comes after that isn't kept waiting."""
        if self._missed_since is None:
            self._missed_since = time.monotonic()
        while True:
            try:
                name = await client.hello()
            except SandboxError as error:
                if error.code != "keeper_lost" or time.monotonic() > self._missed_since + _COMING_BACK_S:
                    raise
            else:
                self._missed_since = None
                return name
            await asyncio.sleep(_TRY_EACH_S)

    async def kind(
        self, wanted: Runtime, *, entry: bool, image: str | None = None, unfit: Collection[Kind] = ()
    ) -> Kind:
        """Which runtime a server gets; `unfit` are those that it was tried with. Raises `Unprocessable` (`no_runtime`)
        with the reasons."""
        keeper, _ = await self.keeper()
        match wanted:
            case Runtime.AUTO if entry:
                able = [Kind.FORK, Kind.CRIU]
            case Runtime.AUTO if image is not None and not image.startswith("/"):
                able = [Kind.DOCKER]
            case Runtime.AUTO:
                able = [Kind.CRIU]
            case _:
                able = [Kind(wanted.value)]
        able = [kind for kind in able if kind not in unfit]
        if not any(self._works(kind) for kind in able):
            with translated():  # an engine may have been started meanwhile
                self._reports = {report.kind: report for report in await keeper.reports()}
        for kind in able:
            if self._works(kind):
                return kind
        reasons = "; ".join(
            f"{kind}: {self._reports[kind].reason if kind in self._reports else 'not in this version'}" for kind in able
        )
        imageless = wanted is Runtime.AUTO and not entry and image is None
        more = " With a Docker engine, name an `image` in the server's state." if imageless else ""
        raise Unprocessable(
            f"No runtime for this server's sandboxes works on this host: {reasons}.",
            code="no_runtime",
            hint=f"`megamcp doctor` says what works here and what is missing.{more}",
        )

    def _works(self, kind: Kind) -> bool:
        report = self._reports.get(kind)
        return report is not None and report.works

    async def _exited(self, exited: Exited) -> None:
        if self.on_exit is not None:
            await self.on_exit(exited)

    async def _wanted(self, sandbox: str) -> None:
        if self.on_wanted is not None:
            await self.on_wanted(sandbox)

    async def _lost(self) -> None:
        log.warning("lost the keeper of sandboxes; it is met again when it is needed")
        self._name = ""

    async def aclose(self) -> None:
        """Lets go of it; see `OwnKeeper` where it is ours."""
        if self._client is not None:
            await self._client.aclose()
        await self._own.aclose()


@contextlib.contextmanager
def translated(server: str | None = None) -> Iterator[None]:
    """A `SandboxError` becomes an error of this project. `server` names whose it is."""
    try:
        yield
    except SandboxError as error:
        raise as_ours(error, server) from error


def as_ours(error: SandboxError, server: str | None) -> MegaMCPError:
    """The error that an agent or a program is told."""
    where = f"Tool server {server!r}: " if server else ""
    message = f"{where}{error.message}" + (f"\n{error.tail}" if error.tail else "")
    hint = error.hint or None
    match error.code:
        case "start_failed":
            return UpstreamError(message, code="tool_server_start_failed", hint=hint)
        case "disk_full":
            return NoCapacity(message, code="disk_full", hint=hint)
        case "not_available" | "invalid_spec":
            return Unprocessable(message, code="sandbox_unsupported", hint=hint)
        case "not_forkable":
            return Unprocessable(
                message,
                code="not_forkable",
                hint=hint or "Close what is open between calls, or give the server another runtime (criu).",
            )
        case "busy":
            return NoCapacity(message, code="sandbox_busy", hint=hint)
        case "keeper_lost" | "engine_lost":
            return Unavailable(message, code="sandboxes_unavailable", hint=hint)
        case _:
            return UpstreamError(message, code="sandbox_failed", hint=hint)

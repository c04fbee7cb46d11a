"""Another program as a tool server whose state is a document: any MCP server over stdio with two tools for it.

One tool takes a document and makes it the server's state (`load`), one gives the state as a document (`dump`); agents
see neither. Each object of the pool is a process of the program, which holds one rollout's document at a time: the
process that holds the newest version goes on with it, else one is started and told to load. Everything else is as it is
for a plain class (`documents`): what a call changed is found by asking for the document, and committed with the call.

A process that dies, breaks the protocol or is left in the middle of a call is killed; its document is not lost with it.
Requests of the program to its client (roots, sampling) are refused.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter

from megamcp.errors import MegaMCPError
from megamcp.sdk.inject import Clock, Context, Random
from megamcp.sdk.results import Outcome, from_exception
from megamcp.sdk.server import Server, Tool
from megamcp.sdk.signature import Signature

log = logging.getLogger(__name__)

VERSION = "2025-11-25"
LINE = 64 << 20
"""Longest message."""
_START_S = 30.0
_TAIL = 10
_ANY: TypeAdapter[Any] = TypeAdapter(Any)
_decode = msgspec.json.Decoder().decode


_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Between fork and exec. Linux only; elsewhere the end of standard input must do."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ProgramFailed(MegaMCPError):
    """The program ended, or does not speak MCP as it should."""

    status = 502
    default_code = "document_failed"


class Program:
    """One process, after its handshake."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ids = 0
        self._over: str | None = None
        """Why it can't be asked any more."""
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._said: deque[str] = deque(maxlen=_TAIL)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]

    @classmethod
    async def start(cls, command: Sequence[str]) -> "Program":
        """Raises ProgramFailed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise ProgramFailed(f"Can't start {command[0]}: {error.strerror or error}.") from error
        program = cls(process)
        try:
            async with asyncio.timeout(_START_S):
                about = {"name": "megamcp", "version": "1"}
                hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about}
                await program.ask("initialize", hello)
                program._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        except BaseException as error:
            program.kill()
            if isinstance(error, TimeoutError):
                raise program.failed(f"{command[0]} did not answer within {_START_S:g} s") from error
            raise
        return program

    @property
    def alive(self) -> bool:
        """Whether it still listens, as far as is known."""
        return self._process.returncode is None and self._over is None

    async def tools(self) -> list[dict[str, Any]]:
        """Every tool, as the program describes it."""
        found: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        while True:
            page = await self.ask("tools/list", cursor)
            found += page.get("tools", [])
            if not page.get("nextCursor"):
                return found
            cursor = {"cursor": page["nextCursor"]}

    async def call(self, tool: str, arguments: Any) -> dict[str, Any]:
        """A `CallToolResult`. Raises ProgramFailed."""
        return await self.ask("tools/call", {"name": tool, "arguments": arguments})

    async def ask(self, method: str, params: Any) -> dict[str, Any]:
        """Raises ProgramFailed: the process ended, or answered with an error."""
        self._ids += 1
        number, answer = self._ids, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            found = await answer
        finally:
            del self._waiting[number]
        if "error" in found:
            raise self.failed(f"{method} was answered with an error: {found['error']}")
        result = found.get("result")
        if not isinstance(result, dict):
            raise self.failed(f"{method} has no result")
        return result

    def kill(self) -> None:
        """Its whole process group, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for task in self._tasks:
            task.cancel()
        # The transport closes the pipes and reaps; asyncio's process has no public way to say so.
        self._process._transport.close()  # type: ignore[attr-defined]

    def failed(self, what: str) -> ProgramFailed:
        """The error, with the program's last words."""
        said = "\n".join(self._said)
        return ProgramFailed(f"The document's program: {what}.", hint=f"It said: {said}" if said else None)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self.alive or self._process.stdin.is_closing():
            raise self.failed(self._over or "it has ended")
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        why = "it has ended"
        try:
            while line := await self._process.stdout.readline():
                self._heard(_decode(line))
        except (ValueError, TypeError, AttributeError) as error:
            why = f"it wrote what is no message: {error}"
        self._over = why
        await asyncio.wait({self._tasks[1]}, timeout=0.2)  # its last words
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.failed(why))

    def _heard(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            answer = self._waiting.get(message.get("id", 0))
            if answer and not answer.done():
                answer.set_result(message)
        elif message.get("id") is not None:
            error = {"code": -32601, "message": "Not served here"}
            kind = {"result": {}} if message["method"] == "ping" else {"error": error}
            self._send({"jsonrpc": "2.0", "id": message["id"], **kind})

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):  # a line over the limit: nobody reads on
            while line := await self._process.stderr.readline():
                text = line[:2000].decode(errors="replace").rstrip()
                self._said.append(text)
                log.info("%s", text)


@dataclass(frozen=True, slots=True)
class Programs:
    """The `Keeper` of a program's processes."""

    command: tuple[str, ...]
    load: str
    dump: str
    argument: str
    """Of `load`: the one that takes the document."""
    as_text: bool
    """Whether it takes it as text."""

    tuples = False

    async def fresh(self) -> Any:
        return await Program.start(self.command)

    async def loaded(self, document: Any) -> Any:
        program = await self.fresh()
        try:
            given = msgspec.json.encode(document).decode() if self.as_text else document
            result = await program.call(self.load, {self.argument: given})
            if result.get("isError"):
                raise program.failed(f"{self.load} failed: {_text(result)}")
        except BaseException:
            program.kill()
            raise
        return program

    async def dumped(self, instance: Any) -> Any:
        result = await instance.call(self.dump, {})
        if result.get("isError"):
            raise instance.failed(f"{self.dump} failed: {_text(result)}")
        if "structuredContent" in result:
            found = result["structuredContent"]
            return found["result"] if isinstance(found, dict) and found.keys() == {"result"} else found
        try:
            return _decode(_text(result).encode())
        except ValueError as error:
            raise instance.failed(f"{self.dump} gave what is no JSON: {error}") from error

    def usable(self, instance: Any) -> bool:
        return bool(instance.alive)

    def drop(self, instance: Any) -> None:
        instance.kill()


@dataclass(frozen=True, slots=True)
class ProgramTool(Tool):
    """A tool of the program: its description, arguments and results pass as they are."""

    entry: dict[str, Any]

    def advertised(self) -> dict[str, Any]:
        return self.entry

    def parse(self, raw: bytes) -> dict[str, Any] | Outcome:
        return {"raw": msgspec.Raw(raw)}

    async def run(
        self,
        arguments: dict[str, Any],
        *,
        lease: Any,
        clock: Clock,
        random: Random,
        context: Context,
        instance: Any = None,
    ) -> Outcome:
        try:
            result = await instance.call(self.name, arguments["raw"])
        except ProgramFailed as error:
            return from_exception(error)[0]
        return Outcome(msgspec.json.encode(result), bool(result.get("isError")))


async def program_server(command: Sequence[str], load: str, dump: str) -> Server:
    """What the program serves, but for its two tools. Raises ProgramFailed."""
    program = await Program.start(command)
    try:
        found = {tool["name"]: tool for tool in await program.tools()}
        for name in (load, dump):
            if name not in found:
                raise program.failed(f"it has no tool {name!r}; it has {', '.join(found) or 'none'}")
        schema = found.pop(load).get("inputSchema", {})
        found.pop(dump, None)
        names = list(schema.get("required") or schema.get("properties") or ())
        if len(names) != 1:
            raise program.failed(f"{load} must take one argument, the document; it takes {', '.join(names) or 'none'}")
    finally:
        program.kill()
    server = Server(os.path.basename(command[0]))
    server.kept = Programs(
        tuple(command), load, dump, names[0], schema.get("properties", {}).get(names[0], {}).get("type") == "string"
    )
    server.adopt(_tool(entry) for entry in found.values())
    return server


def _tool(entry: dict[str, Any]) -> ProgramTool:
    signature = Signature(True, "", {}, {}, _ANY, {}, None, None, False)
    hints = entry.get("annotations") or {}
    read_only = bool(hints.get("readOnlyHint"))
    return ProgramTool(entry["name"], _nothing, signature, read_only, None, "", hints, entry)


def _nothing() -> None:
    """A tool of a program has no function here."""


def _text(result: dict[str, Any]) -> str:
    return "\n".join(str(block.get("text", "")) for block in result.get("content", []) if block.get("type") == "text")

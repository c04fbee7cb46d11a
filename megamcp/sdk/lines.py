"""A tool server behind lines, without an event loop: what a sandbox of the fork server runs.

One JSON-RPC message a line, answered one after another, each to its end in the calling thread; nothing is left alive
between two lines, so that the process can be forked there. Another thread may pass on that a client has left a call.
Tools work on what they keep in memory and in the working folder: a rollout's database is not for them (state of kinds
`schema` and `database` is).

`python -m megamcp.sdk.lines package.module:attribute` is the same over stdin and stdout, for sandboxes that are frozen
in another way.
"""

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from io import RawIOBase
from typing import IO

import msgspec

from megamcp.sdk import rpc
from megamcp.sdk.classes import Kept
from megamcp.sdk.inject import Clock, Context, Random
from megamcp.sdk.interrupts import STOPPED, Interrupts
from megamcp.sdk.process import EntryError, load_entry
from megamcp.sdk.results import Outcome
from megamcp.sdk.rpc import RpcError
from megamcp.sdk.server import Server

log = logging.getLogger(__name__)

Send = Callable[[bytes], None]

_CANCELLED = -32800


class _Left(msgspec.Struct):
    """Parameters of notifications/cancelled."""

    request: msgspec.Raw = msgspec.field(name="requestId")


class Lines:
    """`entry` is a tool server, or where to find one (`package.module:attribute`). Raises EntryError."""

    def __init__(self, entry: str | Server) -> None:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        self._server = entry if isinstance(entry, Server) else load_entry(entry)
        # Of a plain class, this process's one object is the state.
        self._instance = self._server.kept.cls() if isinstance(self._server.kept, Kept) else None
        self._static = rpc.StaticAnswers(self._server)
        self._interrupts = Interrupts()

    def handle(self, line: bytes, send: Send) -> None:
        """Answers one message, if it wants an answer."""
        number = b"null"
        try:
            request = rpc.parse(line)
            if request.id is None:
                return
            number = request.id
            rpc.check_line(request)
            if request.method != "tools/call":
                result = self._static.answer(request)
            else:
                result = self._call(request, send).result
            send(b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (number, result))
        except RpcError as error:
            send(error.body(number))
        except STOPPED:
            send(RpcError(_CANCELLED, "The call was cancelled.", {"code": "cancelled"}).body(number))
        except BaseException:  # a tool that would end the process by an exception ends its call
            log.exception("a request failed")
            code = {"code": "internal"}
            send(RpcError(rpc.INTERNAL_ERROR, "Internal error of the tool server.", code).body(number))

    def interrupt(self, line: bytes) -> bool:
        """In another thread: whether a line says that a client has left its call. Then that is stopped."""
        try:
            request = rpc.parse(line)
            if request.method != "notifications/cancelled":
                return False
            call = msgspec.json.decode(request.params, type=_Left).request
        except (RpcError, msgspec.MsgspecError):
            return False
        self._interrupts.stop(bytes(call))
        return True

    def _call(self, request: rpc.Request, send: Send) -> Outcome:
        call = request.tool_call()
        tool = self._server.tools.get(call.name)
        if tool is None:
            raise RpcError(rpc.INVALID_PARAMS, f"Unknown tool: {call.name}", {"code": "unknown_tool"})
        if tool.needs_state:
            message = f"Tool {tool.name} works on a database, and this server keeps its state in a process."
            raise RpcError(rpc.INVALID_PARAMS, message, {"code": "no_state"})
        parsed = tool.parse(call.arguments)
        if isinstance(parsed, Outcome):
            return parsed

        async def report(progress: float, total: float | None, message: str | None) -> None:
            params = {"progressToken": msgspec.Raw(call.progress_token), "progress": progress}
            more = {"total": total, "message": message}
            params |= {name: value for name, value in more.items() if value is not None}
            send(msgspec.json.encode({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}))

        context = Context(tool.name, report if call.progress_token else None)
        assert request.id is not None
        with self._interrupts.running(request.id) as started:
            return tool.run_here(
                parsed, clock=Clock(), random=Random(), context=context, started=started, instance=self._instance
            )


def main() -> int:
    """The exit status."""
    # What tools print by themselves is no answer.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        lines = Lines(sys.argv[1])
    except (EntryError, IndexError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    asked = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:  # nor is what is asked a tool's to read, or a program's that it starts
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_read, args=(asked, lines, waiting.put), name="reader", daemon=True).start()
    while line := waiting.get():
        lines.handle(line, lambda answer: _write(answers, answer))
    return 0


def _read(asked: IO[bytes], lines: Lines, put: Callable[[bytes], None]) -> None:
    """All that is asked, while tools run too. Nothing (b"") at its end."""
    while line := asked.readline():
        if line.strip() and not lines.interrupt(line):
            put(line)
    put(b"")


def _write(file: RawIOBase, line: bytes) -> None:
    left = memoryview(line.replace(b"\n", b" ") + b"\n")
    while left:
        left = left[file.write(left) or 0 :]


if __name__ == "__main__":
    sys.exit(main())

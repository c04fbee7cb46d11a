"""What every command shares: output to people or to programs, errors, and the connection to the gateway.

Stdout holds the answer and nothing else; with `--json` it is one JSON document (JSON lines where a command streams).
Progress and errors go to stderr. Exit status: 0 done, 1 failed, 2 used wrongly, 3 the tool answered with an error.
"""

import asyncio
import inspect
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer
from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text

from megamcp.errors import MegaMCPError

if TYPE_CHECKING:
    from megamcp.client import Client

P = ParamSpec("P")

FAILED, TOOL_ERROR, INTERRUPTED = 1, 3, 130
NOTICEABLE_S = 0.6
DEFAULT_URL = "http://127.0.0.1:8600"
"""The client's; written again here, since importing the client takes a third of a second."""

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for programs.", show_default=False)]
Url = Annotated[str, typer.Option("--url", envvar="MEGAMCP_URL", help="The gateway.", metavar="URL", show_default=True)]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="MEGAMCP_API_KEY", help="The gateway's API key, if it has one.", metavar="KEY"),
]


class Output:
    """Where a command's answer goes."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False)
        self.errors = Console(stderr=True, highlight=False)
        self._spinner: Status | None = None
        self._timer: asyncio.TimerHandle | None = None

    def answer(self, document: Any, shown: RenderableType | Callable[[], RenderableType]) -> None:
        """The document for programs, or what people read instead."""
        if self.as_json:
            self.json(document)
        else:
            self.print(shown() if callable(shown) else shown)

    def print(self, shown: RenderableType, **how: Any) -> None:
        """For people. Plain text is left to the terminal to break, tables are made to fit."""
        self.quiet()
        self.console.print(shown, soft_wrap=isinstance(shown, Text), **how)

    def json(self, document: Any, *, indent: int | None = 2) -> None:
        """A document (models are fine anywhere in it) on stdout."""
        self.quiet()
        sys.stdout.write(json.dumps(document, indent=indent, ensure_ascii=False, default=_plain) + "\n")
        sys.stdout.flush()

    def busy(self, text: str) -> None:
        """A spinner on stderr, where that is a terminal, once this has taken noticeably long."""
        if self.errors.is_terminal:
            self._spinner = self.errors.status(Text(text))
            self._timer = asyncio.get_running_loop().call_later(NOTICEABLE_S, self._spinner.start)

    def quiet(self) -> None:
        """No spinner any more."""
        if self._timer:
            self._timer.cancel()
        if self._spinner:
            self._spinner.stop()

    def fail(self, error: MegaMCPError) -> None:
        """One line that says what was wrong, one that says what to do; a problem document for programs."""
        self.quiet()
        if self.as_json:
            self.errors.file.write(json.dumps(error.problem(), ensure_ascii=False, default=str) + "\n")
            return

        def say(line: Text) -> None:
            self.errors.print(line, soft_wrap=True)

        code = ", SQLSTATE ".join(filter(None, (error.code, error.extra.get("sqlstate"))))
        say(Text.assemble(("error: ", "bold red"), (one_line(error.message), "red"), (f"  [{code}]", "dim")))
        for problem in error.extra.get("problems") or ():
            parts = [
                str(problem[key])
                for key in ("construct", "object", "where", "problem", "reason", "hint")
                if problem.get(key)
            ]
            say(Text(f"  • {one_line(' — '.join(parts))}", style="red"))
        if error.hint:
            say(Text.assemble(("hint: ", "bold"), as_commands(error.hint)))


COMMANDS = {
    "POST /v1/environments": "megamcp env load FOLDER",
    "GET /v1/environments/{name}": "megamcp env show NAME",
    "GET /v1/environments": "megamcp env list",
    "GET /v1/keys": "megamcp key list",
    "POST /v1/rollouts/{id}/rollback": "megamcp rollout rollback ROLLOUT CHECKPOINT",
    "POST /v1/rollouts": "megamcp rollout open ENVIRONMENT",
    "DELETE /v1/rollouts/{id}": "megamcp rollout close ROLLOUT",
    "GET /v1/rollouts/{id}/checkpoints": "megamcp rollout checkpoints ROLLOUT",
    "POST /v1/checkpoints/{id}/fork": "megamcp rollout fork CHECKPOINT",
    "DELETE /v1/checkpoints/{id}/pin/{owner}": "megamcp checkpoint unpin CHECKPOINT --owner OWNER",
}
"""What the hints of the gateway name, and what does it here."""
REQUEST = re.compile(r"(?:GET|POST|DELETE) /v1/[\w{}/]+")


def as_commands(hint: str) -> str:
    """A hint of the gateway's, for somebody at a terminal."""
    return REQUEST.sub(lambda found: f"`{COMMANDS[found[0]]}`" if found[0] in COMMANDS else found[0], hint)


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True)
    raise TypeError(f"{type(value).__name__} has no JSON form")


@contextmanager
def failing_clearly(out: Output) -> Iterator[None]:
    """Turns what may go wrong into a line on stderr and an exit status; never a traceback for a known error."""
    try:
        yield
    except MegaMCPError as error:
        out.fail(error)
        raise typer.Exit(FAILED) from None
    except BaseExceptionGroup as group:
        known, rest = group.split(MegaMCPError)
        if known is None or rest is not None:
            raise
        out.fail(_first(known))
        raise typer.Exit(FAILED) from None
    except BrokenPipeError:
        # The reader went away (`| head`): nothing to tell, and nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _first(group: BaseExceptionGroup[MegaMCPError]) -> MegaMCPError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def talks_to_gateway(
    command: Callable[Concatenate["Client", Output, P], Awaitable[None]],
) -> Callable[..., None]:
    """Make a command of a coroutine `(client, out, …)`: adds --url, --api-key and --json to its own options."""

    def run(*, url: str, api_key: str | None, as_json: bool, **options: Any) -> None:
        out = Output(as_json)
        with failing_clearly(out):
            asyncio.run(_connected(url, api_key, out, lambda client: command(client, out, **options)))  # type: ignore[call-arg]

    shared = {"url": (Url, DEFAULT_URL), "api_key": (ApiKey, None), "as_json": (Json, False)}
    own = list(inspect.signature(command).parameters.values())[2:]
    parameters = [
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in shared.items()
        ),
    ]
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


async def _connected(
    url: str, api_key: str | None, out: Output, command: Callable[["Client"], Awaitable[None]]
) -> None:
    from megamcp.client import Client, Retry

    # A person at a keyboard would rather hear at once that nothing listens there.
    async with Client(url, api_key=api_key, retry=Retry(attempts=3)) as client:
        out.busy("Waiting for the gateway …")
        try:
            await command(client)
        finally:
            out.quiet()

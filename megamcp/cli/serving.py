"""`megamcp serve`, `megamcp tool-server` and `megamcp demo`: what runs until it is stopped, or by itself to an end."""

import gc
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from megamcp.cli.output import Json, Output, failing_clearly
from megamcp.errors import Unprocessable

if TYPE_CHECKING:
    from megamcp.settings import Settings

_LEVELS = ("debug", "info", "warning", "error")
_OPTIONS = {"environments": "environment", "bundled_environments": "bundled"}
"""Of settings whose option is called otherwise."""


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one. [default: 8600]")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=64, help="Gateway processes. [default: 1]")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the embedded PostgreSQL. [default: ~/.megamcp]")
    ] = None,
    database_url: Annotated[
        str | None, typer.Option(help="A PostgreSQL 18 of your own, instead of the embedded one.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(help="Base of the rollout URLs. [default: as each request came]")
    ] = None,
    environment: Annotated[
        list[Path] | None, typer.Option(help="Environment folder to load at start; may be repeated.")
    ] = None,
    bundled: Annotated[
        bool | None, typer.Option("--bundled/--no-bundled", help="Load the environments of the package.")
    ] = None,
    reload: Annotated[
        bool | None, typer.Option("--reload", help="Load environments again when a file in their folders changes.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that /v1 asks for. Better given as MEGAMCP_API_KEY.")] = None,
    log_level: Annotated[
        str | None, typer.Option(help=f"{', '.join(_LEVELS)}. [default: info]", metavar="LEVEL")
    ] = None,
) -> None:
    """Run the gateway until it is told to stop.

    Every setting is also a variable, such as MEGAMCP_PORT; some are only that (see docs/settings.md).
    """
    out = Output(as_json=False)
    with failing_clearly(out):
        settings = settings_of(
            host=host,
            port=port,
            workers=workers,
            data_dir=data_dir,
            database_url=database_url,
            public_url=public_url,
            environments=environment,
            bundled_environments=bundled,
            reload=reload,
            api_key=api_key,
            log_level=log_level,
        )
        gc.disable()  # a thousand modules make no garbage; looking for it takes a fifth of the start
        from megamcp.serve import serve as run

        gc.enable()
        with _StartSpinner(out):
            run(settings)


def settings_of(**given: Any) -> "Settings":
    """The environment's settings, with those of the command line over them. Raises `BadParameter`."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from megamcp.settings import Settings

    level = given["log_level"]
    if level is not None and level.lower() not in _LEVELS:
        raise typer.BadParameter(f"{level!r} is none of {', '.join(_LEVELS)}", param_hint="--log-level")
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except SettingsError as error:  # told of before any other, and with no more than the setting's name
        name = error.args[0].split('"')[1]
        raise Unprocessable(
            f"The setting {name} is wrong: its variable is no JSON.",
            code="invalid_setting",
            hint=f'It comes from the variable MEGAMCP_{name.upper()}. Lists are JSON: \'["…", "…"]\'.',
        ) from error
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        where = ".".join(str(part) for part in problem["loc"])
        option = f"--{_OPTIONS.get(name, name.replace('_', '-'))}"
        raise Unprocessable(
            f"The setting {where} is wrong: {problem['msg']}",
            code="invalid_setting",
            hint=f"It comes from {f'the variable MEGAMCP_{name.upper()}' if given.get(name) is None else option}.",
        ) from error


class _StartSpinner(logging.Handler):
    """A spinner from the start until the gateway logs that it is ready; log lines appear above it."""

    def __init__(self, out: Output) -> None:
        super().__init__()
        self._status = out.errors.status(Text("Starting the gateway …")) if out.errors.is_terminal else None

    def __enter__(self) -> None:
        if self._status:
            self._status.start()
            logging.getLogger("megamcp").addHandler(self)

    def __exit__(self, *_: object) -> None:
        if self._status:
            self._status.stop()
            logging.getLogger("megamcp").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        from megamcp.serve import READY

        if self._status and record.getMessage().startswith(READY):
            self._status.stop()


def tool_server(
    entry: Annotated[str, typer.Argument(help="package.module:attribute of a megamcp.sdk.Server or of a plain class.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8700,
    socket: Annotated[
        str | None, typer.Option(help="Path of a unix socket to listen on instead.", metavar="PATH")
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(
            help="Serve the state of this loaded environment; its database is MEGAMCP_DATABASE_URL.",
            metavar="NAME[:SERVER]",
        ),
    ] = None,
) -> None:
    """Run one tool server alone, over HTTP at /mcp.

    Without state it serves any MCP client; a plain class keeps one object for all of them. With --environment (or a DSN
    in MEGAMCP_TOOL_DSN) it serves the gateway, for environments that name its url.
    """
    out = Output(as_json=False)
    with failing_clearly(out):
        from megamcp.sdk.process import EntryError, serve_tool_server

        sys.path.insert(0, "")  # as `python -m` has it: the module may lie in the current folder
        dsn = _tool_dsn(environment) if environment else None

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        try:
            serve_tool_server(entry, host=host, port=port, socket=socket, dsn=dsn)
        except EntryError as error:
            raise Unprocessable(
                str(error), code="invalid_entry", hint="It looks like tool_servers.retail.server:server."
            ) from error
        except OSError as error:
            where = socket or f"{host}:{port}"
            raise Unprocessable(f"Can't listen on {where}: {error.strerror or error}", code="cannot_listen") from error


def _tool_dsn(environment: str) -> str:
    import asyncio

    from megamcp.settings import Settings
    from megamcp.targets import tool_dsn

    control = Settings().database_url
    if control is None:
        raise Unprocessable(
            "--environment needs the gateway's database.", code="no_database", hint="Set MEGAMCP_DATABASE_URL."
        )
    name, _, server = environment.partition(":")
    return asyncio.run(tool_dsn(control.get_secret_value(), name, server or None))


def demo(
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Data folder to use and keep. [default: a temporary one, removed at the end]"),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A gateway that runs already, instead of one of the demo's own.")
    ] = None,
    as_json: Json = False,
) -> None:
    """See what it does, in half a minute.

    One rollout, a checkpoint, four forks that go different ways, their diffs, a rollback, and the proof of it.
    """
    out = Output(as_json)
    with failing_clearly(out):
        from megamcp.demo import run

        run(out, data_dir=data_dir, url=url)

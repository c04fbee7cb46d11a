"""A progress bar on stderr for what tells (what, done, total); remarks go above it, or alone on what is no terminal."""

from types import TracebackType
from typing import Self

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megamcp.cli.output import NOTICEABLE_S, Output


class Bar:
    """Shows itself when there is something to show."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._shown = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=out.errors,
            transient=True,
            disable=not out.errors.is_terminal or out.as_json,
            refresh_per_second=1 / NOTICEABLE_S * 4,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """What is being done, how much of it, of how much; 0 of 0 is a remark."""
        if total == 0:
            if not self._out.as_json:
                self._out.errors.print(escape(what), soft_wrap=True)
            return
        if self._task is None:
            self._out.quiet()
            self._shown.start()
            self._task = self._shown.add_task("")
        self._shown.update(self._task, description=escape(what), completed=done, total=total)

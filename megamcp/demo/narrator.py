"""Tells the demo, and keeps account of what it claimed. Says nothing with `--json` but one document at the end."""

import time

from rich.console import RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.status import Status
from rich.text import Text

from megamcp.cli.output import Output
from megamcp.errors import MegaMCPError

Part = str | tuple[str, str] | Text
INDENT = (0, 0, 0, 3)


class Narrator:
    """One voice: every line of the demo goes through here."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._started = time.monotonic()
        self._steps = 0
        self._claims: list[str] = []
        self._spinner: Status | None = None

    def step(self, title: str) -> None:
        """A new chapter."""
        self._steps += 1
        self._print(Text())
        self._print(Text.assemble((f" {self._steps} ", "bold reverse"), (f" {title}", "bold")))

    def say(self, *parts: Part) -> None:
        """A line; cut at the terminal's width."""
        line = Text.assemble(*parts)
        line.no_wrap, line.overflow = True, "ellipsis"
        self.show(line)

    def show(self, shown: RenderableType) -> None:
        """Anything that can be drawn."""
        self._print(Padding(shown, INDENT, expand=False))

    def claim(self, text: str, holds: bool, found: str = "") -> None:
        """Something that must be true. Raises `MegaMCPError` when it isn't."""
        if not holds:
            raise not_as_claimed(f"not as claimed: {text}. {found}".strip())
        self._claims.append(text)
        self.say(("✓ ", "bold green"), (text, "green"))

    def waiting(self, text: str) -> None:
        """Something takes a while: a spinner, where there is a terminal."""
        if self._out.errors.is_terminal:
            if self._spinner is None:
                self._spinner = self._out.errors.status(Text(text))
                self._spinner.start()
            self._spinner.update(Text(text))

    def quiet(self) -> None:
        """No spinner any more."""
        if self._spinner:
            self._spinner.stop()
            self._spinner = None

    def end(self, last_word: str) -> None:
        """All claims held."""
        seconds = time.monotonic() - self._started
        self.quiet()
        if self._out.as_json:
            self._out.json({"ok": True, "claims": self._claims, "seconds": round(seconds, 2)})
            return
        self._print(Rule(style="green"))
        count = len(self._claims)
        self._print(Text.assemble(("✓ ", "bold green"), f"All {count} claims held, in {seconds:.1f} s. {last_word}"))
        self._print(
            Text.assemble("Next: ", ("megamcp serve", "bold"), ", then ", ("megamcp rollout open retail", "bold"))
        )

    def _print(self, shown: RenderableType) -> None:
        self.quiet()
        if not self._out.as_json:
            self._out.console.print(shown)


def not_as_claimed(message: str) -> MegaMCPError:
    """What the demo showed is not what it promised."""
    return MegaMCPError(message, code="not_as_claimed", hint="This is a bug: please report it with this output.")

"""The server that the fork server tries itself out with: it says back what it is told."""

from collections.abc import Callable


class Trial:
    """A handler, see `driver.Handler`."""

    def __init__(self, argument: str) -> None:
        self.argument = argument

    def handle(self, line: bytes, send: Callable[[bytes], None]) -> None:
        send(line)

"""What a program prints while it is prepared: read at once, and only the end of it kept, however much it is."""

import asyncio
import contextlib
import os

_KEPT = 4000
_CHUNK = 1 << 16
_LAST_ROUNDS = 64


class Tail:
    """A pipe whose other end, `output`, is for the program. The loop must run while the program prints."""

    def __init__(self) -> None:
        self._input, self.output = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._input, False)
        self._kept = b""
        asyncio.get_running_loop().add_reader(self._input, self._read)

    def _read(self) -> bool:
        """Whether there may be more."""
        try:
            chunk = os.read(self._input, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:  # nobody is left to write
            asyncio.get_running_loop().remove_reader(self._input)
        self._kept = (self._kept + chunk)[-_KEPT:]
        return bool(chunk)

    def started(self) -> None:
        """The program has its end of the pipe: ours is closed."""
        os.close(self.output)
        self.output = -1

    def text(self) -> str:
        """The last of what was printed until now."""
        for _ in range(_LAST_ROUNDS):
            if self._input < 0 or not self._read():
                break
        return self._kept.decode(errors="replace").strip()

    def close(self) -> None:
        """Whoever prints afterwards has nobody to print to."""
        if self._input >= 0:
            asyncio.get_running_loop().remove_reader(self._input)
            with contextlib.suppress(OSError):
                os.close(self._input)
            self._input = -1
        if self.output >= 0:
            self.started()

"""A handler of the fork server that does what it is told, as hostile as that may be: each line is Python."""

import json
import time
from collections.abc import Callable
from typing import Any


class Code:
    """`{"code": ...}` is executed; what it left in `result` is answered, or what it raised. `argument`: how many
    objects it keeps from the beginning."""

    def __init__(self, argument: str) -> None:
        self.heap = [{"number": number, "text": f"text {number}"} for number in range(int(argument or 0))]
        self.names: dict[str, Any] = {"__name__": "code", "source": open(__file__, "rb", 0)}  # noqa: SIM115

    def handle(self, line: bytes, send: Callable[[bytes], None]) -> None:
        """See `sandboxes.forkserver.driver.Handler`."""
        self.names["result"] = None
        try:
            exec(json.loads(line)["code"], self.names)
            answer = {"result": self.names["result"]}
        except BaseException as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        send(json.dumps(answer, default=str).encode())


class Slow(Code):
    """Needs its time to load."""

    def __init__(self, argument: str) -> None:
        super().__init__("")
        time.sleep(float(argument))


class Threaded(Code):
    """Has a thread from the beginning, and so can't be forked."""

    def __init__(self, argument: str) -> None:
        import threading

        super().__init__("")
        threading.Thread(target=threading.Event().wait, name="heartbeat", daemon=True).start()

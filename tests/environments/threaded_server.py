"""The memo server, loaded by a module that keeps a thread: no fork server can run it."""

import threading
import time

from memo_server import server

__all__ = ["server"]
threading.Thread(target=time.sleep, args=(3600,), name="stays", daemon=True).start()

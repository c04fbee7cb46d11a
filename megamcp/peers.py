"""The door by which other processes of the same gateway hand requests to this one: a socket of its own.

On this machine it is a unix socket in a folder that only this user may enter. A gateway that listens wider than
loopback has others on other machines, so it takes a TCP port there, too, beside that of clients. The same application
answers, so the same rights are needed.
"""

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megamcp.settings import Settings

SESSIONS = "sessions"
"""Channel of what sessions said to one process that another may have the stream of."""
TELL_SESSION = f"select pg_notify(megamcp.channel('{SESSIONS}'), $1)"
# Those whose mark is gone are dead.
APPEAR = """with gone as (delete from megamcp.peers where id <> $1 and not megamcp.alive(owner))
    insert into megamcp.peers (id, owner, address) values ($1, $2, $3)
    on conflict (id) do update set owner = excluded.owner"""
PEER = "select address from megamcp.peers where id = $1 and megamcp.alive(owner)"


@dataclass(frozen=True, slots=True)
class PeerDoor:
    """A listening socket, and how others find it."""

    socket: socket.socket
    address: str


@contextlib.contextmanager
def peer_door(settings: Settings) -> Iterator[PeerDoor]:
    """Open while the gateway runs."""
    if not settings.on_loopback:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listening:
            listening.bind((settings.host, 0))
            listening.listen(128)
            listening.setblocking(False)
            yield PeerDoor(listening, f"http://{_own_name()}:{listening.getsockname()[1]}")
        return
    folder = Path(tempfile.mkdtemp(prefix="megamcp-peer-"))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            path = folder / "door.sock"
            listening.bind(str(path))
            listening.listen(128)
            listening.setblocking(False)
            yield PeerDoor(listening, f"unix:{path}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own_name() -> str:
    """The address by which this machine's name is known, where it is; containers of one network know each other so."""
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name

"""A tool server that keeps items in memory and in a file, and one that misbehaves on demand: the sandbox tests' own."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from megamcp.sdk import Context, Server

server = Server("memo")
_items: dict[str, str] = {}
_FILE = Path("items.json")


@server.tool
def put(key: str, value: str, pause: float = 0) -> int:
    """Sets an item in memory, waits, sets it in the file too; gives the number of items."""
    _items[key] = value
    time.sleep(pause)
    _FILE.write_text(json.dumps(_items, indent=1, sort_keys=True) + "\n")
    return len(_items)


@server.tool(read_only=True)
def items() -> dict[str, str]:
    """What is in memory. Raises if the file says something else."""
    found = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    if found != _items:
        raise ValueError(f"the file has {found}, memory has {_items}")
    return _items


@server.tool(read_only=True)
def stored() -> dict[str, str]:
    """What is in the file."""
    return dict(json.loads(_FILE.read_text())) if _FILE.exists() else {}


@server.tool
def write(path: str, text: str) -> str:
    """Writes a file of the working folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


@server.tool
def remove(path: str) -> str:
    """Removes a file of the working folder."""
    Path(path).unlink()
    return path


@server.tool
def fill(path: str, megabytes: int) -> int:
    """Writes a large file of the working folder."""
    with Path(path).open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1 << 20))
    return megabytes


@server.tool
def daemon(name: str) -> str:
    """Starts a process that leaves everything behind that it comes from, and ignores being asked to end."""
    script = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); name = {name!r}; time.sleep(3600)"
    leave = "import os, sys; os.fork() and os._exit(0); os.setsid()"
    starter = f"{leave}; os.execv(sys.executable, ['python', '-c', {script!r}])"
    subprocess.run([sys.executable, "-c", starter], check=True, stdin=subprocess.DEVNULL)
    return name


@server.tool
async def wait(context: Context) -> None:
    """Says that it runs, and waits until it is cancelled: an item tells of it."""
    await context.progress(0)
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        put(key="wait", value="cancelled")
        raise


@server.tool
async def doze(context: Context, seconds: float) -> None:
    """Says that it runs, and blocks."""
    await context.progress(0)
    time.sleep(seconds)  # noqa: ASYNC251  (that is the point)


@server.tool
def hang() -> str:
    """Never ends."""
    while True:
        time.sleep(60)


@server.tool
def crash(words: str) -> None:
    """Says its last words and ends."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool
def flood(lines: int) -> int:
    """Prints a lot, where nobody should mind."""
    for number in range(lines):
        sys.stderr.write(f"line {number} {'x' * 200}\n")
        print(f"junk {number}")  # noqa: T201
    sys.stdout.flush()
    return lines


@server.tool
def thread() -> str:
    """Starts a thread that stays: a fork would lose it."""
    threading.Thread(target=time.sleep, args=(3600,), name="stays", daemon=True).start()
    return "started"

"""A tool server that keeps notes in memory and in a file of its working folder: the sandbox tests' own."""

import os
from pathlib import Path

from megamcp.sdk import Server

server = Server("notes")
_notes: list[str] = []


@server.tool
def add(text: str) -> list[str]:
    """Adds a note, in memory and to the file."""
    _notes.append(text)
    with Path("notes.txt").open("a") as file:
        file.write(text + "\n")
    return _notes


@server.tool(read_only=True)
def notes() -> dict[str, list[str]]:
    """What is in memory and what is in the file."""
    file = Path("notes.txt")
    return {"memory": _notes, "file": file.read_text().splitlines() if file.exists() else []}


@server.tool
def crash() -> None:
    """Ends the process."""
    os._exit(3)


@server.tool
async def later(text: str) -> str:
    """An async tool."""
    return text


@server.tool
def spin() -> None:
    """Never ends by itself."""
    while True:
        pass

"""Why the relay ends a client's connection: SQLSTATE, words, hint."""

from typing import Final

AWAY: Final = (
    "57P03",
    "The database of this login can't be reached at the moment.",
    "Try again. It is being moved, or its server is away or has no connection left.",
)
BUSY: Final = (
    "55P03",
    "The rollout's database is kept by another transaction or call.",
    "End the transactions that other clients have open, or try again: who waits for one of them keeps others out.",
)
LOST: Final = (
    "57P01",
    "terminating connection: the backend ended within a transaction",
    "If it was committing, look whether the commit took effect before you repeat it.",
)
TOO_MUCH: Final = (
    "57P01",
    "terminating connection: it holds more prepared statements than the relay takes along to another backend",
    "Connect again. Close statements that are not needed any more.",
)

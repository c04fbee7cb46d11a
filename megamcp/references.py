"""Secrets by reference: `${env:NAME}` and `${file:/path}` in texts of an environment.

What is kept of an environment (its hash, its definition in the database) holds the reference; the secret is read where
it is used, in the process that uses it. Whoever holds a `Resolved` doesn't log it; `secrets` say what to leave out.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megamcp.errors import Unprocessable
from megamcp.settings import Settings

if TYPE_CHECKING:
    from megamcp.definitions import ServerConfig

_REFERENCE = re.compile(r"\$\{(env|file):([^{}]*)\}")
_MOST_BYTES = 64 * 1024
_OWN = frozenset(f"MEGAMCP_{name.upper()}" for name in Settings.model_fields)


class Missing(ValueError):
    """What a reference leads to is not there. Says its name, never its content."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Texts with their secrets in place."""

    texts: dict[str, str] = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)


def present(text: str) -> bool:
    """Whether a text refers to a secret."""
    return _REFERENCE.search(text) is not None


def only(text: str) -> bool:
    """Whether a text is a reference and nothing else."""
    return _REFERENCE.fullmatch(text) is not None


def resolve(text: str) -> tuple[str, tuple[str, ...]]:
    """The text, and the secrets in it. Raises `Missing`."""
    secrets = tuple(_read(kind, name) for kind, name in _REFERENCE.findall(text))
    rest = iter(secrets)
    return _REFERENCE.sub(lambda _: next(rest), text), secrets


def resolve_all(texts: Mapping[str, str], where: str) -> Resolved:
    """Texts by name. `where` is told in front of the name. Raises `Unprocessable` (`secret_missing`)."""
    made: dict[str, str] = {}
    secrets: list[str] = []
    for name, text in texts.items():
        try:
            made[name], found = resolve(text)
        except Missing as error:
            raise Unprocessable(f"{where}.{name}: {error}", code="secret_missing") from None
        secrets += found
    return Resolved(made, tuple(secrets))


def _read(kind: str, name: str) -> str:
    if kind == "env":
        if name.upper() in _OWN:
            raise Missing(f"{name!r} is a setting of the gateway, and not for servers")
        # Never "but empty": a header without its token would only be refused by the server, in other words.
        if not (value := os.environ.get(name)):
            raise Missing(f"the gateway's environment has no variable {name!r}")
        return value
    path = Path(name)
    if not path.is_absolute():
        raise Missing(f"the path of a secret is absolute, and {name!r} is not")
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise Missing(f"the gateway finds no file {name!r} of at most {_MOST_BYTES} bytes")
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        if isinstance(error, Missing):
            raise
        told = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise Missing(f"the gateway can't read {name!r}: {told}") from None
    if not value:
        raise Missing(f"the file {name!r} is empty")
    return value


def missing_secrets(servers: "Mapping[str, ServerConfig]") -> list[dict[str, str]]:
    """{where, problem} of each reference of an environment that leads to nothing."""
    problems: list[dict[str, str]] = []
    for server, one in servers.items():
        texts = {f"headers.{name}": text for name, text in one.headers.items()}
        texts |= {f"env.{name}": text for name, text in one.env.items()}
        if one.oauth:
            own = {"client_secret": one.oauth.client_secret, "private_key": one.oauth.private_key}
            texts |= {f"oauth.{name}": text for name, text in own.items() if text}
        for name, text in texts.items():
            try:
                resolve(text)
            except Missing as error:
                problems.append({"where": f"servers.{server}.{name}", "problem": str(error)})
    return problems

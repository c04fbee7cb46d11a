"""Servers that are started by a package manager: `npx -y @x/server` and `uvx server`.

A sandbox has no network, so what the manager would get at each start is got once, when the template is made: in a
container of its own that has the network, into a folder that sandboxes see read-only at /packages. The server is then
started without the manager, which would only wait beside it. So `latest` is what was the latest when the template was
made, the same for every rollout.

What the registry needs is read from the keeper's environment (`npm_config_*`, `PIP_*`, proxies, certificates) and
/etc, not from anybody's home.
"""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from sandboxes.criu import bundle
from sandboxes.types import SandboxError

_NPM = re.compile(r"(@[\w.-]+/)?[A-Za-z0-9_][\w.-]*(@[\w.^~<>=*|-]+)?")
_PYPI = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,.-]+\])?(@[\w.]+|[=<>~!]=?=?[\w.*+!,<>=~-]+)?")
_PASSED = re.compile(
    r"(npm_config_|PIP_|UV_).+|(https?|all|no)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|NODE_EXTRA_CA_CERTS", re.I
)
_NODE_FLAGS, _NODE_VALUES = ("-y", "--yes", "-q", "--quiet"), ("-p", "--package")
_PYTHON_FLAGS, _PYTHON_VALUES = ("-q", "--quiet", "--isolated", "--refresh"), ("--from", "--with", "--spec")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A program of packages. `program` is None for the only one of the first package."""

    manager: str
    packages: tuple[str, ...]
    program: str | None
    arguments: tuple[str, ...]


def wanted(command: tuple[str, ...]) -> Wanted | None:
    """None for a command that needs no package. Raises `invalid_spec` for what can't be got ahead of time."""
    name, rest = os.path.basename(command[0]), list(command[1:])
    if name == "uv" and rest[:2] == ["tool", "run"]:
        name, rest = "uvx", rest[2:]
    if name == "pipx" and rest[:1] == ["run"]:
        name, rest = "uvx", rest[1:]
    if name not in ("npx", "uvx"):
        return None
    node = name == "npx"
    flags, valued = (_NODE_FLAGS, _NODE_VALUES) if node else (_PYTHON_FLAGS, _PYTHON_VALUES)
    options: list[tuple[str, str]] = []
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option == "--":
            break
        if option in valued and (equals or rest):
            options.append((option, value if equals else rest.pop(0)))
        elif option not in flags or equals:
            raise SandboxError(
                "invalid_spec",
                f"{command[0]} {option} can't be done ahead of time, without a network.",
                hint="Install the server yourself and name its program, or use the options that only say which"
                f" package: {', '.join((*flags, *valued))}.",
            )
    if not rest:
        raise SandboxError("invalid_spec", f"{' '.join(command)} names no package.")
    first, arguments = rest[0], tuple(rest[1:])
    if node:
        named = tuple(value for _, value in options)
        found = Wanted("npm", named or (first,), first if named else None, arguments)
    else:
        sources = tuple(value for option, value in options if option != "--with")
        program = re.split(r"[\[@=<>~!]", first)[0]
        others = tuple(value for option, value in options if option == "--with")
        found = Wanted("pypi", (*(sources or (first,)), *others), program, arguments)
    for package in found.packages:
        if not (_NPM if node else _PYPI).fullmatch(package):
            raise SandboxError(
                "invalid_spec",
                f"{package!r} is no name of a package.",
                hint="Only packages of a registry can be got ahead of time: a name, and a version if you like.",
            )
    return found


def needed(wanted: Wanted) -> list[str]:
    """Folders of the host that it is got with, and runs with."""
    if wanted.manager == "npm":
        return [*bundle.found(("npm",))[1], *bundle.found(("node",))[1]]
    return bundle.found((_python(),))[1]


def steps(wanted: Wanted) -> list[tuple[str, ...]]:
    """The commands that fill /packages."""
    if wanted.manager == "npm":
        quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error",
                 "--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000")  # fmt: skip
        return [(bundle.found(("npm",))[0][0], "install", "--prefix", bundle.PACKAGES, *quiet, "--", *wanted.packages)]
    packages = [re.sub("@latest$", "", package).replace("@", "==") for package in wanted.packages]
    venv = f"{bundle.PACKAGES}/venv"
    return [
        (_python(), "-m", "venv", venv),
        (f"{venv}/bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir", "--retries=2", "--", *packages),
    ]


def environ() -> dict[str, str]:
    """What the managers are told."""
    passed = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    return {"npm_config_cache": "/tmp/npm", **passed}


def command(wanted: Wanted, folder: Path) -> list[str]:
    """The server's own command, once `folder` has what is seen at /packages. Raises `start_failed`."""
    if wanted.manager == "pypi":
        assert wanted.program is not None
        program = f"venv/bin/{wanted.program}"
        if not os.path.lexists(folder / program):
            raise _no_program(wanted, sorted(path.name for path in (folder / "venv/bin").iterdir()))
        return [f"{bundle.PACKAGES}/{program}", *wanted.arguments]
    name = wanted.program or _only_program(wanted, folder)
    program = f"node_modules/.bin/{name}"
    if not (folder / program).exists():
        raise _no_program(wanted, sorted(path.name for path in (folder / "node_modules/.bin").glob("*")))
    with (folder / program).open("rb") as file:
        by_node = b"node" in file.readline(200)
    runner = bundle.found(("node",))[0] if by_node else []
    return [*runner, f"{bundle.PACKAGES}/{program}", *wanted.arguments]


def _only_program(wanted: Wanted, folder: Path) -> str:
    """As npx chooses: the only one, or the one that is called like the package."""
    package = wanted.packages[0]
    name = package[: package.index("@", 1)] if "@" in package[1:] else package
    told = json.loads((folder / "node_modules" / name / "package.json").read_text()).get("bin", {})
    short = name.rpartition("/")[2]
    programs = [short] if isinstance(told, str) else list(told)
    if len(set(told.values() if isinstance(told, dict) else [told])) == 1:
        return programs[0]
    if short in programs:
        return short
    raise _no_program(wanted, programs)


def _no_program(wanted: Wanted, there: list[str]) -> SandboxError:
    name = wanted.program or "that could be meant"
    return SandboxError(
        "start_failed",
        f"{', '.join(wanted.packages)} has no program {name}.",
        hint=f"It has: {', '.join(there[:20]) or 'none'}.",
    )


def _python() -> str:
    return str(getattr(sys, "_base_executable", "") or sys.executable)

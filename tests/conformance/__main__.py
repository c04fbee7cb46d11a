"""Runs the public MCP conformance suite through a gateway with the everything-server behind it.

Prints a line for each scenario and, as the last line, JSON: `{revision: {part: [passed, of]}}` of those that the
revision requires. What isn't reached yet is listed in `expected.toml`, which must only shrink: exit status 1 when a
scenario fails that isn't listed there, and also when one passes that is. Exit status 3: the suite can't be fetched.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import shlex
import shutil
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.conformance import processes
from tests.conformance.driver import Driver
from tests.conformance.everything import ERAS
from tests.conformance.suite import REVISIONS, ROOT, NotFetched, Part, Suite, Verdict

HERE = Path(__file__).parent
RESULTS = ROOT / "build" / "conformance" / "results"
EXPECTED = HERE / "expected.toml"

Expected = dict[str, dict[str, list[str]]]
"""The scenarios that are known to fail, by revision and part."""
Found = dict[tuple[str, Part], list[Verdict]]


@dataclass(frozen=True, slots=True)
class Run:
    """What is asked for on the command line."""

    revisions: list[str]
    parts: list[Part]
    scenario: str | None
    direct: bool
    stdio: bool
    era: str | None

    def heading(self, part: Part) -> str:
        """Of the part's list in `expected.toml`."""
        kinds = [self.era, "stdio" if self.stdio and part is Part.SERVER else None]
        return "-".join([part, *(kind for kind in kinds if kind)])


class Harness:
    def __init__(self, suite: Suite, run: Run, folder: Path) -> None:
        self._suite = suite
        self._run = run
        self._folder = folder

    async def run(self) -> Found:
        shutil.rmtree(RESULTS, ignore_errors=True)
        async with contextlib.AsyncExitStack() as stack:
            gateway = None
            if not self._run.direct:
                gateway = await stack.enter_async_context(processes.gateway(self._folder))
            server = await stack.enter_async_context(processes.everything(self._folder, self._run.era))
            if gateway is not None:
                await self._load(gateway, server)
            socket = self._folder / "driver"
            driver = Driver(self._folder / "environments", gateway, self._run.era)
            await stack.enter_async_context(await driver.serve(socket))
            found: Found = {}
            for revision in self._run.revisions:
                for part in self._run.parts:
                    target = await self._target(part, revision, gateway, server)
                    results = RESULTS / revision / part
                    found[revision, part] = await self._suite.run(
                        part, revision, self._run.scenario, results, target, {"MEGAMCP_CONFORMANCE_SOCKET": str(socket)}
                    )
            return found

    async def _load(self, gateway: str, server: str) -> None:
        """The environment `everything`: one server, so its tools keep their names."""
        lines = ['name = "everything"', "[servers.everything]"]
        if self._run.stdio:
            args = ["-m", "tests.conformance.everything", "--stdio"]
            lines += [f"command = {json.dumps(sys.executable)}", f"args = {json.dumps(args)}"]
            lines += [f"cwd = {json.dumps(str(ROOT))}"]
        else:
            lines += [f"url = {json.dumps(server)}"]
        folder = self._folder / "everything"
        folder.mkdir()
        (folder / "environment.toml").write_text("\n".join(lines) + "\n")
        async with httpx.AsyncClient(base_url=gateway, timeout=120) as http:
            answer = await http.post("/v1/environments", json={"path": str(folder)})
            if answer.is_error:
                raise RuntimeError(f"the environment can't be loaded: {answer.text}")

    async def _target(self, part: Part, revision: str, gateway: str | None, server: str) -> tuple[str, str]:
        if part is Part.CLIENT:
            return "--command", shlex.join((sys.executable, "-S", "-E", str(HERE / "client.py")))
        if gateway is None:
            return "--url", server
        if revision < "2026" or await _serves_without_rollout(gateway):
            return "--url", f"{gateway}/e/everything/mcp"
        # A client without sessions can't be given a rollout of its own: it is opened for it.
        async with httpx.AsyncClient(base_url=gateway, timeout=60) as http:
            opened = (await http.post("/v1/rollouts", json={"environment": "everything"})).raise_for_status()
        return "--url", opened.json()["rollouts"][0]["url"]


async def _serves_without_rollout(gateway: str) -> bool:
    """Whether a modern client can call tools at an environment's URL."""
    version = {"io.modelcontextprotocol/protocolVersion": REVISIONS[-1]}
    meta = {**version, "io.modelcontextprotocol/clientCapabilities": {}}
    params = {"name": "test_simple_text", "arguments": {}, "_meta": meta}
    headers = {"MCP-Protocol-Version": REVISIONS[-1], "Mcp-Method": "tools/call", "Mcp-Name": "test_simple_text"}
    headers["Accept"] = "application/json, text/event-stream"
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway}/e/everything/mcp", json=message, headers=headers)
    return answer.is_success


def report(run: Run, found: Found, listed: Expected) -> int:
    """Prints all. The exit status."""
    surprises = 0
    totals: dict[str, dict[str, list[int]]] = {}
    for (revision, part), verdicts in found.items():
        known = listed.get(revision, {}).get(run.heading(part), [])
        for verdict in verdicts:
            word = "passed" if verdict.passed else "failed"
            if not verdict.scored:
                word += ", not scored"
            elif verdict.passed == (verdict.scenario in known):
                surprises += 1
                word += ", but expected.toml lists it: take it out" if verdict.passed else ""
            elif not verdict.passed:
                word += ", as expected"
            print(f"{revision} {part} {verdict.scenario}: {word}")
            if verdict.scored or run.scenario:
                for line in verdict.problems + [f"(warning) {remark}" for remark in verdict.remarks]:
                    print(f"    {line[:400]}")
        scored = [verdict for verdict in verdicts if verdict.scored]
        totals.setdefault(revision, {})[part] = [sum(verdict.passed for verdict in scored), len(scored)]
    print(json.dumps(totals))
    return 1 if surprises else 0


def shrunk(run: Run, listed: Expected, found: Found) -> str:
    """`expected.toml` without what passes now."""
    passed = {
        (revision, run.heading(part)): {verdict.scenario for verdict in verdicts if verdict.passed}
        for (revision, part), verdicts in found.items()
    }
    lines = [line for line in EXPECTED.read_text().splitlines() if line.startswith("#")]
    for revision, parts in listed.items():
        lines += ["", f'["{revision}"]']
        for heading, names in parts.items():
            left = [name for name in names if name not in passed.get((revision, heading), ())]
            lines += [f"{heading} = [", *(f'  "{name}",' for name in left), "]"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--revision", choices=REVISIONS, help="only this one")
    parser.add_argument("--part", choices=list(Part), help="only this one")
    parser.add_argument("--scenario", help="only this one; name its part too")
    parser.add_argument("--direct", action="store_true", help="without a gateway: what the suite says of our own ends")
    parser.add_argument("--stdio", action="store_true", help="the gateway starts the everything-server, a process each")
    parser.add_argument("--era", choices=ERAS, help="our end, server or client, is of this era only")
    parser.add_argument("--shrink", action="store_true", help="take out of expected.toml what passes now")
    parser.add_argument("--fetch", action="store_true", help="only get Node and the suite")
    given = parser.parse_args()
    if given.stdio and given.era:
        parser.error("--era is for an everything-server over HTTP")
    run = Run(
        [given.revision] if given.revision else list(REVISIONS),
        [Part(given.part)] if given.part else list(Part),
        given.scenario,
        given.direct,
        given.stdio,
        given.era,
    )
    logging.disable(logging.WARNING)  # the SDK's client tells of each tool that it leaves out
    began = time.monotonic()
    try:
        suite = Suite.fetched()
    except NotFetched as error:
        print(f"The conformance suite can't be fetched: {error}", file=sys.stderr)
        return 3
    if given.fetch:
        return 0
    listed: Expected = {} if run.direct else tomllib.loads(EXPECTED.read_text())
    with tempfile.TemporaryDirectory(prefix="megamcp-conformance-") as folder:
        Path(folder).chmod(0o755)
        found = asyncio.run(Harness(suite, run, Path(folder)).run())
        for log in Path(folder).glob("*.log"):
            shutil.copy(log, RESULTS)
    print(f"{time.monotonic() - began:.0f} s; all checks, and the processes' logs, are in {RESULTS.relative_to(ROOT)}")
    if given.shrink:
        EXPECTED.write_text(shrunk(run, listed, found))
        listed = tomllib.loads(EXPECTED.read_text())
    return report(run, found, listed)


if __name__ == "__main__":
    sys.exit(main())

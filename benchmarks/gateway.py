"""What a tool call costs on its way through the gateway: CPU time and wall time, beside other ways to the same tool.

    python -m benchmarks.gateway [--quick] [--no-peers]

One client, one run, the ways in turn in every round; figures are medians over the rounds:

- `direct`: straight to a tool server that only answers (on `megamcp.sdk`; `official`: the same on the `mcp` SDK).
- `gateway`: the same tool server behind the gateway as a pass-through, its two journal rows durable before the
  answer is. `official_gateway`: the one on the `mcp` SDK behind it. `unrecorded`: as `gateway`, of an environment that
  keeps no journal.
- `retail_read`, `retail_write`: tools on a rollout's own rows, for information.
- `fastmcp`: FastMCP's proxy in front of the same tool server, in a virtual environment that the first run makes
  (`--no-peers` leaves it out; so does a machine that can't make it, with the reason). `fastmcp_stateless`: the same
  with a client that speaks 2026-07-28, which spares it a handshake; all other clients open a session.

`…_cpu_ms` is the CPU time of the one process that the way adds (gateway or proxy; the tool server itself where it is
called directly) for a call, one call after another; `…_cpu_at_16_ms` the same with 16 sessions at once (16 rollouts
behind the gateway). `…_postgres_cpu_ms` is what all of PostgreSQL's processes used meanwhile, background work included.
`added_cpu_ms` is the gateway's for a pass-through call (`added_unrecorded_cpu_ms`: for one that leaves no row).
`fastmcp_ratio` is FastMCP's proxy's, in its cheaper era, over it; neither counts PostgreSQL,
`fastmcp_ratio_with_postgres` does. Wall times are the client's, and depend on how many
cores are free.
"""

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.peers import environments
from benchmarks.peers.agent import McpClient, at_once, one_after_another
from benchmarks.peers.servers import Running, fastmcp_proxy, official_tool_server, tool_server
from benchmarks.processes import children, cpu_s, create_database, gateway, postgres_pids
from benchmarks.report import Target, report, say
from megamcp.postgres import EmbeddedPostgres

AT_ONCE = 16
FASTMCP = ("fastmcp", "uvloop", "httptools")  # uvicorn takes the last two where it finds them, as ours does
WEATHER = {"city": "Hobart"}
CUSTOMER = "C1001"


@dataclass(slots=True)
class Way:
    """One way to a tool, and what was measured on it."""

    name: str
    clients: list[McpClient]
    tool: str
    arguments: dict[str, Any]
    share: float
    """Part of the calls of a round that this way gets: slow ones get fewer."""
    groups: dict[str, Callable[[], list[int]]]
    """Processes whose CPU time is of interest, by the figure that they go into."""
    wall: list[float] = field(default_factory=list)
    wall_at_once: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    async def round(self, calls: int) -> None:
        """Measure once more: one call after another, then all sessions at once."""
        count = max(AT_ONCE, round(calls * self.share))
        client = self.clients[0]
        with self._cpu("cpu_ms", count):
            self.wall += await one_after_another(client, self.tool, self.arguments, count)
        count -= count % AT_ONCE
        with self._cpu("cpu_at_16_ms", count):
            began = time.perf_counter()
            await at_once(self.clients, self.tool, self.arguments, count)
            self.wall_at_once.append((time.perf_counter() - began) * 1000 / count)

    @contextlib.contextmanager
    def _cpu(self, figure: str, count: int) -> Any:
        before = {group: cpu_s(pids()) for group, pids in self.groups.items()}
        yield
        for group, pids in self.groups.items():
            used = (cpu_s(pids()) - before[group]) * 1000 / count
            name = "_".join(filter(None, (self.name, group, figure)))
            self.cpu.setdefault(name, []).append(used)

    def forget(self) -> None:
        """Drop what was measured so far."""
        for measured in (self.wall, self.wall_at_once, self.cpu):
            measured.clear()

    def figures(self) -> dict[str, float]:
        """Medians, in milliseconds for a call."""
        return {
            **{name: statistics.median(values) for name, values in self.cpu.items()},
            f"{self.name}_wall_ms": statistics.median(self.wall),
            f"{self.name}_wall_at_16_ms": statistics.median(self.wall_at_once),
        }


class Gateway:
    """Rollouts of a running gateway, and the processes that a call of theirs keeps busy."""

    def __init__(self, http: aiohttp.ClientSession, url: str, pid: int, postmaster: int) -> None:
        self._http = http
        self._url = url
        self.groups: dict[str, Callable[[], list[int]]] = {
            "": lambda: [pid],
            "postgres": lambda: postgres_pids(postmaster),
        }
        self.with_tool_server = {**self.groups, "tool_server": lambda: children(pid)}

    async def clients(self, environment: str) -> list[McpClient]:
        """A session with each of `AT_ONCE` new rollouts."""
        body = {"environment": environment, "count": AT_ONCE}
        async with self._http.post(f"{self._url}/v1/rollouts", json=body) as answer:
            answer.raise_for_status()
            rollouts = (await answer.json())["rollouts"]
        return await sessions(self._http, [rollout["url"] for rollout in rollouts])


async def sessions(http: aiohttp.ClientSession, urls: list[str], *, stateless: bool = False) -> list[McpClient]:
    """A client of each URL, ready to call."""
    return list(await asyncio.gather(*(McpClient(http, url, stateless=stateless).open() for url in urls)))


def pass_through(folder: Path, name: str, url: str, journal: str = "calls") -> str:
    """An environment's folder for a tool server that runs elsewhere."""
    place = folder / name
    place.mkdir()
    definition = f'name = "{name}"\njournal = "{journal}"\n[servers.echo]\nurl = "{url}"\n'
    (place / "environment.toml").write_text(definition, encoding="utf-8")
    return str(place)


@contextlib.asynccontextmanager
async def all_ways(peers: bool, retail: bool) -> AsyncIterator[tuple[list[Way], dict[str, str]]]:
    """Every way that this machine can measure, and the versions of the peers."""
    about: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mm-")))
        folder.chmod(0o755)
        http = await enter(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        echo, official = await enter(tool_server()), await enter(official_tool_server())
        say("starting PostgreSQL and the gateway" + (", loading retail" if retail else ""))
        postgres = await enter(EmbeddedPostgres(folder / "pg"))
        dsn = await create_database(postgres.dsn, "bench_gateway")
        options = [
            *("--environment", pass_through(folder, "echo", echo.url)),
            *("--environment", pass_through(folder, "unrecorded", echo.url, "none")),
            *("--environment", pass_through(folder, "official", official.url)),
            "--bundled" if retail else "--no-bundled",
        ]
        url, pid = await enter(gateway(dsn, *options))
        assert postgres.postmaster_pid is not None
        ours = Gateway(http, url, pid, postgres.postmaster_pid)

        ways = [
            Way("direct", await sessions(http, [echo.url] * AT_ONCE), "weather", WEATHER, 1, _only(echo)),
            Way("gateway", await ours.clients("echo"), "weather", WEATHER, 1, ours.groups),
            Way("unrecorded", await ours.clients("unrecorded"), "weather", WEATHER, 1, ours.groups),
            Way("official", await sessions(http, [official.url] * AT_ONCE), "weather", WEATHER, 0.4, _only(official)),
            Way("official_gateway", await ours.clients("official"), "weather", WEATHER, 0.4, ours.groups),
        ]
        if retail:
            ways += await retail_ways(ours)
        if peers:
            try:
                say("FastMCP's environment (the first run makes it)")
                python = await environments.environment("fastmcp", *FASTMCP)
                about["fastmcp"] = await environments.version(python, "fastmcp")
                proxy = await enter(fastmcp_proxy(python, echo.url))
            except (environments.Missing, RuntimeError, OSError) as reason:
                say(f"FastMCP is left out: {reason}")
            else:
                clients = await sessions(http, [proxy.url] * AT_ONCE)
                ways.append(Way("fastmcp", clients, "weather", WEATHER, 0.06, _only(proxy)))
                clients = await sessions(http, [proxy.url] * AT_ONCE, stateless=True)
                ways.append(Way("fastmcp_stateless", clients, "weather", WEATHER, 0.06, _only(proxy)))
        else:
            say("FastMCP is left out: --no-peers")
        yield ways, about


def _only(process: Running) -> dict[str, Callable[[], list[int]]]:
    return {"": lambda: [process.pid]}


async def retail_ways(ours: Gateway) -> list[Way]:
    """A tool that reads a customer with addresses and cards, and one that writes a row each time."""
    clients = await ours.clients("retail")
    customer = (await clients[0].call("get_customer", {"customer_id": CUSTOMER}))["structuredContent"]
    proof = {"customer_id": CUSTOMER, "proof": "phone_last4", "value": customer["phone"][-4:]}
    read = {"customer_id": CUSTOMER}
    return [
        Way("retail_read", clients, "get_customer", read, 0.4, ours.with_tool_server),
        Way("retail_write", clients, "verify_customer", proof, 0.4, ours.with_tool_server),
    ]


async def measure(quick: bool, peers: bool) -> tuple[dict[str, float], dict[str, str]]:
    """All figures, and what they were measured against."""
    rounds, calls = (2, 48) if quick else (7, 400)
    async with all_ways(peers, retail=not quick) as (ways, about):
        for way in ways:
            await way.round(AT_ONCE * 4)  # connections, prepared statements, caches
            way.forget()
        for turn in range(rounds):
            say(f"round {turn + 1} of {rounds}")
            for way in ways:
                await way.round(calls)
    figures = {name: value for way in ways for name, value in way.figures().items()}
    figures["added_cpu_ms"] = figures["gateway_cpu_ms"]
    figures["added_unrecorded_cpu_ms"] = figures["unrecorded_cpu_ms"]
    figures["added_wall_ms"] = figures["gateway_wall_ms"] - figures["direct_wall_ms"]
    if "fastmcp_cpu_ms" in figures:
        ours, postgres = figures["gateway_cpu_ms"], figures["gateway_postgres_cpu_ms"]
        theirs = min(figures["fastmcp_cpu_ms"], figures["fastmcp_stateless_cpu_ms"])
        figures["fastmcp_ratio"] = theirs / ours
        figures["fastmcp_ratio_with_postgres"] = theirs / (ours + postgres)
    return figures, about


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls, without the retail environment")
    parser.add_argument("--no-peers", action="store_true", help="without FastMCP")
    options = parser.parse_args()
    figures, about = asyncio.run(measure(options.quick, not options.no_peers))
    targets = [Target("added_cpu_ms", "<=", 1.0), Target("added_unrecorded_cpu_ms", "<=", 0.5)]
    if "fastmcp_ratio" in figures:
        targets.append(Target("fastmcp_ratio", ">=", 25))
    report("gateway", figures, targets, at_once=AT_ONCE, **about)


if __name__ == "__main__":
    main()

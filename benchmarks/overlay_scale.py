"""What many rollouts and a long history cost a statement: the same one in two databases, run in turns.

Database *few*: ten rollouts; the measured one forked a checkpoint whose only turn wrote 100 rows a table. Database
*many*: 100,000 open rollouts, two hundred of them with rows of their own; the measured one forked the last of 100
checkpoints, whose turns wrote the same 100 rows a table, 5 at a time, again and again. The chain is squashed as in any
gateway, in the background. Both rollouts hold the same rows, so what is left is the price of layers and of neighbours.

The figures are ratios of medians, many to few; `layers_many` is what squashing left of 100 layers. Part of
benchmarks.overlay.
"""

import contextlib

import asyncpg

from benchmarks import overlay
from benchmarks.crowd import Crowd
from benchmarks.report import Target, say

TURNS = 100
ROWS_PER_TURN = 5
KEYS = 100
WRITERS = 200
MOST = 1.3


async def run(server: str, full: overlay.Size) -> tuple[dict[str, float], list[Target]]:
    """All figures; the server's login must be a superuser. The base is small: it isn't the question."""
    rollouts, rows = full.rollouts, min(100_000, full.customers // 2)
    size = overlay.Size(rows, rows, rows, full.rounds, 0, 0)
    async with contextlib.AsyncExitStack() as stack:
        crowds: list[Crowd] = []
        for name in ("few", "many"):
            dsn = await stack.enter_async_context(overlay.database(server, f"mm_bench_{name}"))
            crowds.append(await overlay.load(dsn, size, stack))
            await stack.enter_async_context(crowds[-1].background())
        few, many = [overlay.Overlay(await stack.enter_async_context(c.tool()), size) for c in crowds]
        for side in (few, many):
            await side.prepare()
        few.chain, few.head = await _few(crowds[0])
        many.chain, many.head = await _many(crowds[1], rollouts)
        for crowd in crowds:
            async with crowd.admin() as admin:
                await overlay.settle(admin, crowd.state)
        await _on_one_core(few.conn, many.conn)
        say(f"among 10 with {len(few.chain)} layer, among {rollouts:,} with {len(many.chain)} layers")
        figures = {"layers_many": float(len(many.chain))}
        targets = [Target("layers_many", "<=", 16)]
        for measurement in (*overlay.READS, *overlay.WRITES):
            name = f"{measurement.name}_scale"
            figures[name] = await overlay.compare(few, many, measurement, overlay.rounds_of(measurement, size))
            targets.append(Target(name, "<=", MOST))
        return figures, targets


async def _few(crowd: Crowd) -> tuple[tuple[int, ...], int]:
    rollout, *_ = await crowd.open(10)
    points = await crowd.trajectory(rollout, 1, lambda _: overlay.turn(1, KEYS))
    (fork,) = await crowd.fork(points, 1)
    return await crowd.position(fork)


async def _many(crowd: Crowd, rollouts: int) -> tuple[tuple[int, ...], int]:
    say(f"{TURNS} turns, {rollouts:,} rollouts")
    (rollout,) = await crowd.open()
    points = await crowd.trajectory(
        rollout, TURNS, lambda number: overlay.turn(1 + number * ROWS_PER_TURN % KEYS, ROWS_PER_TURN)
    )
    forks = await crowd.fork(points, rollouts)
    async with crowd.tool() as tool:
        for fork in forks[:: max(1, len(forks) // WRITERS)]:
            await crowd.call(tool, fork, overlay.turn(1 + KEYS, ROWS_PER_TURN))
    (measured,) = await crowd.fork(points[-1:], 1)
    await crowd.settled()
    return await crowd.position(measured)


async def _on_one_core(*connections: asyncpg.Connection) -> None:
    overlay.one_core([await connection.fetchval("select pg_backend_pid()") for connection in connections])

"""How rollouts and checkpoints hang together: what to ask the gateway for, and the tree to show.

A checkpoint hangs below the one before it on its rollout's line, so a rollback shows as a second child; a fork hangs
below the checkpoint that it started from; `head` marks where a rollout stands now. What was released since is shown as
such and keeps its children. Reads only.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from megamcp import types as t
from megamcp.errors import Gone, NotFound

if TYPE_CHECKING:
    from megamcp.client import Client

MAX_CHILDREN = 24
ROLLOUT, CHECKPOINT, HEAD = "●", "◆", "○"
_STATUS = {t.RolloutStatus.OPEN: "green", t.RolloutStatus.CLOSED: "dim", t.RolloutStatus.EXPIRED: "yellow"}


@dataclass(frozen=True, slots=True)
class Forest:
    """Rollouts and the checkpoints of theirs that are still there."""

    rollouts: tuple[t.Rollout, ...]
    checkpoints: tuple[t.Checkpoint, ...]


async def collect(
    client: "Client", *, rollout: str | None = None, group: str | None = None, limit: int = 200
) -> Forest:
    """A rollout with all its relatives, or a group with its ancestors, or the `limit` newest rollouts.

    Raises `NotFound` for a rollout that isn't there.
    """
    reader = _Reader(client)
    if rollout is not None:
        known = [found.view async for found in client.rollouts()]
        await reader.family((await reader.line(await reader.rollout(rollout)))[-1], known)
    elif group is not None:
        members = [found.view async for found in client.rollouts(group=group)]
        for member in members:
            for view in await reader.line(member):
                await reader.add(view)
    else:
        for view in [found.view async for found in client.rollouts()][-limit:]:
            await reader.add(view)
    return Forest(
        tuple(sorted(reader.chosen.values(), key=lambda view: view.created_at)),
        tuple(sorted(reader.points.values(), key=lambda point: point.created_at)),
    )


class _Reader:
    """Asks for each thing once."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._seen: dict[str, t.Rollout] = {}
        self._owners: dict[str, str | None] = {}
        self.chosen: dict[str, t.Rollout] = {}
        self.points: dict[str, t.Checkpoint] = {}

    async def rollout(self, identifier: str) -> t.Rollout:
        if identifier not in self._seen:
            self._seen[identifier] = (await self._client.rollout(identifier)).view
        return self._seen[identifier]

    async def line(self, view: t.Rollout) -> list[t.Rollout]:
        """The rollout, the one that it was forked from, and so on, as far as checkpoints are still there."""
        found = [view]
        while (start := found[-1].parent_checkpoint) and (owner := await self._owner(start)):
            found.append(await self.rollout(owner))
        return found

    async def _owner(self, checkpoint: str) -> str | None:
        if checkpoint not in self._owners:
            try:
                self._owners[checkpoint] = (await self._client.checkpoint(checkpoint)).view.rollout
            except (Gone, NotFound):
                self._owners[checkpoint] = None
        return self._owners[checkpoint]

    async def add(self, view: t.Rollout) -> list[t.Checkpoint]:
        """Choose a rollout; gives its checkpoints."""
        if view.id in self.chosen:
            return []
        self.chosen[view.id] = view
        handle = await self._client.rollout(view.id)
        points = [point.view for point in await handle.checkpoints()]
        self.points |= {point.id: point for point in points}
        return points

    async def family(self, root: t.Rollout, known: Iterable[t.Rollout]) -> None:
        """Choose a rollout and all that descend from it."""
        forks: dict[str, list[t.Rollout]] = defaultdict(list)
        for view in known:
            if view.parent_checkpoint:
                forks[view.parent_checkpoint].append(view)
        waiting = [root]
        while waiting:
            for point in await self.add(waiting.pop()):
                waiting += forks[point.id]


def draw(forest: Forest, *, name: Callable[[t.Rollout | t.Checkpoint], str] | None = None) -> Tree:
    """The tree. `name` says what to call a rollout or checkpoint; default: its id."""
    return _Drawing(forest, name or (lambda thing: thing.id)).tree()


class _Drawing:
    def __init__(self, forest: Forest, name: Callable[[t.Rollout | t.Checkpoint], str]) -> None:
        self._forest = forest
        self._name = name
        self._points = {point.id: point for point in forest.checkpoints}
        self._owners = {point.rollout for point in forest.checkpoints}
        self._next: dict[tuple[str, str | None], list[t.Checkpoint]] = defaultdict(list)
        self._forks: dict[str, list[t.Rollout]] = defaultdict(list)
        for point in forest.checkpoints:
            self._next[point.rollout, point.parent].append(point)
        for rollout in forest.rollouts:
            if rollout.parent_checkpoint is not None:
                self._forks[rollout.parent_checkpoint].append(rollout)

    def tree(self) -> Tree:
        root = Tree("", hide_root=True, guide_style="dim")
        drawn_below = {fork.id for point in self._points for fork in self._forks[point]}
        for rollout in self._forest.rollouts:
            if rollout.id not in drawn_below:
                self._rollout(root, rollout, orphan=rollout.parent_checkpoint is not None)
        return root

    def _rollout(self, above: Tree, rollout: t.Rollout, *, orphan: bool = False) -> None:
        label = Text.assemble((f"{ROLLOUT} ", _STATUS[rollout.status]), (self._name(rollout), "bold"))
        if rollout.parent_checkpoint is None:
            label.append(f"  {rollout.environment}", style="cyan")
        if orphan:
            label.append("  from a released checkpoint", style="yellow")
        if rollout.status is not t.RolloutStatus.OPEN:
            label.append(f"  {rollout.status}", style=_STATUS[rollout.status])
        branch = above.add(label)
        start = rollout.parent_checkpoint
        own = [point for point in self._points.values() if point.rollout == rollout.id]
        self._line(branch, rollout, start)
        for point in own:
            if point.parent != start and point.parent not in self._points:
                self._point(branch, rollout, point)
        if rollout.checkpoint != start and rollout.checkpoint not in self._points:
            self._head(branch, rollout)

    def _line(self, branch: Tree, rollout: t.Rollout, at: str | None) -> None:
        """What comes after a point on this rollout's line: its next checkpoints, and its head."""
        for point in self._next[rollout.id, at]:
            self._point(branch, rollout, point)
        moved = rollout.id in self._owners  # one without checkpoints is its own head
        if moved and rollout.checkpoint == at:
            self._head(branch, rollout)

    def _head(self, branch: Tree, rollout: t.Rollout) -> None:
        if rollout.status is t.RolloutStatus.OPEN:
            branch.add(Text.assemble((f"{HEAD} ", "green"), (f"head of {self._name(rollout)}", "dim")))

    def _point(self, branch: Tree, rollout: t.Rollout, point: t.Checkpoint) -> None:
        label = Text.assemble((f"{CHECKPOINT} ", "magenta"), self._name(point))
        if point.label:
            label.append(f"  {point.label}", style="italic")
        label.append(f"  turn {point.turn}  {(point.digest or '—').removeprefix('sha256:')[:10]}", style="dim")
        if point.pins:
            label.append(f"  pinned by {', '.join(point.pins)}", style="yellow")
        below = branch.add(label)
        forks = self._forks[point.id]
        for fork in forks[:MAX_CHILDREN]:
            self._rollout(below, fork)
        if len(forks) > MAX_CHILDREN:
            below.add(Text(f"… {len(forks) - MAX_CHILDREN} more", style="dim"))
        self._line(below, rollout, point.id)


def document(forest: Forest) -> dict[str, Iterable[t.Rollout | t.Checkpoint]]:
    """The same for programs: two flat lists that point at each other by id."""
    return {"rollouts": forest.rollouts, "checkpoints": forest.checkpoints}

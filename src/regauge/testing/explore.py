"""Every interleaving of a small cluster: an exhaustive search over the states of the real `Sender`, `Receiver` and `PagePool`.

A state is the whole simulated cluster (`world.py`): both machines, pools, every cell of memory, messages and writes under way. From each
state every event that may happen is tried, and every fault that its budget allows, breadth first, until no new state is found.
Where nothing but faults is left to happen, time passes, and everything must come to its end. See docs/ownership.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from regauge.testing import snapshot
from regauge.testing.choices import events
from regauge.testing.process import Job
from regauge.testing.shape import Group, Placed, Setup
from regauge.testing.violation import Violation
from regauge.testing.world import Event, World

Budget = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Instance:
    """A cluster small enough to try everything, and how often each fault may happen in one history."""

    name: str
    setup: Setup
    jobs: tuple[tuple[int, int], ...]
    """Tokens of each request, and how many the engine computes at once."""
    budget: Budget
    late: float = 13.0
    """Seconds that pass at once: more than a lease and a new link may take."""


@dataclass
class Found:
    """What a search has seen."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    """States in which nothing but faults was left to happen."""
    complete: bool = False


@dataclass(eq=False)
class _Node:
    world: World
    budget: Budget
    key: int


class Caught(Violation):
    """A violation, with the shortest history that leads to it."""

    def __init__(self, error: Violation, history: list[Event]) -> None:
        self.history = history
        lines = [f"  {' '.join(str(x) for x in event)}" for event in history]
        super().__init__("\n".join([str(error), f"after {len(history)} events:", *lines]))


@dataclass
class Search:
    """Breadth first from an instance's beginning; `limit`: most states."""

    instance: Instance
    limit: int
    found: Found = field(default_factory=Found)
    _seen: dict[int, tuple[int, Event]] = field(default_factory=dict)

    def run(self, report: Callable[[Found], None] = lambda _: None) -> Found:
        """Search. Raises Caught."""
        first = begin(self.instance)
        at = hash((snapshot.key(first), self.instance.budget))
        waiting = deque([_Node(first, self.instance.budget, at)])
        self._seen[at] = (0, ())
        while waiting and self.found.states < self.limit:
            node = waiting.popleft()
            self.found.states += 1
            usual = events(node.world)
            usual += [("restart", name) for name, process in node.world.processes.items() if not process.alive]
            if not usual:
                self._end(node)
            for event, budget in [*((e, node.budget) for e in usual), *self._faults(node, usual)]:
                self.found.transitions += 1
                if (new := self._try(node, event, budget)) is not None:
                    waiting.append(new)
            if self.found.states % 1000 == 0:
                report(self.found)
        self.found.complete = not waiting
        return self.found

    def _try(self, node: _Node, event: Event, budget: Budget) -> _Node | None:
        world = snapshot.copy(node.world)
        try:
            world.apply(event)
        except Violation as error:
            raise Caught(error, [*self._history(node.key), event]) from error
        at = hash((snapshot.key(world), budget))
        if at in self._seen:
            return None
        self._seen[at] = (node.key, event)
        return _Node(world, budget, at)

    def _end(self, node: _Node) -> None:
        """Let time pass, and take whatever comes first, until nothing is left."""
        self.found.ends += 1
        world = snapshot.copy(node.world)
        times, history = world.setup.times, self._history(node.key)
        try:
            while world.jobs and world.now < 4 * times.bound:
                event: Event | None = ("pass", 1.0)
                while event is not None:
                    history.append(event)
                    world.apply(event)
                    event = next(iter(events(world)), None)
            if world.jobs:
                raise Violation(f"{', '.join(world.jobs)} have not ended after {world.now:g} s")
            _check_empty(world)
        except Violation as error:
            raise Caught(error, history) from error

    def _history(self, at: int) -> list[Event]:
        out: list[Event] = []
        while (step := self._seen[at])[1]:
            out.append(step[1])
            at = step[0]
        return out[::-1]

    def _faults(self, node: _Node, usual: list[Event]) -> Iterator[tuple[Event, Budget]]:
        world = node.world
        for place, (kind, left) in enumerate(node.budget):
            if left == 0:
                continue
            budget = (*node.budget[:place], (kind, left - 1), *node.budget[place + 1 :])
            for event in self._of_kind(world, kind, usual):
                yield event, budget

    def _of_kind(self, world: World, kind: str, usual: list[Event]) -> list[Event]:
        match kind:
            case "break":
                return [("break", link.number) for link in world.links.values() if not link.broken]
            case "corrupt":
                return [(*event[:3], "corrupt") for event in usual if event[0] == "land" and _announced(world, event)]
            case "cancel" | "cancel at decode":
                return [
                    ("cancel", name, side.job.name)
                    for name, process in world.processes.items() if process.runs and (kind == "cancel" or process.receiver)
                    for side in process.sides.values() if not side.ended
                ]  # fmt: skip
            case "pass":
                return [("pass", self.instance.late)]
            case "die":
                return [("die", name) for name, process in world.processes.items() if process.alive]
            case "repeat":
                return [
                    ("repeat", link.number, name, i, place)
                    for link in world.links.values() if (old := world.echoes.get((link.p, link.d)))
                    for name, said, end in ((link.d, old.said_d, link.d_end), (link.p, old.said_p, link.p_end))
                    if end in ("opening", "up")
                    for i in range(len(said)) for place in (0, 9)
                ]  # fmt: skip
        raise ValueError(f"no fault {kind!r}")


def _announced(world: World, event: Event) -> bool:
    return world.links[int(event[1])].flights[int(event[2])].cells is None


def begin(instance: Instance) -> World:
    """Return an instance's first state: its requests have come in, and nothing has happened."""
    world = World(instance.setup)
    for number, (tokens, step) in enumerate(instance.jobs):
        chunks = tuple((at, min(tokens, at + step)) for at in range(0, tokens, step))
        ranks = ([p.name for p in instance.setup.prefill], [d.name for d in instance.setup.decode])
        world.add(Job(f"t{number}", number, tokens, 0, tuple(ranks[0]), tuple(ranks[1]), chunks))
    return world


def _check_empty(world: World) -> None:
    for name, process in world.processes.items():
        if process.machine.transfers(world.now) or process.pool.free != process.pool.pages:
            raise Violation(
                f"{name} keeps {process.machine.transfers(world.now)} and {process.pool.pages - process.pool.free} pages"
            )
    for link in world.links.values():
        sender = world.processes[link.p].sender
        if sender is not None and link.p_end == "up" and sender.free_slots(link.d) != world.setup.slots:
            raise Violation(f"a staging slot from {link.p} to {link.d} is lost")


def small(**changes: object) -> Setup:
    """Return one prefill and one decode rank, one layer and head, and one page on decode, which requests have to share."""
    setup = Setup(
        (Group("full", (0,)),), (Placed("p", "p", (0,), (0,)),), (Placed("d", "d", (0,), (0,)),), page=2, heads=1,
        pages=1, slots=1, slot_cells=1, chunk_cells=1, depth=2, staged=(),
    )  # fmt: skip
    return replace(setup, **changes)  # type: ignore[arg-type]  # fields of Setup


def instances() -> list[Instance]:
    """Return what takes seconds each; see `deeper`."""
    return [
        Instance("reuse", small(depth=1), ((1, 1), (1, 1)), (("break", 1), ("cancel at decode", 1))),
        Instance("resume", small(), ((2, 2),), (("break", 1), ("corrupt", 1))),
        Instance("slots", small(staged=("full",)), ((2, 2),), (("break", 1), ("cancel", 1))),
        Instance("death", small(), ((1, 1),), (("die", 2),)),
        Instance("repeats", small(echoes=4), ((1, 1),), (("break", 1), ("repeat", 1))),
    ]


def deeper() -> list[Instance]:
    """Return what takes minutes each."""
    two = ((1, 1), (1, 1))
    staged = small(staged=("full",))
    return [
        Instance("reuse, given up on either side", small(), two, (("break", 1), ("cancel", 1))),
        Instance("reuse, lost time", small(), two, (("break", 1), ("pass", 1))),
        Instance("reuse, two breaks", small(), two, (("break", 2), ("cancel at decode", 1))),
        Instance("reuse, death", small(), two, (("die", 1), ("pass", 1))),
        Instance("resume, two breaks", small(), ((2, 2),), (("break", 2), ("corrupt", 1))),
        Instance("resume, given up", small(), ((2, 1),), (("break", 1), ("corrupt", 2), ("cancel", 1))),
        Instance("slots, two writes", small(staged=("full",), slots=2), ((2, 2),), (("break", 1), ("corrupt", 1), ("cancel", 1))),
        Instance("slots, reuse", staged, two, (("break", 1), ("cancel", 1))),
        Instance("deaths", small(), ((1, 1),), (("die", 2), ("break", 1), ("pass", 1))),
        Instance("repeats, twice", small(echoes=8), ((2, 2),), (("break", 1), ("repeat", 2), ("cancel", 1))),
        Instance("two layers", small(groups=(Group("full", (0, 1)),), prefill=(Placed("p", "p", (0, 1), (0,)),),
                 decode=(Placed("d", "d", (0, 1), (0,)),)), ((1, 1),), (("break", 1), ("corrupt", 1), ("cancel", 1))),
        Instance("two writers", small(heads=2, prefill=(Placed("p.0", "p", (0,), (0,)), Placed("p.1", "p", (0,), (1,))),
                 decode=(Placed("d", "d", (0,), (0, 1)),)), ((1, 1),), (("break", 1), ("cancel", 1))),
    ]  # fmt: skip

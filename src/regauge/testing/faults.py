"""Random runs of a simulated cluster over a faulty network: `regauge bench faults`, and `tests/move/test_protocol.py`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from regauge.config import FlowConfig
from regauge.testing.choices import events
from regauge.testing.process import Job
from regauge.testing.shape import MAX_TOKENS, Group, Placed, Setup
from regauge.testing.violation import Violation
from regauge.testing.world import Event, World

GROUPS = (Group("full", (0, 1)), Group("window", (2, 3), 6), Group("recurrent", (4,)))
FLOW = FlowConfig(
    nic_bytes_per_s=200.0, rtt_s=0.05, quantum_bytes=8, stall_s=0.5, unscheduled_bytes=4, unscheduled_budget_bytes=12,
    lease_s=6.0, max_wait_s=5.0,
)  # fmt: skip
"""Bytes are cells: a request has up to some hundreds."""
WORLD_STEPS = 2_000
"""Of one world; then faults end, and everything must come to its end."""
SLOW = (
    "", "hear", "notice", "fence", "close", "check", "written", "land", "obey", "connect", "begin", "compute", "retire"
)  # fmt: skip
"""Kinds of events; some of them happen late in each world."""
FAULTS = ("break", "die", "freeze", "cancel", "lost time", "repeat", "refuse", "corrupt", "part", "error")
"""All kinds of faults; `part`: the network delivers the first half of a write whose writer is gone."""
PART_RATE = 0.5
"""Share of the writes of a writer that is gone which arrive in part: a connection that breaks off seldom does so between two."""
ENDS_OF_FAULTS = {"restart": "processes restarted", "thaw": "processes thawed"}
"""Events that end a fault, and what they are counted as: they are none themselves."""
Split = Literal["one", "heads", "layers"]


class Broken(Violation):
    """A violation, with what is needed to see it again."""

    def __init__(self, error: Violation, seed: int, world: int, last: list[tuple[object, ...]]) -> None:
        lines = [f"  {' '.join(str(x) for x in event)}" for event in last]
        super().__init__("\n".join([f"seed {seed}, world {world}: {error}", "the last events:", *lines]))


@dataclass
class Outcome:
    """What a run has done."""

    steps: int = 0
    worlds: int = 0
    stats: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """How often each of `FAULTS` has struck."""


def ranks(worker: str, split: Split) -> tuple[Placed, ...]:
    """Return a worker's ranks: one with everything, two with a head each, or two with some layers each."""
    all_layers = tuple(layer for group in GROUPS for layer in group.layers)
    if split == "heads":
        return tuple(Placed(f"{worker}.{h}", worker, all_layers, (h,)) for h in (0, 1))
    if split == "layers":
        return (Placed(f"{worker}.0", worker, (0, 1), (0, 1)), Placed(f"{worker}.1", worker, (2, 3, 4), (0, 1)))
    return (Placed(f"{worker}.0", worker, all_layers, (0, 1)),)


def setup(rng: random.Random, prefill: int = 3, decode: int = 2) -> Setup:
    """Draw a cluster: how each worker is split, which chunks are staged, slots, depths, and whether credit is given."""
    return Setup(
        GROUPS,
        tuple(r for i in range(prefill) for r in ranks(f"p{i}", rng.choice(["one", "heads", "layers"]))),
        tuple(r for i in range(decode) for r in ranks(f"d{i}", rng.choice(["one", "heads"]))),
        slots=rng.choice([1, 2, 4]),
        slot_cells=rng.choice([2, 8, 20]),
        chunk_cells=rng.choice([4, 24, 400]),
        depth=rng.choice([1, 2, 3]),
        staged=tuple(group.kind for group in GROUPS if rng.random() < 0.5),
        flow=FLOW if rng.random() < 0.5 else None,
        most_writes=rng.choice([2, 1 << 30]),
        echoes=12,
    )


def draw_job(rng: random.Random, world: World, number: int) -> Job:
    """Draw a request to a prefill and a decode worker."""
    p, d = rng.choice(world.setup.prefill).worker, rng.choice(world.setup.decode).worker
    tokens = rng.randint(1, MAX_TOKENS // 3)
    first = rng.randrange(tokens) if rng.random() < 0.3 else 0
    at, chunks = rng.choice([0, first]), []
    while at < tokens:
        end = min(tokens, at + rng.randint(1, 12))
        chunks.append((at, end))
        at = end
    return Job(f"t{number}", number, tokens, first, tuple(r.name for r in world.setup.prefill if r.worker == p),
               tuple(r.name for r in world.setup.decode if r.worker == d), tuple(chunks))  # fmt: skip


class Driver:
    """Lets events and faults happen in a world as a random number generator says."""

    def __init__(self, world: World, rng: random.Random, *, harsh: float) -> None:
        self.world = world
        self.rng = rng
        self.faults: Counter[str] = Counter()
        self.steps = 0
        self._made = 0
        self._slow = rng.sample(SLOW, 2)
        self._fault_rate = 0.06 * harsh
        self._spoil_rate = rng.choice([0.0, 0.03, 0.25]) * harsh
        self._weights = [weight * rng.choice([0, 1, 1, 4]) for weight in (6, 2, 3, 6, 1, 8, 1)] + [10]

    def run(self, steps: int) -> None:
        """Take so many steps. Raises Violation."""
        rng, world = self.rng, self.world
        for _ in range(steps):
            chance = rng.random()
            if chance < self._fault_rate:
                self._fault()
            elif chance < self._fault_rate + 0.01:
                self._step(("pass", rng.choice([0.05, 0.2, 0.5])))
            elif len(world.jobs) < 6 and rng.random() < 0.1:
                world.add(draw_job(rng, world, self._made))
                self._made += 1
            elif found := events(world):
                event = rng.choice(found)
                for _ in range(6):
                    if event[0] not in self._slow:
                        break
                    event = rng.choice(found)
                self._step(self._spoil(event))

    def settle(self) -> None:
        """No more faults: everything must come to its end in bounded time. Raises Violation if it does not."""
        world, times = self.world, self.world.setup.times
        for name, process in world.processes.items():
            if not process.alive:
                self._step(("restart", name))
            elif process.frozen:
                self._step(("thaw", name))
        until = world.now + 2 * times.bound + times.lease + times.resume
        while world.now < until:
            while found := events(world):
                self._step(self.rng.choice(found))
            if not world.jobs:
                break
            self._step(("pass", 1.0))
        self._check_empty()

    def _check_empty(self) -> None:
        world = self.world
        self._step(("pass", world.setup.times.offer))
        for job in world.jobs.values():
            raise Violation(f"{job.name} has not ended: {job}")
        for name, process in world.processes.items():
            if left := process.machine.transfers(world.now):
                raise Violation(f"{name} has not forgotten {left}")
            if process.pool.free != process.pool.pages:
                raise Violation(f"{name}: {process.pool.free} of {process.pool.pages} pages are free")
            if process.receiver is None:
                continue
            flow = process.receiver.flow
            if process.receiver._early or process.receiver._flowing or (flow is not None and flow.transfers):
                raise Violation(f"{name} keeps offers that nobody asked for, or credit for what is over")
        for link in world.links.values():
            sender = world.processes[link.p].sender
            free = 0 if sender is None else sender.free_slots(link.d)
            if free != world.setup.slots:
                raise Violation(f"{free} of {world.setup.slots} staging slots from {link.p} to {link.d} are free")

    def _step(self, event: Event) -> None:
        self.steps += 1
        self.world.apply(event)

    def _spoil(self, event: Event) -> Event:
        if event[0] == "check":
            rate, fault = 0.1 * self._spoil_rate, "error"
        elif event[0] != "land":
            return event
        elif self.world.links[int(event[1])].flights[int(event[2])].cells is None:
            rate, fault = self._spoil_rate, "corrupt"
        else:
            rate, fault = PART_RATE, "part"
        if self.rng.random() >= rate:
            return event
        self.faults[fault] += 1
        return (*event[:3], fault)

    def _fault(self) -> None:
        drawn: Callable[[], Event | None] = self.rng.choices(
            (self._break, self._die, self._freeze, self._cancel, self._lose_time, self._repeat, self._refuse,
             self._restore),
            self._weights,
        )[0]  # fmt: skip
        event = drawn()
        if event is None:
            return
        if event[0] in ENDS_OF_FAULTS:
            self.world.stats[ENDS_OF_FAULTS[event[0]]] += 1
        else:
            self.faults["lost time" if event[0] == "pass" else str(event[0])] += 1
        self._step(event)

    def _break(self) -> Event | None:
        links = [link for link in self.world.links.values() if not link.broken]
        busy = [1 + 4 * (len(link.flights) + 2 * len(link.checks)) for link in links]
        return ("break", self.rng.choices(links, busy)[0].number) if links else None

    def _die(self) -> Event | None:
        alive = {name: 1 for name, process in self.world.processes.items() if process.alive}
        for link in self.world.links.values():
            for name in {link.p, link.d} & alive.keys():
                alive[name] += 2 * (len(link.flights) + len(link.checks))
        return ("die", self.rng.choices(list(alive), list(alive.values()))[0]) if alive else None

    def _freeze(self) -> Event | None:
        running = [name for name, process in self.world.processes.items() if process.runs]
        return ("freeze", self.rng.choice(running)) if running else None

    def _restore(self) -> Event | None:
        down = [name for name, process in self.world.processes.items() if not process.runs]
        if not down:
            return None
        name = self.rng.choice(down)
        return ("thaw" if self.world.processes[name].alive else "restart", name)

    def _cancel(self) -> Event | None:
        open_ = [
            (name, side.job.name)
            for name, process in self.world.processes.items() if process.runs
            for side in process.sides.values() if not side.ended
        ]  # fmt: skip
        return ("cancel", *self.rng.choice(open_)) if open_ else None

    def _lose_time(self) -> Event | None:
        return ("pass", self.rng.choice([2.0, 7.0, 13.0, 45.0]))

    def _refuse(self) -> Event | None:
        world = self.world
        apart = [(p, d) for p, d in world.pairs if world.processes[p].runs and d not in world.processes[p].links]
        return ("refuse", *self.rng.choice(apart)) if apart else None

    def _repeat(self) -> Event | None:
        rng, world = self.rng, self.world
        choices: list[Event] = []
        for link in world.links.values():
            old = world.echoes.get((link.p, link.d))
            if old is None or (old.p_instance, old.d_instance) != (link.p_instance, link.d_instance):
                continue
            if old.said_d and link.d_end in ("opening", "up"):
                choices.append(("repeat", link.number, link.d, rng.randrange(len(old.said_d)), rng.randrange(4)))
            if old.said_p and link.p_end == "up":
                choices.append(("repeat", link.number, link.p, rng.randrange(len(old.said_p)), rng.randrange(4)))
        return rng.choice(choices) if choices else None


def run_world(
    seed: int, number: int, steps: int, change: Callable[[Setup], Setup] = lambda s: s, *, harsh: float | None = None
) -> Driver:
    """Run one world for so many steps, then to its end; `harsh`: 0 for no faults, 1 for most. Raises Broken."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311  # a repeatable run
    world = World(change(setup(rng)))
    drawn = rng.choice([0.0, 0.2, 0.5, 1.0])
    driver = Driver(world, rng, harsh=drawn if harsh is None else harsh)
    try:
        driver.run(steps)
        driver.settle()
    except Violation as error:
        raise Broken(error, seed, number, list(world.last)) from error
    return driver


def run(steps: int, seed: int, report: Callable[[Outcome], None] = lambda _: None) -> Outcome:
    """Run worlds until so many steps are taken. Raises Broken."""
    outcome = Outcome()
    while outcome.steps < steps:
        driver = run_world(seed, outcome.worlds, min(WORLD_STEPS, steps - outcome.steps))
        outcome.steps += driver.steps
        outcome.worlds += 1
        outcome.stats.update(driver.world.stats)
        outcome.faults.update(driver.faults)
        report(outcome)
    return outcome

"""Networks and flows, random but repeatable, and the times at which the flows end, by us and by SimGrid."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from regauge.sim.clock import Clock
from regauge.sim.network import Flow, Network
from regauge.sim.topology import Ends, FatTree, Racks, Rails, Single, Topology

PROGRAM = Path(__file__).parent / "simgrid_run.py"
PYTHON = "/usr/bin/python3"
"""Debian's, for which its packages are made."""
NIC = 50e9
"""Bytes per second: 400 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A flow: when it begins, its bytes, the links that it crosses."""

    at: float
    size: float
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A link gets another rate, less than it had."""

    at: float
    link: str
    rate: float


@dataclass(frozen=True, slots=True)
class Case:
    """What both are asked."""

    links: dict[str, float]
    flows: tuple[Sent, ...]
    changes: tuple[Change, ...] = ()


def incast(senders: int, size: float) -> Case:
    """Return so many transfers at once into one NIC."""
    links = {f"p{i}": NIC for i in range(senders)} | {"d0": NIC}
    return Case(links, tuple(Sent(0.0, size, (f"p{i}", "d0")) for i in range(senders)))


def _topology(draw: random.Random, ends: Ends) -> Topology:
    shape = draw.choice(["single", "racks", "tree", "rails"])
    if shape == "racks":
        return Racks(ends, draw.randint(2, 3), draw.randint(1, 2), draw.choice([10e9, 25e9, 50e9]))
    if shape == "tree":
        return FatTree(ends, 6, draw.choice([25e9, 50e9]))
    return Rails(ends, draw.randint(1, 2), draw.choice([10e9, 50e9])) if shape == "rails" else Single(ends)


def random_case(seed: int, flows: int = 60) -> Case:
    """Return a random topology with unlike NICs, flows that overlap, and links that become slower.

    Not faster: SimGrid 3.32 holds a flow to the least rate that its links had when it began (30 GB over a link of 10 GB/s that is one of
    20 GB/s from the first second on take 3 s there, not 2). Ports that become faster are compared with `regauge.sim.reference`.
    """
    draw = random.Random(seed)  # no secret
    ends = Ends(draw.randint(2, 12), draw.randint(1, 4), draw.choice([1, 2]), draw.choice([1, 2]))
    topology = _topology(draw, ends)
    nics = {f"p{i}.{n}": draw.choice([25e9, 50e9]) for i in range(ends.senders) for n in range(ends.sender_nics)}
    nics |= {
        f"d{i}.{n}": draw.choice([12.5e9, 25e9, 50e9]) for i in range(ends.receivers) for n in range(ends.receiver_nics)
    }
    links = nics | topology.ports()
    sent, now = [], 0.0
    for number in range(flows):
        now += draw.expovariate(8.0)
        ours, theirs = (
            (draw.randrange(ends.senders), draw.randrange(ends.sender_nics)),
            (draw.randrange(ends.receivers), draw.randrange(ends.receiver_nics)),
        )
        way = (f"p{ours[0]}.{ours[1]}", *topology.path(*ours, *theirs, number), f"d{theirs[0]}.{theirs[1]}")
        sent.append(Sent(now, float(int(draw.lognormvariate(22.0, 1.0))), way))
    used = sorted({link for flow in sent for link in flow.links})
    changes = [
        Change(draw.uniform(0, now), link, links[link] * draw.choice([0.2, 0.5]))
        for link in draw.sample(used, min(3, len(used)))
    ]
    return Case(links, tuple(sent), tuple(changes))


def ours(case: Case) -> list[float]:
    """Return the seconds at which the flows end by `regauge.sim.network`."""
    clock = Clock()
    network = Network(clock, case.links)
    ended = [0.0] * len(case.flows)

    def begin(index: int) -> None:
        flow: Flow = network.open(case.flows[index].links, lambda: ended.__setitem__(index, clock.now))
        network.add(flow, case.flows[index].size, last=True)

    for index, flow in enumerate(case.flows):
        clock.at(flow.at, lambda index=index: begin(index))  # type: ignore[misc]
    for change in case.changes:
        clock.at(change.at, lambda change=change: network.port(change.link, change.rate))  # type: ignore[misc]
    clock.run()
    return ended


def theirs(case: Case, *, defaults: bool = False) -> list[float]:
    """Return them by SimGrid; `defaults`: with what it takes for TCP left on."""
    asked = json.dumps(asdict(case) | {"defaults": defaults})
    done = subprocess.run([PYTHON, str(PROGRAM)], input=asked, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"SimGrid does not run: scripts/install-simgrid\n{done.stderr[-2000:]}")
    return [float(each) for each in json.loads(done.stdout)]

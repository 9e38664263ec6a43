"""The fluid network: agreement with queueing theory and with SimGrid, and CPU time per change. SIMULATED transfers.

    python bench/fluid.py [--arrivals N] [--cases N] [--rounds N] [--only theory|simgrid|incast|cpu] [--json]

theory: one port with Poisson arrivals. Mean slowdown of M/G/1-PS is 1/(1 - load) for all sizes; mean response by SRPT is Schrage and Miller's integral, M/D/1's Pollaczek and
Khinchine's. error %: over theory; chance %: standard error of the simulated mean, from 20 batches.
simgrid: random topologies, flows and links that become slower, in SimGrid with its TCP switched off (tests/real_simgrid/simgrid_run.py has the settings), and, as a check
that the two are not one program, with SimGrid's own defaults. Without SimGrid (scripts/install-simgrid) this part says so and is left out.
incast: simultaneous transfers into one NIC, over the time of one.
cpu: fleets whose prompts become ready while they are computed. A change is a call that gives bytes, or an event at which a flow runs dry, stops producing or is done; its cost
is all of the loop's CPU time, clock and arrivals included. plain: `regauge.sim.reference`, which works everything out again at every change. Medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import print_table, write_json
from regauge._native import Fluid
from regauge.sim import reference
from regauge.sim.clock import Clock
from regauge.sim.network import Network
from regauge.sim.topology import Ends, Racks, Single

sys.path.append(str(Path(__file__).parents[1] / "tests" / "sim"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "real_simgrid"))

import queue_theory as queue
import simgrid_cases as simgrid

Rows = list[dict[str, object]]
CASES = [("ps", load, sizes) for load in (0.5, 0.8) for sizes in queue.SIZES]
CASES += [("srpt", load, sizes) for load in (0.5, 0.8) for sizes in ("exponential", "heavy-tailed")]
CASES += [("fifo", load, "deterministic") for load in (0.5, 0.8)]
LIMIT = 0.02
"""Of all errors."""


def theory(options: argparse.Namespace) -> Rows:
    """At load 0.8 twice as many arrivals: chance is greater there."""
    rows: Rows = []
    for order, load, sizes in CASES:
        arrivals = options.arrivals * (2 if load > 0.5 else 1)
        found, expected = queue.measure(order, load, sizes, arrivals), queue.expected(order, load, sizes)
        off, chance = found.mean / expected - 1, found.error / found.mean
        rows.append(
            {"queue": order, "load": load, "sizes": sizes, "arrivals": arrivals, "mean": found.mean, "theory": expected,
             "error %": off * 100, "chance %": chance * 100}
        )  # fmt: skip
    return rows


def against_simgrid(options: argparse.Namespace) -> Rows:
    """Largest and mean difference of a flow's time, over all cases."""
    rows: Rows = []
    for name, defaults in (("TCP off", False), ("SimGrid's defaults", True)):
        errors, flows = [], 0
        for seed in range(options.cases):
            case = simgrid.random_case(seed)
            ours, theirs = simgrid.ours(case), simgrid.theirs(case, defaults=defaults)
            errors += [abs((a - s.at) / (b - s.at) - 1) for a, b, s in zip(ours, theirs, case.flows, strict=True)]
            flows += len(case.flows)
        rows.append(
            {"settings": name, "cases": options.cases, "flows": flows, "mean error %": statistics.fmean(errors) * 100,
             "largest error %": f"{max(errors) * 100:.2g}"}
        )  # fmt: skip
    return rows


def incast(options: argparse.Namespace) -> Rows:
    """1 GB of each sender, NICs of 50 GB/s."""
    one = max(simgrid.ours(simgrid.incast(1, 1e9)))
    rows: Rows = []
    for senders in (1, 2, 12, 96):
        case = simgrid.incast(senders, 1e9)
        row: dict[str, object] = {"senders": senders, "seconds": max(simgrid.ours(case))}
        row["times one"] = max(simgrid.ours(case)) / one
        if options.simgrid:
            row["SimGrid, times one"] = max(simgrid.theirs(case)) / one
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class Load:
    """Workers, and what they send."""

    prefills: int
    decodes: int
    nics: int
    """Of a decode worker."""
    nic: float
    """Bytes per second, of a decode NIC; a prefill worker has one of 50 GB/s."""
    rate: float
    """Transfers per second."""
    size: float
    seconds: float
    """Means of a transfer's bytes and of the time over which they become ready."""
    racks: int = 0
    """With two uplinks of 50 GB/s each; 0: one switch."""

    def __str__(self) -> str:
        return f"{self.prefills} + {self.decodes} x {self.nics} NICs" + (f", {self.racks} racks" if self.racks else "")


LOADS = [
    Load(12, 4, 1, 12.5e9, 8.0, 5e9, 2.0),
    Load(12, 4, 8, 12.5e9, 30.0, 8e9, 2.0),
    Load(96, 32, 1, 12.5e9, 64.0, 5e9, 2.0),
    Load(96, 32, 8, 12.5e9, 150.0, 8e9, 2.0),
    Load(96, 32, 1, 25e9, 150.0, 5e9, 4.0),
    Load(96, 1, 1, 50e9, 8.0, 5e9, 4.0),
    Load(96, 32, 8, 12.5e9, 90.0, 8e9, 2.0, racks=8),
]


class Drive:
    """Poisson transfers of a load between random workers; a decode worker's NICs are taken in turn."""

    def __init__(self, load: Load, transfers: int, fluid: Fluid | reference.Fluid) -> None:
        self.load, self.left, self.clock = load, transfers, Clock()
        ports = {f"p{i}": 50e9 for i in range(load.prefills)}
        ports |= {f"d{i}.{n}": load.nic for i in range(load.decodes) for n in range(load.nics)}
        ends = Ends(load.prefills, load.decodes, 1, load.nics)
        self.topology = Racks(ends, load.racks, 2, 50e9, 256) if load.racks else Single(ends, 1024)
        self.network = Network(self.clock, ports | self.topology.ports(), fluid)
        self.draw = random.Random(7)  # noqa: S311  # no secret
        self.going, self.most, self.ended = 0, 0, 0.0

    def run(self) -> float:
        """Return the CPU seconds of all transfers."""
        self.clock.at(0.0, self.arrive)
        begun = time.process_time()
        self.clock.run()
        return time.process_time() - begun

    def arrive(self) -> None:
        """Begin a transfer, and come again for the next."""
        draw, load, network = self.draw, self.load, self.network
        self.left -= 1
        ours, theirs, nic = draw.randrange(load.prefills), draw.randrange(load.decodes), self.left % load.nics
        between = self.topology.path(ours, 0, theirs, nic, self.left)
        flow = network.open((f"p{ours}", *between, f"d{theirs}.{nic}"), self.done)
        scale = draw.uniform(0.2, 1.8)
        network.produce(flow, scale * load.size, scale * load.seconds, last=True)
        self.going += 1
        self.most = max(self.most, self.going)
        if self.left:
            self.clock.after(draw.expovariate(load.rate), self.arrive)

    def done(self) -> None:
        """Count a transfer that is over."""
        self.going -= 1
        self.ended = self.clock.now


class Counted(Fluid):
    """Counts what changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def produce(self, flow: int, size: float, seconds: float, over: bool, now: float) -> float:
        """Count a call."""
        self.changes += 1
        return super().produce(flow, size, seconds, over, now)

    def due(self, now: float) -> tuple[list[int], float]:
        """Count an event; the clock may call without one."""
        self.changes += self.next() <= now
        return super().due(now)


def cpu(options: argparse.Namespace) -> Rows:
    """The plain engine gets fewer transfers: it is slow, and its cost a change soon is steady."""
    rows: Rows = []
    for load in LOADS:
        transfers = {"compiled": 20_000, "plain": 400}
        engines: dict[str, Callable[[], Fluid | reference.Fluid]] = {"compiled": Fluid, "plain": reference.Fluid}
        changes, spent = {}, {name: list[float]() for name in engines}
        for name, count in transfers.items():
            counted = Counted()
            drive = Drive(load, count, counted)
            drive.run()
            changes[name] = counted.changes
        for _ in range(options.rounds):
            for name, engine in engines.items():
                spent[name].append(Drive(load, transfers[name], engine()).run() / changes[name] * 1e6)
        us = {name: statistics.median(each) for name, each in spent.items()}
        drive = Drive(load, transfers["compiled"], Fluid())
        drive.run()
        reached = sum(drive.network.carried(port) for port in drive.network.ports if port[0] == "d")
        busy = reached / (load.nic * load.decodes * load.nics * drive.ended)
        rows.append(
            {"workers": str(load), "transfers/s": load.rate, "most at once": drive.most, "NICs busy %": busy * 100,
             "changes/transfer": changes["compiled"] / transfers["compiled"], "us/change": us["compiled"], "plain us/change": us["plain"],
             "times": us["plain"] / us["compiled"]}
        )  # fmt: skip
    return rows


def main() -> None:
    """Print all parts; fails where something is off by more than 2 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrivals", type=int, default=1_000_000)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["theory", "simgrid", "incast", "cpu"])
    parser.add_argument("--json", action="store_true", help="also write bench/out/fluid.json")
    options = parser.parse_args()
    installed = subprocess.run([simgrid.PYTHON, "-c", "import simgrid"], capture_output=True, check=False)
    options.simgrid = installed.returncode == 0
    parts: dict[str, Callable[[argparse.Namespace], Rows]] = {"theory": theory, "incast": incast, "cpu": cpu}
    if options.simgrid:
        parts["simgrid"] = against_simgrid
    else:
        print("without SimGrid, which is not installed: scripts/install-simgrid")
    found: dict[str, Rows] = {}
    for name, part in parts.items():
        if options.only in (None, name):
            found[name] = part(options)
            print(f"\n{name}")
            print_table(found[name])
    if options.json:
        write_json("fluid", found)
    off = [row for row in found.get("theory", []) if abs(float(str(row["error %"]))) > LIMIT * 100]
    off += [row for row in found.get("simgrid", [])[:1] if float(str(row["largest error %"])) > LIMIT * 100]
    off += [
        row
        for row in found.get("incast", [])
        if abs(float(str(row["times one"])) / int(str(row["senders"])) - 1) > LIMIT
    ]
    if off:
        raise SystemExit(f"off by more than 2 %: {off}")


if __name__ == "__main__":
    main()

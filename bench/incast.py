"""Twelve prefill NICs into one decode NIC: transfer time against the best order, deadline misses, goodput. Simulated.

    python bench/incast.py [--seeds N] [--only WORD] [--json] [--svg FILE]

The network is a model (`incast_model.py` says which: 12 senders and one receiver port at 400 Gbit/s, 0.25 ms each way, 64 MiB of buffer); the flow control is the real code.
Sizes are those of real requests (`incast_sizes.py`), arrivals Poisson at a load, or 12 at a time. Each transfer has a deadline: 10 ms and 2 to 8 times what it takes
alone. `ideal` serves the shortest remaining first on a fluid receiver, for the same arrivals: no order has a lower mean, and it knows no deadlines.

P99, mean: of the time from ready to landed, over the ideal's. slow: P99 over transfers of time / ideal time. miss: share past the deadline.
wasted: bytes dropped or sent in vain, over useful ones. goodput loss: 60 transfers ready at once, 1 - bytes / (rate x time until all have landed).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from harness import print_table, write_json
from incast_model import Arrival, Incast, Outcome, Port, ideal
from incast_plot import draw
from incast_sizes import MIXES, Mix
from regauge.config import FlowConfig
from regauge.move.flow_types import CREDIT, FAIR_SHARE, PEER_FIFO, UNCONTROLLED, Policy

P99_LIMIT = 1.3
LOSS_LIMIT = 0.03
LOADS = (("0.5", 0.5, 1), ("0.8", 0.8, 1), ("0.95", 0.95, 1), ("0.5, 12 at once", 0.5, 12))


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to control, on one kind of fabric."""

    name: str
    policy: Policy
    full: Literal["drop", "pause"]
    late: Literal["shared", "last"] = "shared"


CONTENDERS = (
    Contender("regauge", CREDIT, "drop"),
    Contender("regauge, late last", CREDIT, "drop", "last"),
    Contender("no control, drops", UNCONTROLLED, "drop"),
    Contender("no control, pauses", UNCONTROLLED, "pause"),
    Contender("FIFO per peer, pauses", PEER_FIFO, "pause"),
    Contender("fair share with ECN", FAIR_SHARE, "pause"),
)


def limits(mix: Mix, late: Literal["shared", "last"]) -> FlowConfig:
    """What an operator would set: a quantum of one slice, a delay's worth of bytes unscheduled."""
    return FlowConfig(
        quantum_bytes=mix.slice_bytes, unscheduled_bytes=25_000_000, unscheduled_budget_bytes=50_000_000, late=late
    )


def arrivals(mix: Mix, load: float, at_once: int, seed: int, port: Port) -> list[Arrival]:
    """Draw transfers; `at_once` come together, each from a sender of its own."""
    rng = np.random.default_rng(seed)
    sizes = mix.draw(mix.transfers, rng)
    gap = at_once * float(np.mean(sizes)) / port.bytes_per_s / load
    times = port.lead_s + np.cumsum(rng.exponential(gap, len(sizes) // at_once + 1))
    out = []
    for i, nbytes in enumerate(sizes):
        sender = i % port.senders if at_once > 1 else int(rng.integers(port.senders))
        ready = float(times[i // at_once])
        due = ready + 0.01 + float(rng.uniform(2, 8)) * nbytes / port.bytes_per_s
        out.append(Arrival(f"t{i}", sender, nbytes, ready, due))
    return out


def play(mix: Mix, who: Contender, arrived: Sequence[Arrival], port: Port) -> Outcome:
    """Run one contender."""
    port = dataclasses.replace(port, full=who.full)
    return Incast(port, who.policy, limits(mix, who.late), mix.slice_bytes).run(arrived)


def goodput_loss(mix: Mix, who: Contender, seed: int, port: Port) -> float:
    """Everything is ready at once: what share of the receiver's rate is lost until all has landed?"""
    rng = np.random.default_rng(seed)
    sizes = mix.draw(60, rng)
    now = port.lead_s
    arrived = [Arrival(f"t{i}", i % port.senders, n, now, now + 1e6) for i, n in enumerate(sizes)]
    took = play(mix, who, arrived, port).makespan - now
    return 1 - sum(sizes) / port.bytes_per_s / took


def row(mix: Mix, label: str, who: Contender, runs: Sequence[Sequence[Arrival]], port: Port) -> dict[str, object]:
    """Pool the runs of one contender at one load."""
    ours, best = np.empty(0), np.empty(0)
    misses, wasted, useful = 0, 0, 0
    for arrived in runs:
        outcome = play(mix, who, arrived, port)
        reference = ideal(arrived, port.bytes_per_s, port.one_way_s)
        ours = np.append(ours, [outcome.seconds[a.name] for a in arrived])
        best = np.append(best, [reference[a.name] for a in arrived])
        misses += outcome.misses
        wasted += outcome.dropped + outcome.wasted
        useful += sum(a.nbytes for a in arrived)
    p99, ideal99 = float(np.quantile(ours, 0.99)), float(np.quantile(best, 0.99))
    return {
        "mix": mix.name, "load": label, "control": who.name, "P99 ms": p99 * 1e3, "ideal ms": ideal99 * 1e3,
        "P99": p99 / ideal99, "mean": float(ours.mean() / best.mean()), "slow": float(np.quantile(ours / best, 0.99)),
        "miss": misses / len(ours), "wasted": wasted / useful,
    }  # fmt: skip


def ideal_misses(runs: Sequence[Sequence[Arrival]], port: Port) -> float:
    """Share of deadlines that the ideal's order misses."""
    missed = []
    for arrived in runs:
        seconds = ideal(arrived, port.bytes_per_s, port.one_way_s)
        missed += [seconds[a.name] > a.deadline - a.ready for a in arrived]
    return float(np.mean(missed))


def measure(seeds: int, only: str) -> dict[str, list[dict[str, object]]]:
    port = Port()
    rows: list[dict[str, object]] = []
    losses: list[dict[str, object]] = []
    for mix in MIXES:
        if only not in mix.name:
            continue
        for label, load, at_once in LOADS:
            runs = [arrivals(mix, load, at_once, seed, port) for seed in range(seeds)]
            none = [[dataclasses.replace(a, deadline=1e9) for a in run] for run in runs]
            plain = row(mix, label, CONTENDERS[0], none, port)
            # Without deadlines there are none to miss.
            rows.append({**plain, "control": "regauge, no deadlines", "miss": 0.0})
            rows += [row(mix, label, who, runs, port) for who in CONTENDERS]
            rows.append({**rows[-1], "control": "ideal", "P99 ms": rows[-1]["ideal ms"], "P99": 1.0, "mean": 1.0, "slow": 1.0,
                         "miss": ideal_misses(runs, port), "wasted": 0.0})  # fmt: skip
            print_table(rows[-len(CONTENDERS) - 2 :])
            print(flush=True)
        for who in CONTENDERS:
            losses.append({"mix": mix.name, "control": who.name, "goodput loss": goodput_loss(mix, who, 0, port)})  # noqa: PERF401  # takes seconds each
    return {"times": rows, "goodput": losses}


def verdict(found: dict[str, list[dict[str, object]]]) -> None:
    """Print what was aimed at beside what came out."""
    for name in ("regauge, no deadlines", "regauge"):
        worst = max((r for r in found["times"] if r["control"] == name), key=lambda r: float(str(r["P99"])))
        print(
            f"{name}: P99 at most {worst['P99']:.2f} x the ideal ({worst['mix']}, load {worst['load']}); target {P99_LIMIT}"
        )
    loss = max(float(str(r["goodput loss"])) for r in found["goodput"] if r["control"] == "regauge")
    print(f"goodput loss at most {loss:.2%}; target {LOSS_LIMIT:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="run only mixes whose name contains this")
    parser.add_argument("--json", action="store_true", help="also write bench/out/incast.json")
    parser.add_argument("--svg", type=Path, help="also draw the figures")
    args = parser.parse_args()
    start = time.process_time()
    found = measure(args.seeds, args.only)
    print_table(found["goodput"])
    verdict(found)
    print(f"{time.process_time() - start:.0f} s of CPU")
    if args.json:
        print(write_json("incast", found))
    if args.svg:
        args.svg.write_text(draw(found["times"]))


if __name__ == "__main__":
    main()

"""What a decision of flow control costs: CPU microseconds per landed chunk, with N transfers waiting on one NIC.

    python bench/flow_cost.py [--rounds N]

Each landing frees a quantum and grants the next. At 400 Gbit/s a quantum of 16 MiB passes in 336 us, so that is the limit for one core.
"""

from __future__ import annotations

import argparse
import statistics
import time

from harness import print_table
from regauge.config import FlowConfig
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_types import Credit, Demand, FlowAction, NicLimits

QUANTUM = 16 << 20
LIMIT_US = QUANTUM / 50e9 * 1e6


def landings(waiting: int, deadlines: bool, count: int) -> float:
    """Return the microseconds of CPU per landing."""
    flow = ReceiverFlow([NicLimits("rx", 50e9, 0.001)], limits=FlowConfig(quantum_bytes=QUANTUM, max_wait_s=1e9))
    nbytes = QUANTUM * (count // waiting + 64)
    landed: dict[str, int] = {}
    queue: list[str] = []

    def take(actions: list[FlowAction]) -> None:
        queue.extend(a.transfer for a in actions if isinstance(a, Credit))

    for i in range(waiting):
        name = f"t{i}"
        due = 1.0 + i * nbytes / 25e9 if deadlines else None
        take(flow.arrive(Demand(name, str(i % 12), nbytes, deadline=due), 0.0))
        take(flow.backlog(name, nbytes, 0.0))
    now, start, done = 0.0, time.process_time(), 0
    while done < count and queue:
        name = queue.pop(0)
        if name not in flow.transfers or flow.transfers[name].outstanding == 0:
            continue
        upto = flow.transfers[name].granted
        landed[name] = min(landed.get(name, 0) + QUANTUM, upto)
        now += QUANTUM / 50e9
        if landed[name] < upto:
            queue.append(name)
        take(flow.landed(name, landed[name], now))
        if landed[name] == nbytes:
            take(flow.end(name, now))
        done += 1
    return (time.process_time() - start) / done * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for waiting in (1, 12, 100, 1000):
        rounds = [(landings(waiting, False, 400), landings(waiting, True, 400)) for _ in range(args.rounds)]
        rows.append({
            "waiting": waiting,
            "us": statistics.median(r[0] for r in rounds), "us, deadlines": statistics.median(r[1] for r in rounds),
            "us at 400 Gbit/s": LIMIT_US,
        })  # fmt: skip
    print_table(rows)


if __name__ == "__main__":
    main()

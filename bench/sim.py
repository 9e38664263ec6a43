"""How fast the simulator is: requests and events per CPU second from 10^4 to 10^6 requests, memory, and a peer on the same trace. SIMULATED.

    python bench/sim.py --trace mooncake_conversation.jsonl [--requests 10000 100000 1000000] [--rounds N] [--peer] [--json]

Scaling: Mooncake's conversation trace as 84 groups of users at once (283 requests a second) on 96 prefill and 32 decode workers, network-aware routing by the
gateway's own router, its reports every 0.5 s. Each size is a process of its own, whose CPU seconds, all that it does from reading the trace to the log's columns,
and whose most memory are shown; start and imports are apart.

`--peer`: the trace as it is on 12 + 4 workers, here and in ai-dynamo 1.4.2's replay simulator (`scripts/install-dynamo`), rounds in turn, medians; then 12 transfers of 8.6 GB at
once into one decode worker with 1 GB/s, for both. Levels: what one request costs with max-min fair transfers, under the real flow control, and by the real protocol machines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import peers_dynamo
from harness import print_table, write_json
from regauge.config import RouteConfig
from regauge.sim.cluster import Cluster, Level
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.fleet import Fleet
from regauge.sim.trace import BLOCK, Arrival, read
from regauge.sim.trace_shape import replicas

COPIES = 84
LIMIT_S, LIMIT_BYTES = 600.0, 4 << 30
"""A million requests, on one core."""
TIMES = 10.0
"""What the peer simulates per CPU second, so many times."""
LARGE = Cluster(
    96, 32, PrefillModel(45_000.0), DecodeModel(slots=256, pages=200_000, step_more_s=0.0001), prefill_nic=50e9, decode_nic=50e9,
)  # fmt: skip
SMALL = Cluster(
    12, 4, PrefillModel(20_000.0, cache_blocks=16_384), DecodeModel(slots=256, pages=200_000), prefill_nic=50e9,
    decode_nic=50e9, bytes_per_token=131_072.0,
)  # fmt: skip


def simulate(cluster: Cluster, arrivals: Iterable[Arrival], began: float) -> dict[str, object]:
    """Serve the arrivals; `began`: the process's CPU time from which to count."""
    result = Fleet(cluster, RouteConfig(block_tokens=BLOCK), 1).run(arrivals)
    cpu, log = time.process_time() - began, result.log
    return {
        "requests": len(log),
        "CPU s": cpu,
        "requests/CPU s": round(len(log) / cpu),
        "us/request": cpu / len(log) * 1e6,
        "events/CPU s": round(result.events / cpu),
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "simulated s": result.seconds,
        "complete": float(log.complete.mean()),
        "TTFT mean": float(log.ttft().mean()),
        "hit": result.hit,
        "prefill": result.prefill_busy,
        "NICs": result.decode_nic_busy,
    }


def child(kind: str, trace: Path, requests: int, level: Level) -> dict[str, object]:
    """Run one case in this process."""
    began = time.process_time()
    loaded = read(trace)
    if kind == "large":
        return simulate(LARGE, islice(replicas(loaded, COPIES, 1), requests), began)
    small = dataclasses.replace(SMALL, transfers=level)
    return simulate(small, loaded.arrivals[: requests or None], began)


def apart(kind: str, trace: Path, requests: int = 0, level: Level = "fluid") -> dict[str, object]:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--trace", str(trace), "--child", kind, str(requests), level]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def median(rows: list[dict[str, object]], field: str) -> float:
    return statistics.median(float(str(row[field])) for row in rows)


def burst(senders: int) -> dict[str, object]:
    """Let so many prefill workers send 8.6 GB each to one decode worker at once; seconds until the first and the last has landed."""
    size = 65_536 * peers_dynamo.KV_BYTES
    shape = dataclasses.replace(SMALL, prefills=senders, decodes=1, prefill=PrefillModel(1e12, 0.0), decode_nic=1e9)
    rows: dict[str, object] = {"at once": senders, "a shared port takes s": senders * size / 1e9}
    for level in ("fluid", "flow", "protocol"):
        fleet = Fleet(
            dataclasses.replace(shape, transfers=level), RouteConfig(policy="round-robin", block_tokens=BLOCK)
        )
        log = fleet.run([Arrival(0.0, 65_536, 2, ()) for _ in range(senders)]).log
        rows |= {f"{level}: first": float(log.landed.min()), f"{level}: last": float(log.landed.max())}
    theirs = peers_dynamo.incast(senders)
    return rows | {"ai-dynamo: last": max(each.transfer for each in theirs.each)}


def against_peer(trace: Path, rounds: int) -> tuple[list[dict[str, object]], list[dict[str, object]], float]:
    """Return speeds of both, the incast case, and the quotient of the speeds."""
    ours: list[dict[str, object]] = []
    theirs: list[peers_dynamo.Replay] = []
    for _ in range(rounds):
        ours.append(apart("small", trace))
        theirs.append(peers_dynamo.replay(trace, 12, 4))
    peer = statistics.median(run.per_cpu_s for run in theirs)
    rows: list[dict[str, object]] = [
        {
            "simulator": "regauge", "requests": ours[0]["requests"], "CPU s": median(ours, "CPU s"),
            "requests/CPU s": median(ours, "requests/CPU s"), "MiB": ours[0]["MiB"],
        },
        {
            "simulator": "ai-dynamo 1.4.2", "requests": theirs[0].requests,
            "CPU s": statistics.median(run.cpu_s for run in theirs), "requests/CPU s": peer,
            "MiB": theirs[0].memory >> 20,
        },
    ]  # fmt: skip
    return rows, [burst(senders) for senders in (1, 12)], median(ours, "requests/CPU s") / peer


def levels(trace: Path, rounds: int) -> list[dict[str, object]]:
    """Return what a request costs at each level of detail, on 12 + 4 workers."""
    kinds: tuple[Level, ...] = ("fluid", "flow", "protocol")
    found: dict[str, list[dict[str, object]]] = {level: [] for level in kinds}
    for _ in range(rounds):
        for level in kinds:
            found[level].append(apart("small", trace, 3_000, level))
    return [
        {"transfers": level, "us/request": median(rows, "us/request"), "TTFT mean": rows[0]["TTFT mean"]}
        for level, rows in found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's conversation trace")
    parser.add_argument("--requests", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="also ai-dynamo's replay, and the levels of detail")
    parser.add_argument("--json", action="store_true", help="also write bench/out/sim.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, requests, level = options.child
        print(json.dumps(child(kind, options.trace, int(requests), level)))
        return 0
    failed: list[str] = []
    rows = [apart("large", options.trace, count) for count in options.requests]
    if rows:
        print("96 prefill and 32 decode workers (simulated)")
        print_table(rows)
    million = next((row for row in rows if row["requests"] == 1_000_000), None)
    if million is not None and (median([million], "CPU s") > LIMIT_S or median([million], "MiB") > LIMIT_BYTES >> 20):
        failed.append(f"a million requests took more than {LIMIT_S:.0f} s or {LIMIT_BYTES >> 20} MiB")
    report: dict[str, object] = {"scaling": rows}
    if options.peer:
        try:
            speeds, bursts, times = against_peer(options.trace, options.rounds)
        except peers_dynamo.Missing as error:
            parser.error(str(error))
        print("\n12 prefill and 4 decode workers, the trace as it is (simulated)")
        print_table(speeds)
        print(f"{times:.1f} times the peer's requests per CPU second (limit {TIMES:g})")
        print("\n8.59 GB to one decode worker with 1 GB/s; seconds until it has landed (simulated)")
        print_table(bursts)
        detail = levels(options.trace, options.rounds)
        print("\nWhat a request costs, 12 + 4 workers, the first 3,000 requests (simulated)")
        print_table(detail)
        report |= {"peer": speeds, "times": times, "incast": bursts, "levels": detail}
        if times < TIMES:
            failed.append(f"{times:.1f} times the peer's speed, and not {TIMES:g}")
    if options.json:
        print(write_json("sim", report))
    for what in failed:
        print(f"FAILED: {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""How transfers end when a process is killed or stands still in their middle, and what many transfers leave behind.

    python bench/endings.py [--kinds tcp shm mooncake] [--sides prefill decode] [--rounds N] [--mib N] [--transfers N] [--seed N] [--json]

A prefill and a decode process on this host (`regauge.testing.link_process`), without an engine: pages hold patterns. Every harm
strikes N times, when a drawn share of the transfer has been verified. After each: the transfer has ended on both sides, within its
bound (deadline + lease + time to resume + 2 s, 8 s in all) on whoever ran; what was delivered is what was sent; no page of anybody else has
changed a byte, those that the transfer had and that were given to somebody else included; all pages are free again. Mooncake runs in
carriers: a harm strikes a worker together with them, and the worker alone, in turns. Then many small transfers, of which a quarter is
given up, does not fit, or loses its link; descriptors, threads, shared segments, processes, resident memory and pages before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import random
import statistics
import sys
import time
from collections import Counter
from itertools import product

import msgspec

from harness import print_table, write_json
from regauge.config import TransferConfig
from regauge.testing import data
from regauge.testing.endings import HARMS, SIDES, Ending, Harm, Shape, Side, churn, endure, pair
from regauge.testing.violation import Violation

WAYS = {"tcp": ("staged", "mapped"), "shm": ("fused",), "mooncake": ("staged",)}
"""Modes of each kind; the transfers take them in turn."""
CARRIED = ("mooncake",)
"""What runs in processes beside the workers'."""
INSTALLED = [kind for kind in WAYS if kind not in CARRIED or importlib.util.find_spec(kind)]


def config(kind: str, mode: str, *, deadline_s: float) -> TransferConfig:
    chosen = {
        "transport": kind,
        "mode": mode,
        "lease_s": 1.0,
        "resume_s": 1.0,
        "deadline_s": deadline_s,
        "offer_s": 30.0,
    }
    return msgspec.convert(chosen, TransferConfig)


async def endings(kind: str, mode: str, sides: list[Side], mib: int, rounds: int, seed: int) -> list[dict[str, object]]:
    """Every harm to these sides, so many times."""
    draw = random.Random(f"{kind} {mode} {seed}")  # noqa: S311  # when to harm whom: no secret
    shape = Shape(config(kind, mode, deadline_s=4.0), pages=mib, spare=mib // 2)
    rows = []
    async with pair(shape) as both:
        for victim, harm in product(sides, HARMS):
            found: list[Ending] = []
            broken: list[str] = []
            for i in range(rounds):
                try:
                    alone = kind in CARRIED and i % 2 == 1
                    found.append(await endure(both, victim, harm, draw.random() * 0.7, alone=alone))
                except Violation as violation:
                    broken.append(str(violation))
                    break
            rows.append(row(kind, mode, victim, harm, found, broken))
            print_table(rows[-1:])
            sys.stdout.flush()
            if broken:
                return rows
    return rows


def row(kind: str, mode: str, victim: Side, harm: Harm, found: list[Ending], broken: list[str]) -> dict[str, object]:
    seconds = [e.seconds for e in found] or [0.0]
    reasons = Counter(data.kind(reason) for ending in found for reason in ending.reasons)
    return {
        "transport": kind,
        "mode": mode,
        "harmed": victim,
        "by": harm,
        "times": len(found),
        "in the middle": sum(e.under_way for e in found),
        "delivered": sum(e.delivered for e in found),
        "s to end, median": statistics.median(seconds),
        "worst": max(seconds),
        "reasons": ", ".join(f"{count} {why}" for why, count in reasons.most_common()) or "none",
        "violations": "; ".join(broken) or "none",
    }


async def leaks(kind: str, mode: str, transfers: int, seed: int) -> dict[str, object]:
    """Many small transfers."""
    shape = Shape(config(kind, mode, deadline_s=20.0), pages=64, spare=32, layers=4, heads=2, dim=64)
    begun = time.monotonic()
    async with pair(shape) as both:
        try:
            left = await churn(both, transfers, seed)
        except Violation as violation:
            return {"transport": kind, "mode": mode, "violation": str(violation)}
    used = {
        what: ", ".join(f"{side[0]} {left.before[side][what]} -> {left.after[side][what]}" for side in left.before)
        for what in ("free", "fds", "threads", "segments", "processes", "rss_kib")
    }
    return {
        "transport": kind,
        "mode": mode,
        "transfers": sum(left.counts.values()),
        "delivered": left.delivered,
        "seconds": time.monotonic() - begun,
        **used,
        "left behind": "; ".join(left.more()) or "nothing",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=INSTALLED, choices=list(WAYS), help="default: what is installed")
    parser.add_argument(
        "--rounds", type=int, default=50, help="times that each harm strikes, over the kind's modes; 0: skip"
    )
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES, help="who comes to harm")
    parser.add_argument("--mib", type=int, default=256, help="size of the transfers that come to harm")
    parser.add_argument("--transfers", type=int, default=10_000, help="of the search for leaks; 0: skip")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="also write bench/out/endings.json")
    options = parser.parse_args()
    harmed, left = [], []
    for kind in options.kinds:
        for i, mode in enumerate(WAYS[kind]):
            rounds = options.rounds // len(WAYS[kind]) + (i < options.rounds % len(WAYS[kind]))
            if rounds:
                harmed += asyncio.run(endings(kind, mode, options.sides, options.mib, rounds, options.seed))
        if options.transfers:
            left.append(asyncio.run(leaks(kind, WAYS[kind][0], options.transfers, options.seed)))
    print_table(harmed)
    for each in left:
        print_table([each])
    if options.json:
        print(write_json("endings", {"endings": harmed, "leaks": left}))
    wrong = [r for r in harmed if r["violations"] != "none"] + [r for r in left if r.get("left behind") != "nothing"]
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

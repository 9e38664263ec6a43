"""Promises to clients and to whoever pays, while processes die: `make bench-chaos`.

    .venv/bin/python bench/chaos.py [--requests N] [--seed N] [--gateways N] [--bundled]

One real deployment of local workers, several of each role. All requests are answered in calm weather first; then the same again, while a seeded schedule
kills worker processes (SIGKILL), has them stand still (SIGSTOP) for seconds or for good, and kills the gateway once. Exit code 1 if a promise is broken:
no client hangs, every answer is that of calm weather, every receipt is agreed or void, and what is charged is what clients were told.

`route.poison_kills` and `route.retries` are raised: by default a request stops after two workers that died with it in hand, and here they die at random.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path

from harness import print_table, write_json
from regauge.config import BUNDLED_MODEL
from regauge.testing.chaos import Report, Storm, deployed, ride
from regauge.testing.chaos_clients import draw
from regauge.testing.tiny_models import tiny_model

SETTINGS = (
    "prefill_layout=fp32,page=32,hnd", "decode_layout=fp32,page=16,nhd", "prefill.pool_tokens=4096", "decode.pool_tokens=4096",
    "transfer.lease_s=3", "limits.request_timeout_s=100", "limits.prefill_wait_s=90",
    "route.poison_kills=100", "route.retries=20", "meter.recover_s=5", "meter.collect_s=1",
)  # fmt: skip
"""FP32 on both sides, so that a KV cache which is computed anew is the same to the last bit but for the order of sums."""


async def run(options: argparse.Namespace, folder: Path) -> Report:
    model = BUNDLED_MODEL if options.bundled else str(tiny_model("tiny-llama"))
    name = BUNDLED_MODEL if options.bundled else "tiny-llama"
    counts = (
        f"prefill.workers={options.prefill}",
        f"decode.workers={options.decode}",
        f"gateway.processes={options.gateways}",
    )
    asks = draw(options.seed, options.requests, name, longest=24 if options.bundled else 96)
    storm = Storm(options.seed, every_s=options.every)
    async with deployed(folder, model, (*SETTINGS, *counts)) as served:
        return await ride(served, asks, storm, at_once=options.at_once, limit_s=200)


def show(report: Report) -> None:
    print("\n".join(report.events))
    happened = Counter(" ".join(event.split()[2:3]) for event in report.events)
    times = sorted(got.seconds for got in report.got)
    print(
        f"\n{dict(happened)} in {report.seconds:.0f} s; a client took {times[len(times) // 2]:.1f} s (median), {times[-1]:.1f} s at most"
    )
    print_table([{"clients": name, "": count} for name, count in report.counts.items()])
    print_table([{"attempts, calm and storm": name, "": count} for name, count in sorted(report.entries.items())])
    print_table([{"tokens, calm and storm": name, "": count} for name, count in sorted(report.tokens.items())])
    print("\n".join(f"BROKEN: {promise}" for promise in report.broken) or "all promises kept")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two events")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument(
        "--bundled", action="store_true", help="the bundled model, with shorter answers, and not the tiny one"
    )
    parser.add_argument("--keep", help="folder for the log and the receipts")
    parser.add_argument("--json", action="store_true", help="also write bench/out/chaos.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(run(options, folder))
    show(report)
    if options.json:
        write_json(
            "chaos",
            {"counts": report.counts, "entries": report.entries, "tokens": report.tokens, "broken": report.broken},
        )
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())

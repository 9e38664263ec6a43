"""Promises to clients and to whoever pays, while processes die: `make bench-chaos`.

    .venv/bin/python bench/chaos.py [--requests N] [--seed N] [--gateways N] [--bundled] [--singles]

One real deployment of local workers, several of each role. All requests are answered in calm weather first; then the same again, while a seeded schedule
kills worker processes (SIGKILL), has them stand still (SIGSTOP) for seconds or for good, and kills the gateway once. Exit code 1 if a promise is broken:
no client hangs, every answer is that of calm weather, every receipt is agreed or void, and what is charged is what clients were told.

`route.poison_kills` and `route.retries` are raised: by default a request stops after two workers that died with it in hand, and here they die at random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

from harness import print_table, write_json
from regauge.config import BUNDLED_MODEL
from regauge.testing.chaos import LOSSLESS, READY_S, Deployed, Report, Storm, deployed, ride, until
from regauge.testing.chaos_clients import draw, send
from regauge.testing.tiny_models import tiny_model

SETTINGS = (*LOSSLESS, "limits.request_timeout_s=100", "limits.prefill_wait_s=90")


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


async def singles(options: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """What clients see of one death or halt, while a stream runs on the process and while six others are asked just then."""
    model = str(tiny_model("tiny-llama"))
    counts = (f"prefill.workers={options.prefill}", f"decode.workers={options.decode}")
    rows = []
    async with deployed(folder, model, (*SETTINGS, *counts)) as served, aiohttp.ClientSession() as session:
        await longest_gap(served, session, None)
        calm, _, text, _ = await longest_gap(served, session, None)
        rows.append({"what": "nothing", "longest gap s": calm, "stream": "whole", "others, most s": 0.0, "others": ""})
        for role in ("prefill", "decode"):
            for number in (signal.SIGKILL, signal.SIGSTOP):
                gap, ended, got, pid = await longest_gap(served, session, (role, number))
                most, others = await others_then(served, session, role, number, pid)
                same = "whole, the same" if got == text and not ended else ended or "other text"
                rows.append(
                    {
                        "what": f"{number.name} {role}",
                        "longest gap s": gap,
                        "stream": same,
                        "others, most s": most,
                        "others": others,
                    }
                )
                for each in served.pids().values():
                    os.kill(each, signal.SIGCONT)
                await until(lambda: served.ready(session), READY_S)
    return rows


async def longest_gap(
    served: Deployed, session: aiohttp.ClientSession, strikes: tuple[str, signal.Signals] | None
) -> tuple[float, str, str, int]:
    """Stream 400 tokens; after 40 strike the worker of a role that it runs on. Return the longest wait for a token, the error, the text, who was struck."""
    body = {
        "model": "tiny-llama",
        "prompt": "the train waits at the border",
        "max_tokens": 400,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    gap, text, last, count, pid, error = 0.0, "", 0.0, 0, 0, ""
    async with session.post(f"{served.url}/v1/completions", json=body) as answer:
        _, route, *_ = answer.headers["x-regauge-route"].split()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event, now = json.loads(line[6:]), time.monotonic()
            gap, last, count = max(gap, now - (last or now)), now, count + 1
            error = event["error"]["code"] if "error" in event else error
            text += "".join(choice["text"] for choice in event.get("choices", []))
            if count == 40 and strikes is not None:
                names = route.split(">")
                pid = served.pids()[names[0] if strikes[0] == "prefill" else names[-1]]
                os.kill(pid, strikes[1])
    return gap, error, text, pid


async def others_then(
    served: Deployed, session: aiohttp.ClientSession, role: str, number: signal.Signals, struck: int
) -> tuple[float, str]:
    """Strike a worker of a role (the one that stands still already goes on first), ask six at once, and return the longest time and the statuses."""
    if number == signal.SIGSTOP:
        os.kill(struck, signal.SIGCONT)
    await until(lambda: served.ready(session), READY_S)
    asks = [a for a in draw(9, 40, "tiny-llama", longest=24, leaving=0) if a.n == 1][:6]
    os.kill(served.pids()[f"{role}-0"], number)
    got = await send(served.url, asks, at_once=6, limit_s=200, run=f"{role}-{number.name}")
    return max(each.seconds for each in got), str(dict(Counter(each.status for each in got)))


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
    parser.add_argument("--singles", action="store_true", help="one death or halt at a time, and how long clients wait")
    parser.add_argument("--keep", help="folder for the log and the receipts")
    parser.add_argument("--json", action="store_true", help="also write bench/out/chaos.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.singles:
            print_table(asyncio.run(singles(options, folder)))
            return 0
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

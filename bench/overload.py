"""Three times what a deployment can do, and what becomes of those who ask.

    .venv/bin/python bench/overload.py [--seconds 60] [--deadline 3] [--json]

`regauge serve` with a prefill and a decode worker of its own and `route.ttft_s`. First its capacity, by clients that each ask again as soon as they are answered; then three
times as many requests a second, whoever has been answered or not (Poisson, seeded), for `--seconds`; then half of the capacity. Every prompt is new. Promised:

- P99 of the time to the first token of the requests that are taken is within the deadline,
- the others are told 429 and when to come again: at least 1 s, and no longer than the deadline, since no queue is,
- nobody waits for an answer that does not come, and none of those taken fails,
- within 5 s of the overload's end comes the first second in which all are taken, with no more than twice the usual time.

Exits with 1 where one is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from harness import percentile, print_table, write_json
from regauge.serve.ports import free_ports
from serve import wait

TOKENS: Final = 32
ANSWER: Final = 8
CLIENTS: Final = 4
WARM_S, CLOSED_S, AFTER_S = 5.0, 20.0, 20.0
HANG_S: Final = 60.0
RECOVERY_S: Final = 5.0


@dataclass(frozen=True)
class Asked:
    """One request; times in seconds of the monotonic clock."""

    at: float
    status: int
    """0: no answer in HANG_S, or a broken one."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    retry_s: int | None = None


class Crowd:
    """Asks one gateway."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self._url = f"{url}/v1/completions"
        self._session = session
        self._random = random.Random(seed)  # noqa: S311  # load, not secrets
        self.came: list[Asked] = []

    async def ask(self) -> Asked:
        """Ask something new, and wait for all of the answer."""
        prompt = [self._random.randrange(100, 40_000) for _ in range(TOKENS)]
        body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "stream": True, "ignore_eos": True}  # fmt: skip
        began, asked = time.monotonic(), None
        try:
            async with asyncio.timeout(HANG_S), self._session.post(self._url, data=msgspec.json.encode(body)) as answer:
                asked = await _read(answer, began)
        except (TimeoutError, aiohttp.ClientError):
            asked = Asked(began, 0, total_s=time.monotonic() - began)
        self.came.append(asked)
        return asked

    async def closed(self, seconds: float) -> list[Asked]:
        """CLIENTS clients, each asking again and again."""
        end = time.monotonic() + seconds

        async def one() -> list[Asked]:
            found = []
            while time.monotonic() < end:
                found.append(await self.ask())
                if found[-1].retry_s:
                    await asyncio.sleep(found[-1].retry_s)
            return found

        return [asked for each in await asyncio.gather(*(one() for _ in range(CLIENTS))) for asked in each]

    def offer(self, rate: float, seconds: float) -> Iterable[float]:
        """Return the times, in seconds from now, of a Poisson process."""
        at = self._random.expovariate(rate)
        while at < seconds:
            yield at
            at += self._random.expovariate(rate)

    async def open(self, rate: float, seconds: float) -> list[asyncio.Task[Asked]]:
        """Ask `rate` times a second, whatever is answered; return the requests, of which some are under way."""
        began, asking = time.monotonic(), []
        for at in self.offer(rate, seconds):
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            asking.append(asyncio.create_task(self.ask()))
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        return asking


async def _read(answer: aiohttp.ClientResponse, began: float) -> Asked:
    retry = answer.headers.get("Retry-After", "")
    first, whole = 0.0, False
    async for line in answer.content:
        if line.startswith(b"data: {") and not first:
            first = time.monotonic() - began
        whole = whole or line.startswith(b"data: [DONE]")
    status = answer.status if whole or answer.status != 200 else 0
    return Asked(began, status, first, time.monotonic() - began, int(retry) if retry.isdecimal() else None)


def recovery(after: list[Asked], began: float, usual_s: float) -> float | None:
    """Return the seconds from `began` to the first second in which requests came and all were taken in usual time; None: there was none."""
    windows: dict[int, list[Asked]] = {}
    for asked in after:
        windows.setdefault(int(asked.at - began), []).append(asked)
    for number, each in sorted(windows.items()):
        if all(asked.status == 200 and asked.ttft_s <= 2 * usual_s for asked in each):
            return float(number)
    return None


def row(name: str, asked: list[Asked], seconds: float, deadline: float) -> dict[str, object]:
    taken = [each for each in asked if each.status == 200]
    told = [each for each in asked if each.status == 429]
    times = [each.ttft_s for each in taken] or [0.0]
    return {
        "phase": name, "offered/s": len(asked) / seconds, "taken/s": len(taken) / seconds, "429": len(told),
        "other": len(asked) - len(taken) - len(told), "P50 s": percentile(times, 0.5), "P99 s": percentile(times, 0.99),
        "most s": max(times), "P99 / deadline": percentile(times, 0.99) / deadline,
        "Retry-After s": f"{min((each.retry_s or 0 for each in told), default=0)}-{max((each.retry_s or 0 for each in told), default=0)}",
        "429 after ms, P99": 1e3 * percentile([each.total_s for each in told] or [0.0], 0.99),
    }  # fmt: skip


async def measure(url: str, options: argparse.Namespace) -> int:
    timeout, deadline = aiohttp.ClientTimeout(total=None), options.deadline
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        crowd = Crowd(url, session, options.seed)
        await crowd.closed(WARM_S)
        closed = await crowd.closed(CLOSED_S)
        capacity = sum(each.status == 200 for each in closed) / CLOSED_S
        quiet = await asyncio.gather(*await crowd.open(capacity / 2, AFTER_S))
        usual = statistics.median(each.ttft_s for each in quiet if each.status == 200)
        over = await crowd.open(3 * capacity, options.seconds)
        end = time.monotonic()
        after = await asyncio.gather(*await crowd.open(capacity / 2, AFTER_S))
        loaded = await asyncio.gather(*over)
    rows = [
        row("closed loop", closed, CLOSED_S, deadline), row("half, before", quiet, AFTER_S, deadline),
        row("three times", loaded, options.seconds, deadline), row("half, after", after, AFTER_S, deadline),
    ]  # fmt: skip
    print(f"deadline {deadline:g} s; capacity {capacity:.2f} requests/s of {TOKENS} + {ANSWER} tokens")
    print_table(rows)
    if options.json:
        print(write_json("overload", rows))
    return verdict(loaded, crowd.came, recovery(after, end, usual), deadline)


def verdict(loaded: list[Asked], came: list[Asked], recovered: float | None, deadline: float) -> int:
    """Say which promises hold; return the exit code."""
    taken = [each.ttft_s for each in loaded if each.status == 200]
    retries = [each.retry_s for each in came if each.status == 429]
    ratio = percentile(taken, 0.99) / deadline if taken else 0.0
    promises = {
        f"P99 to the first token over the deadline: {ratio:.2f} (limit 1)": bool(taken) and ratio <= 1,
        f"{len(retries)} were told 429, each with a Retry-After of 1 s to the deadline": bool(retries)
        and all(retry is not None and 1 <= retry <= max(1, deadline) for retry in retries),
        f"{sum(each.status not in (200, 429) for each in came)} of {len(came)} hung or failed": all(
            each.status in (200, 429) for each in came
        ),
        f"all taken again, in usual time, after {recovered} s (limit {RECOVERY_S:g})": recovered is not None
        and recovered <= RECOVERY_S,
    }
    for promise, holds in promises.items():
        print(f"{'kept' if holds else 'BROKEN'}: {promise}")
    return 0 if all(promises.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the overload lasts")
    parser.add_argument("--deadline", type=float, default=3.0, help="route.ttft_s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="also write bench/out/overload.json")
    options = parser.parse_args()
    [port] = free_ports("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("wb", suffix=".log") as log:
        command = [sys.executable, "-m", "regauge", "serve", "--port", str(port), "--set", f"route.ttft_s={options.deadline}"]  # fmt: skip
        process: subprocess.Popen[Any] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait(url, process)
            return asyncio.run(measure(url, options))
        except SystemExit:
            sys.stderr.write(Path(log.name).read_text()[-4000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


if __name__ == "__main__":
    raise SystemExit(main())

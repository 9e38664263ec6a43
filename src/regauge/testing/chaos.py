"""A storm over a real deployment: clients ask while worker processes are killed and stood still at random, and the gateway is killed once.

What must hold afterwards is in `Report.broken`. Everything is seen from outside: by clients, by the receipts' store, by what the workers tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from regauge.meter.reconcile import Entry
from regauge.meter.store import END_US, Store
from regauge.testing.chaos_clients import Ask, Got, send

READY_S: Final = 240.0
SETTLED_S: Final = 60.0
BILLED_S: Final = 150.0
"""Until receipts that a killed gateway has lost are made again: where a worker has lost its own as well, once no request can be under way."""
LOSSLESS: Final = (
    "prefill_layout=fp32,page=32,hnd", "decode_layout=fp32,page=16,nhd", "prefill.pool_tokens=4096", "decode.pool_tokens=4096",
    "transfer.lease_s=3", "route.poison_kills=100", "route.retries=20", "meter.recover_s=5", "meter.collect_s=1",
)  # fmt: skip
"""Settings of a storm. FP32 on both sides, so that a KV cache which is computed anew is the same but for the order of sums. Workers die at random: that two die
with one request in hand says nothing of it, so `poison_kills` and `retries` are raised."""
_NAME: Final = re.compile(r"(?P<name>.+)-[0-9a-f]+-(?P<choice>\d+)(\.\d+)?")


@dataclass(frozen=True)
class Storm:
    """What happens, drawn from a seed: every `every_s` seconds (give or take half) something to one worker."""

    seed: int
    every_s: float = 5.0
    stop_share: float = 0.4
    stops_s: tuple[float, float] = (1.0, 9.0)
    never: int = 1
    """So many of those that stand still do so until the clients are done; then they are killed."""
    most: int = 1_000
    """Strikes, the gateway's not counted."""
    gateway_at_s: float | None = 20.0
    """When the gateway is killed; None: it is not."""


class Deployed:
    """`regauge serve`, running in a folder of its own."""

    def __init__(self, folder: Path, model: str, settings: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.folder, self.log = f"http://127.0.0.1:{port}", folder, folder / "log"
        self.store = folder / "receipts.db"
        meter = (f"meter.store={self.store}", f"meter.keys={folder / 'keys'}", f"meter.state={folder / 'state'}")
        words = [word for each in (*settings, *meter) for word in ("--set", each)]
        arguments = [sys.executable, "-m", "regauge", "serve", "--port", str(port), "--model", model, *words]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(arguments, stdout=out, stderr=subprocess.STDOUT)  # noqa: S603  # our own

    def pids(self) -> dict[str, int]:
        """Return the processes by the names of their specs."""
        return dict(self._pids())

    def _pids(self) -> Iterator[tuple[str, int]]:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or a kernel thread
                pid = int(entry.name)
                words = (entry / "cmdline").read_bytes().split(b"\0")
                specs = [word for word in words if word.startswith(b"/") and word.endswith(b".json")]
                if specs and f"PPid:\t{self.process.pid}\n" in (entry / "status").read_text():
                    name = Path(specs[0].decode()).stem
                    number = words[words.index(specs[0]) + 1].decode() if name == "gateway" else ""
                    yield name + number, pid

    async def get(self, session: aiohttp.ClientSession, path: str) -> Any:
        """Return a decoded answer, whatever its status; None: there was none."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            async with session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=10)) as answer:
                body = await answer.read()
                return body.decode() if path == "/metrics" else msgspec.json.decode(body)
        return None

    async def ready(self, session: aiohttp.ClientSession) -> bool:
        """Whether all workers are there."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the deployment has ended:\n{self.log.read_text()[-4000:]}")
        found = await self.get(session, "/ready")
        return found is not None and found.get("status") == "ready"

    def stop(self) -> None:
        """End it, in order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@contextlib.asynccontextmanager
async def deployed(folder: Path, model: str, settings: Sequence[str]) -> AsyncIterator[Deployed]:
    """Run a deployment; it is ready."""
    found = Deployed(folder, model, settings)
    try:
        async with aiohttp.ClientSession() as session:
            await until(lambda: found.ready(session), READY_S)
        yield found
    finally:
        await asyncio.to_thread(found.stop)


async def until(condition: Any, limit_s: float) -> bool:
    """Poll a coroutine function until it is true; return whether it became so."""
    end = time.monotonic() + limit_s
    while not await condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.25)
    return True


@dataclass
class Report:
    """What came of a storm; `broken` lists the promises that were."""

    events: list[str] = field(default_factory=list)
    got: list[Got] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    entries: Counter[str] = field(default_factory=Counter)
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def breaks(self, promise: str) -> None:
        """Note a promise that was broken."""
        self.broken.append(promise)


async def weather(served: Deployed, storm: Storm, events: list[str], over: asyncio.Event) -> None:
    """Kill and stop processes until `over`; then nothing stands still any more."""
    rng, began = random.Random(storm.seed), time.monotonic()  # noqa: S311  # a bench
    wakes: list[tuple[float, str, int]] = []
    strikes = 0
    never, gateway, next_at = storm.never, storm.gateway_at_s, began + storm.every_s / 2
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await over.wait()
        now = time.monotonic()
        for wake in [each for each in wakes if each[0] <= now]:
            wakes.remove(wake)
            _signal(wake[2], signal.SIGCONT, wake[1], events, began)
        if gateway is not None and now >= began + gateway:
            gateway = None
            _signal(served.pids()["gateway0"], signal.SIGKILL, "gateway", events, began)
        if now < next_at or strikes >= storm.most:
            continue
        next_at = now + storm.every_s * rng.uniform(0.5, 1.5)
        names = sorted(name for name in served.pids() if not name.startswith("gateway"))
        name, draw, stands = rng.choice(names), rng.random(), rng.uniform(*storm.stops_s)
        if name in {wake[1] for wake in wakes} or name not in served.pids():
            continue
        pid, strikes = served.pids()[name], strikes + 1
        if draw >= storm.stop_share:
            _signal(pid, signal.SIGKILL, name, events, began)
        else:
            _signal(pid, signal.SIGSTOP, name, events, began)
            wakes.append((now + stands if never <= 0 else float("inf"), name, pid))
            never -= 1
    for _, name, pid in wakes:
        _signal(pid, signal.SIGKILL, name, events, began)


def _signal(pid: int, number: signal.Signals, name: str, events: list[str], began: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        events.append(f"{time.monotonic() - began:6.1f} s {number.name} {name}")


async def ride(served: Deployed, asks: Sequence[Ask], storm: Storm, *, at_once: int, limit_s: float) -> Report:
    """Have the clients ask in calm weather, those that leave excepted, then all in the storm, and judge."""
    report = Report()
    calm = await send(served.url, [a for a in asks if a.leaves is None], at_once=at_once, limit_s=limit_s, run="calm")
    leavers = [Ask(a.index, a.path, a.body) for a in asks if a.leaves is not None]
    calm += await send(served.url, leavers, at_once=at_once, limit_s=limit_s, run="calm")
    for got in calm:
        if not got.good:
            report.breaks(f"in calm weather: client {got.ask.index}: {got.error or 'no whole answer'}")
    began, over = time.monotonic(), asyncio.Event()
    blowing = asyncio.create_task(weather(served, storm, report.events, over))
    try:
        report.got = await send(served.url, asks, at_once=at_once, limit_s=limit_s, run="storm")
    finally:
        over.set()
        await blowing
    report.seconds = time.monotonic() - began
    _judge_answers(report, {got.ask.index: got for got in calm})
    async with aiohttp.ClientSession() as session:
        await _judge_quiet(report, served, session)
    _judge_receipts(report, served, [*calm, *report.got])
    await asyncio.to_thread(_verify, report, served)
    return report


def _judge_answers(report: Report, calm: dict[int, Got]) -> None:
    count = report.counts
    for got in report.got:
        who, same = f"client {got.ask.index} ({got.names[-1]})", calm[got.ask.index]
        count["clients"] += 1
        count["connections that broke with the gateway"] += got.broke
        count["refusals (503) while no worker of a role was there"] += len(got.refused)
        if got.hung:
            report.breaks(f"{who} hung")
        elif got.left:
            count["left"] += 1
            if any(not same.texts.get(i, "").startswith(text) for i, text in got.texts.items()):
                report.breaks(f"{who}, which left: other text than in calm weather")
        elif got.good:
            count["whole answers"] += 1
            if (got.texts, got.finishes) != (same.texts, same.finishes):
                report.breaks(f"{who}: {_unlike(got, same)}")
        elif got.began:
            count["streams that ended in an error event"] += 1
            report.breaks(f"{who}: stream ended in {got.error}")
        else:
            report.breaks(f"{who} had not begun and failed: {got.error or got.status}")


def _unlike(got: Got, same: Got) -> str:
    for i in sorted(same.texts):
        ours, theirs = got.texts.get(i, ""), same.texts[i]
        if ours != theirs:
            at = next(
                (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            return f"other text from character {at} of {len(theirs)} (now {len(ours)}), temperature {got.ask.body['temperature']}: {ours[at : at + 20]!r} for {theirs[at : at + 20]!r}"
    return f"finish reasons {got.finishes} for {same.finishes}"


async def _judge_quiet(report: Report, served: Deployed, session: aiohttp.ClientSession) -> None:
    if not await until(lambda: served.ready(session), READY_S):
        report.breaks(f"not all workers came back: {await served.get(session, '/ready')}")

    async def whole() -> bool:
        return not await _unrest(served, session)

    if not await until(whole, SETTLED_S):
        report.breaks(f"no rest afterwards: {await _unrest(served, session)}")

    async def collected() -> bool:
        return not await asyncio.to_thread(_open, served)

    await until(collected, BILLED_S)


async def _unrest(served: Deployed, session: aiohttp.ClientSession) -> str:
    """Return what is not as it must be when nothing runs."""
    found = await served.get(session, "/debug/transfers")
    if found is None:
        return "no answer"
    for worker in found["workers"]:
        state = worker["state"]
        if state is None:
            return f"{worker['name']} does not tell: {worker['reason']}"
        if state["transfers"]:
            return f"{worker['name']} has {len(state['transfers'])} transfers"
        for pool in state["pools"]:
            if pool["free"] + pool["cached"] != pool["pages"]:
                return f"{worker['name']}: {pool}"
    running = re.findall(r"^regauge_running_requests\{.*\} (\S+)", await served.get(session, "/metrics"), re.MULTILINE)
    return "" if set(running) <= {"0.0"} else f"running requests: {running}"


def _open(served: Deployed) -> list[Entry]:
    store = Store(str(served.store), create=False)
    try:
        return store.troubled(0, END_US)
    finally:
        store.close()


def _judge_receipts(report: Report, served: Deployed, got: Sequence[Got]) -> None:
    for entry in _open(served):
        words = "; ".join([d.text() for d in entry.differences] + [f"{side} is missing" for side in entry.missing])
        report.breaks(f"receipts of {entry.request} ({entry.outcome}, {entry.route}): {entry.status}: {words}")
    store = Store(str(served.store), create=False)
    try:
        entries = _reconciled(store)
    finally:
        store.close()
    for entry in entries:
        report.entries[f"{entry.status} {entry.outcome}{' recovered' if entry.recovered else ''}"] += 1
        if entry.status == "agreed" and entry.cached + entry.computed != entry.prompt:
            report.breaks(f"{entry.request}: cached {entry.cached} + computed {entry.computed} is not {entry.prompt}")
    bills: dict[str, list[Entry]] = {}
    for entry in entries:
        found = _NAME.fullmatch(entry.request)
        bills.setdefault(found["name"] if found else "", []).append(entry)
    told: Counter[str] = Counter()
    for each in got:
        for name in each.names:
            _judge_bill(report, each, name, bills.pop(name, []), told)
    if bills:
        report.breaks(f"receipts of requests that nobody sent: {sorted(bills)[:5]}")
    report.tokens = dict(told)


def _reconciled(store: Store) -> list[Entry]:
    names = dict.fromkeys(signed.receipt.request for signed in store.receipts())
    return [entry for name in names if (entry := store.entry(name)) is not None]


def _judge_bill(report: Report, got: Got, name: str, entries: list[Entry], told: Counter[str]) -> None:
    cached, uncached, output = (sum(column) for column in zip((0, 0, 0), *(e.charged for e in entries), strict=True))
    if name in got.refused and entries:
        report.breaks(f"{name} was taken, and then told 503: {[f'{e.request}: {e.outcome}' for e in entries]}")
    if name != got.names[-1] or got.left or not got.good:
        told["charged where there was no whole answer: input"] += cached + uncached
        told["charged where there was no whole answer: output"] += output
        return
    usage = got.usage or {}
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    told["told input"] += prompt
    told["charged input"] += cached + uncached
    told["told output"] += completion
    told["charged output"] += output
    if (cached + uncached, output) != (prompt, completion):
        states = [f"{e.request}: {e.status} {e.outcome} {e.charged}" for e in entries]
        report.breaks(
            f"{name}: told {prompt} and {completion} tokens, charged {cached + uncached} and {output}: {states}"
        )
    said = usage["prompt_tokens_details"]["cached_tokens"]
    told["told cached"] += said
    told["charged cached"] += cached
    if said != cached:
        report.breaks(f"{name}: told {said} cached tokens, charged {cached}")


def _verify(report: Report, served: Deployed) -> None:
    """Have `regauge meter verify` judge the export, as a customer would."""
    command = [sys.executable, "-m", "regauge", "meter"]
    export = subprocess.run([*command, "export", "--store", str(served.store)], capture_output=True, check=True)  # noqa: S603
    trust = ["--trust", str(served.folder / "keys" / "trust")]
    done = subprocess.run([*command, "verify", "-", *trust], input=export.stdout, capture_output=True, check=False)  # noqa: S603
    if done.returncode:
        report.breaks(f"meter verify: {done.stdout.decode()[-300:]} {done.stderr.decode()[-300:]}")
    report.counts["receipts verified"] = export.stdout.count(b"\n")

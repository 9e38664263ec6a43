"""What a router is told while a cluster serves a trace, as a list of calls: so that they can be made again, and nothing else is timed.

SIMULATED, and roughly: prefill workers one prompt at a time, an LRU cache of blocks whose events come with the reports; a transfer at the NIC's rate, alone; a fixed time per
output token. What counts here is that the router hears of everything that it hears of in service, as often, with prompts and caches of a real trace.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from regauge.blocks import Removed, Stored
from regauge.config import RouteConfig
from regauge.route.cluster import Link, Load, Refusal, Request, Worker
from regauge.route.router import Router
from regauge.sim.trace import BLOCK, Arrival

CACHE = 2_000
"""Blocks of a prefill worker's cache."""
STEP_S = 0.025
"""Per output token."""
PER_TOKEN = 188_416.0
"""Bytes of KV: Qwen3-235B in BF16."""
NIC = 25e9
SLOTS = 256
PAGE = 64
PAGES = 200_000
BUSY = 0.6
"""Share of the time that prefill computes, if a quarter of the tokens are cached."""

Call = tuple[Callable[..., object], tuple[Any, ...]]


def route(router: Router, fields: tuple[Any, ...], now: float) -> object:
    return router.route(Request(*fields), now)


def report(router: Router, name: str, fields: tuple[Any, ...], now: float) -> None:
    router.report(name, Load(*fields), now)


def stored(router: Router, name: str, seq: int, hashes: tuple[int, ...], now: float) -> None:
    router.cache_event(name, Stored(seq, hashes), now)


def removed(router: Router, name: str, seq: int, hashes: tuple[int, ...], now: float) -> None:
    router.cache_event(name, Removed(seq, hashes), now)


@dataclass(slots=True)
class _Prefill:
    name: str
    waiting: deque[tuple[str, Arrival, _Decode]] = field(default_factory=deque)
    busy: bool = False
    queued: int = 0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    seq: int = 0
    news: list[tuple[Callable[..., object], tuple[int, ...]]] = field(default_factory=list)

    def matched(self, arrival: Arrival) -> int:
        count = 0
        for block in arrival.blocks:
            if block not in self.cache:
                break
            count += 1
        return min(count * BLOCK, arrival.tokens - 1)

    def keep(self, arrival: Arrival) -> None:
        fresh = tuple(block for block in arrival.blocks if block not in self.cache)
        for block in reversed(arrival.blocks):
            self.cache[block] = None
            self.cache.move_to_end(block)
        gone = tuple(self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - CACHE))
        self.news += [(kind, hashes) for kind, hashes in ((stored, fresh), (removed, gone)) if hashes]


@dataclass(slots=True)
class _Decode:
    name: str
    running: int = 0
    pages: int = 0
    backlog: int = 0


class _Cluster:
    """One cluster, one trace."""

    def __init__(self, prefills: int, decodes: int, arrivals: Sequence[Arrival], *, links: bool) -> None:
        self.links = links
        self.router = started(prefills, decodes)
        self.arrivals = arrivals
        self.prefills = {f"p{i}": _Prefill(f"p{i}") for i in range(prefills)}
        self.decodes = {f"d{i}": _Decode(f"d{i}") for i in range(decodes)}
        span = arrivals[-1].at - arrivals[0].at
        self.speed = sum(each.tokens for each in arrivals) * 0.75 / span / prefills / BUSY
        self.calls: list[Call] = []
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = 0
        self.now = 0.0
        self.refused = 0

    def call(self, function: Callable[..., object], *given: Any) -> object:
        self.calls.append((function, given))
        return function(self.router, *given)

    def after(self, seconds: float, function: Callable[..., None], *given: Any) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now + seconds, self.number, function, given))

    def run(self, report_s: float) -> list[Call]:
        for number, arrival in enumerate(self.arrivals):
            self.after(arrival.at, self.arrive, f"r{number}", arrival)
        self.after(0.0, self.reports, report_s)
        while self.events:
            self.now, _, function, given = heapq.heappop(self.events)
            function(*given)
        return self.calls

    def arrive(self, name: str, arrival: Arrival) -> None:
        fields = (name, "", "", arrival.tokens, arrival.blocks, arrival.output)
        decided = self.call(route, fields, self.now)
        if isinstance(decided, Refusal):
            self.refused += 1
            return
        prefill, decode = self.prefills[decided.prefill], self.decodes[decided.decode]  # type: ignore[attr-defined]
        decode.running += 1
        decode.pages += -(-(arrival.tokens + arrival.output) // PAGE)
        prefill.waiting.append((name, arrival, decode))
        prefill.queued += arrival.tokens
        self.next(prefill)

    def next(self, prefill: _Prefill) -> None:
        if prefill.busy or not prefill.waiting:
            return
        name, arrival, decode = prefill.waiting.popleft()
        cached = prefill.matched(arrival)
        prefill.busy = True
        decode.backlog += int(arrival.tokens * PER_TOKEN)
        seconds = (arrival.tokens - cached) / self.speed
        self.after(seconds, self.computed, prefill, decode, name, arrival, cached, seconds)

    def computed(
        self, prefill: _Prefill, decode: _Decode, name: str, arrival: Arrival, cached: int, took: float
    ) -> None:
        prefill.busy = False
        prefill.queued -= arrival.tokens
        prefill.keep(arrival)
        self.next(prefill)
        landed = max(0.002, arrival.tokens * PER_TOKEN / NIC - took)
        self.after(landed, self.landed, decode, name, arrival, cached, took)

    def landed(self, decode: _Decode, name: str, arrival: Arrival, cached: int, took: float) -> None:
        decode.backlog -= int(arrival.tokens * PER_TOKEN)
        self.call(Router.prefilled, name, self.now, cached, arrival.tokens - cached, took)
        self.call(Router.first_token, name, self.now)
        self.after(arrival.output * STEP_S, self.ended, decode, name, arrival)

    def ended(self, decode: _Decode, name: str, arrival: Arrival) -> None:
        decode.running -= 1
        decode.pages -= -(-(arrival.tokens + arrival.output) // PAGE)
        self.call(Router.finished, name, self.now)

    def reports(self, every_s: float) -> None:
        now = self.now
        for prefill in self.prefills.values():
            for kind, hashes in prefill.news:
                prefill.seq += 1
                self.call(kind, prefill.name, prefill.seq, hashes, now)
            prefill.news.clear()
            fields: tuple[Any, ...] = (prefill.queued, None, None, None, None, self.speed, None, prefill.seq)
            self.call(report, prefill.name, fields, now)
        for decode in self.decodes.values():
            fields = (None, decode.running, PAGES - decode.pages, PAGES, PAGE, None, STEP_S, None)
            self.call(report, decode.name, fields, now)
            if self.links:
                for name in self.prefills:
                    link = Link(name, decode.name, "DIRECT", PER_TOKEN, NIC, NIC, decode.backlog)
                    self.call(Router.link, link, now)
            else:
                self.call(Router.nic, decode.name, decode.backlog, now)
        if self.events:
            self.after(every_s, self.reports, every_s)


def started(prefills: int, decodes: int, *, explain: bool = False) -> Router:
    """Return a router that knows its workers and links."""
    router = Router(RouteConfig(block_tokens=BLOCK), 0, explain=explain)
    for i in range(prefills):
        router.join(Worker(f"p{i}", prefill=True, prior_tokens_per_s=5_000.0), 0.0)
    for j in range(decodes):
        router.join(Worker(f"d{j}", decode=True, slots=SLOTS), 0.0)
        for i in range(prefills):
            router.link(Link(f"p{i}", f"d{j}", "DIRECT", PER_TOKEN, NIC, NIC), 0.0)
    return router


def recorded(
    prefills: int, decodes: int, arrivals: Sequence[Arrival], *, report_s: float = 0.5, links: bool = False
) -> list[Call]:
    """Return the calls that a router gets; `links`: the state of a NIC is told by each of its links."""
    return _Cluster(prefills, decodes, arrivals, links=links).run(report_s)

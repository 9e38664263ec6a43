"""Prefill and decode workers on a manual clock: queues, caches, slots and pages, and times by a few constants."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from regauge.blocks import CacheEvent, Removed, Stored
from regauge.route.cluster import Load
from regauge.sim.clock import Clock

PARTS = 8
"""Parts in which a prompt's KV becomes ready while it is computed: layer by layer there would be more."""


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """How a prefill worker computes: one prompt at a time."""

    tokens_per_s: float
    overhead_s: float = 0.02
    attention_s: float = 0.0
    """Per pair of tokens."""
    cache_blocks: int = 2_000

    def seconds(self, tokens: int, cached: int) -> float:
        """Return the time to compute `tokens` tokens after `cached` ones."""
        return self.overhead_s + tokens / self.tokens_per_s + self.attention_s * tokens * (cached + tokens / 2)


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """How a decode worker runs: all of its requests in one batch."""

    slots: int = 64
    pages: int = 60_000
    page_size: int = 64
    step_s: float = 0.02
    """One step of an empty batch, and"""
    step_more_s: float = 0.0004
    """what each request adds."""


@dataclass(slots=True)
class Task:
    """One request in the simulation."""

    id: str
    arrived: float
    tokens: int
    output: int
    blocks: tuple[int, ...]
    cached: int = 0
    prefilled: float = 0.0
    seated: float = 0.0
    began: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    seat: Callable[[], None] | None = None


@dataclass(slots=True)
class Prefill:
    """A prefill worker: first come, first served; a prefix cache of whole blocks, least recently used out first."""

    name: str
    model: PrefillModel
    clock: Clock
    block: int
    ready: Callable[[Task, float, bool], None]
    """Called with the share of a prompt's KV that became ready, and whether that is the last."""
    waiting: deque[Task] = field(default_factory=deque)
    cache: dict[int, None] = field(default_factory=dict)
    seq: int = 0
    events: list[CacheEvent] = field(default_factory=list)
    busy_s: float = 0.0
    busy_until: float = 0.0
    current: Task | None = None
    current_s: float = 0.0

    def submit(self, task: Task) -> None:
        """Queue a prompt."""
        self.waiting.append(task)
        if self.current is None:
            self._next()

    def queued_tokens(self) -> int:
        """Return the prompt tokens that wait or are being computed, without those cached now."""
        total = sum(task.tokens - self.matched(task) for task in self.waiting)
        if self.current is not None:
            left = max(0.0, self.busy_until - self.clock.now) / self.current_s
            total += int((self.current.tokens - self.current.cached) * left)
        return total

    def matched(self, task: Task) -> int:
        """Return how many of a prompt's tokens are cached now; never all."""
        count = 0
        for block in task.blocks:
            if block not in self.cache:
                break
            count += 1
        return min(count * self.block, task.tokens - 1)

    def _next(self) -> None:
        if not self.waiting:
            self.current = None
            return
        task = self.current = self.waiting.popleft()
        task.cached = self.matched(task)
        task.began = self.clock.now
        seconds = self.current_s = self.model.seconds(task.tokens - task.cached, task.cached)
        self.busy_s += seconds
        self.busy_until = self.clock.now + seconds
        cached = task.cached / task.tokens
        if cached:
            self.ready(task, cached, False)
        part = (1 - cached) / PARTS
        for index in range(1, PARTS):
            self.clock.after(seconds * index / PARTS, lambda: self.ready(task, part, False))
        self.clock.after(seconds, lambda: self._computed(task, part))

    def _computed(self, task: Task, part: float) -> None:
        task.prefilled = self.clock.now
        self._keep(task.blocks)
        self._next()
        self.ready(task, part, True)

    def _keep(self, blocks: tuple[int, ...]) -> None:
        fresh = tuple(block for block in blocks if block not in self.cache)
        for block in reversed(blocks):
            self.cache.pop(block, None)
            self.cache[block] = None
        gone = []
        while len(self.cache) > self.model.cache_blocks:
            block = next(iter(self.cache))
            del self.cache[block]
            gone.append(block)
        for event, hashes in ((Stored, fresh), (Removed, tuple(gone))):
            if hashes:
                self.seq += 1
                self.events.append(event(self.seq, hashes))


@dataclass(slots=True)
class Decode:
    """A decode worker: a slot and pages from the request's arrival to its end, tokens of all at one pace."""

    name: str
    model: DecodeModel
    clock: Clock
    ended: Callable[[Task], None]
    waiting: deque[Task] = field(default_factory=deque)
    seats: int = 0
    pages_used: int = 0
    produced: float = 0.0
    """Tokens that a request which was here from the start would have had."""
    _running: list[tuple[float, int, Task]] = field(default_factory=list)
    _at: float = 0.0
    _turn: int = 0
    _count: int = 0

    def submit(self, task: Task, seated: Callable[[], None]) -> None:
        """Ask for a slot and pages; `seated` is called once they are there."""
        task.seat = seated
        self.waiting.append(task)
        self._admit()

    def begin(self, task: Task) -> None:
        """A request's KV is here, and its first token: decode the others."""
        self._advance()
        self._count += 1
        heapq.heappush(self._running, (self.produced + max(task.output - 1, 0), self._count, task))
        self._pace()

    def tpot_s(self) -> float:
        """Return the time of a step now."""
        return self.model.step_s + self.model.step_more_s * len(self._running)

    def load(self) -> Load:
        """Return what the worker says of itself."""
        model = self.model
        held = self.seats + len(self.waiting)
        tpot = self.tpot_s() if self._running else None
        free = max(0, model.pages - self.pages_used)
        return Load(running=held, free_pages=free, pages=model.pages, page_size=model.page_size, tpot_s=tpot)

    def _pages(self, task: Task) -> int:
        return -(-(task.tokens + task.output) // self.model.page_size)

    def _admit(self) -> None:
        while self.waiting and self.seats < self.model.slots:
            task = self.waiting[0]
            pages = self._pages(task)
            if self.pages_used + pages > self.model.pages and self.seats:
                return
            self.waiting.popleft()
            self.seats += 1
            self.pages_used += pages
            if task.seat is not None:
                task.seat()

    def _advance(self) -> None:
        if self._running:
            self.produced += (self.clock.now - self._at) / self.tpot_s()
        self._at = self.clock.now

    def _pace(self) -> None:
        self._turn += 1
        turn = self._turn
        if self._running:
            left = max(0.0, self._running[0][0] - self.produced) * self.tpot_s()
            self.clock.after(left, lambda: self._look(turn))

    def _look(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        over = []
        while self._running and self._running[0][0] <= self.produced + 1e-6:
            over.append(heapq.heappop(self._running)[2])
        self._pace()
        for task in over:
            task.ended = self.clock.now
            self.seats -= 1
            self.pages_used -= self._pages(task)
            self.ended(task)
        self._admit()

"""Prefill and decode workers on a manual clock: queues, caches, slots and pages, and times by a few constants or a curve of yours.

A prefill worker computes one prompt at a time, first come first served. A decode worker runs all of its requests in one batch; between events its
tokens come as a fluid, so that a request's end is exact for a step time that is linear in the resident tokens.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan, sqrt

from regauge.blocks import CacheEvent, Removed, Stored
from regauge.errors import ConfigError
from regauge.route.cluster import Load
from regauge.route.request import Life
from regauge.sim.clock import Clock


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """How a worker computes prompts."""

    tokens_per_s: float
    overhead_s: float = 0.02
    attention_s: float = 0.0
    """Per pair of tokens."""
    cache_blocks: int = 2_000
    """What its prefix cache holds."""
    curve: Callable[[int, int], float] | None = None
    """Seconds of computing so many tokens after so many cached ones, in place of the constants; the router goes on knowing those."""

    def __post_init__(self) -> None:
        _positive("prefill", tokens_per_s=self.tokens_per_s)
        _not_negative(
            "prefill", overhead_s=self.overhead_s, attention_s=self.attention_s, cache_blocks=self.cache_blocks
        )

    def seconds(self, tokens: int, cached: int) -> float:
        """Return the time to compute `tokens` tokens after `cached` ones."""
        if self.curve is not None:
            return self.curve(tokens, cached)
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
    """what each request adds,"""
    step_token_s: float = 0.0
    """and each resident token."""
    curve: Callable[[int, float], float] | None = None
    """Seconds of a step of so many requests with so many resident tokens together, in place of the constants."""
    computer: PrefillModel | None = None
    """How it computes prompts itself; None: it does not."""
    beside: float = 0.0
    """Pace of the others' tokens while it computes a prompt, over their pace otherwise."""

    def __post_init__(self) -> None:
        _positive("decode", slots=self.slots, pages=self.pages, page_size=self.page_size, step_s=self.step_s)
        _not_negative("decode", step_more_s=self.step_more_s, step_token_s=self.step_token_s, beside=self.beside)
        if self.beside > 1:
            raise ConfigError(f"decode.beside: {self.beside} is more than 1: tokens do not come faster beside a prompt")

    def step(self, batch: int, resident: float) -> float:
        """Return the time of a step of `batch` requests that hold `resident` tokens together."""
        if self.curve is not None:
            return self.curve(batch, resident)
        return self.step_s + self.step_more_s * batch + self.step_token_s * resident


def _positive(where: str, **figures: float) -> None:
    for name, figure in figures.items():
        if not 0 < figure < inf:
            raise ConfigError(f"{where}.{name}: must be more than 0 and finite, not {figure}")


def _not_negative(where: str, **figures: float) -> None:
    for name, figure in figures.items():
        if not 0 <= figure < inf:
            raise ConfigError(f"{where}.{name}: must be 0 or more and finite, not {figure}")


class Task:
    """One attempt of a request."""

    __slots__ = (
        "at", "attempts", "base", "began", "blocks", "cached", "computed", "computing_s", "decode", "decoding", "expected",
        "first", "flow", "goal", "id", "landed", "life", "nbytes", "number", "output", "over", "pages", "prefill",
        "seated", "tokens",
    )  # fmt: skip

    def __init__(self, name: str, number: int, at: float, tokens: int, output: int, blocks: tuple[int, ...]) -> None:
        self.id, self.number, self.at, self.tokens, self.output, self.blocks = name, number, at, tokens, output, blocks
        self.prefill: Prefill | None = None
        """Who computes the prompt; of decode's own, its computer."""
        self.decode: Decode | None = None
        self.life: Life | None = None
        self.flow: object = None
        """The transfer's own state, while there is one."""
        self.cached = self.expected = self.pages = 0
        """`expected`: what was cached when it was queued."""
        self.base = self.goal = self.computing_s = 0.0
        """The decode worker's `produced` when it began, and when it ends."""
        self.attempts = 1
        self.nbytes = 0.0
        self.over = self.decoding = False
        self.seated = self.began = self.computed = self.landed = self.first = nan


class Prefill:
    """A worker that computes prompts, with a prefix cache of whole blocks, least recently used out first.

    `begins(task)` is called when a prompt's computing begins, `computed(task)` at its end.
    """

    def __init__(
        self, name: str, index: int, model: PrefillModel, clock: Clock, block: int,
        begins: Callable[[Task], None], computed: Callable[[Task], None],
    ) -> None:  # fmt: skip
        self.name, self.index, self.model, self.block = name, index, model, block
        self.factor = 1.0
        """Times as long as usual; what has begun stays as it is."""
        self.up = True
        self.seq = 0
        self.events: list[CacheEvent] = []
        self.busy_s = 0.0
        self.current: Task | None = None
        self.changed = True
        """Since this was last set to False."""
        self._clock, self._begins, self._computed = clock, begins, computed
        self._waiting: deque[Task] = deque()
        self._queued = 0
        """Tokens of those that wait, without what was cached when they came."""
        self._cache: OrderedDict[int, None] = OrderedDict()

    def submit(self, task: Task) -> None:
        """Queue a prompt."""
        self.changed = True
        if self.current is None:
            self._begin(task)
            return
        task.expected = self.matched(task)
        self._queued += task.tokens - task.expected
        self._waiting.append(task)

    def cancel(self, task: Task) -> None:
        """Give a prompt up, whether it waits or is being computed. Nothing of it is kept."""
        self.changed = True
        if task is self.current:
            self.busy_s += self._clock.now - task.began
            task.computed = nan
            self._next()
        elif task in self._waiting:
            self._waiting.remove(task)
            self._queued -= task.tokens - task.expected

    def die(self) -> None:
        """Lose everything; whoever calls gives the prompts up first."""
        self.up = False
        self._cache.clear()
        self.events.clear()
        self.seq = 0

    def queued_tokens(self) -> int:
        """Return the prompt tokens that wait or are being computed, without the cached ones."""
        task = self.current
        if task is None:
            return 0
        left = 1.0 - (self._clock.now - task.began) / task.computing_s if task.computing_s else 0.0
        return self._queued + int((task.tokens - task.cached) * max(0.0, left))

    def load(self) -> Load:
        """Return what the worker says of itself."""
        speed = self.model.tokens_per_s / self.factor
        return Load(self.queued_tokens(), prefill_tokens_per_s=speed, cache_seq=self.seq)

    def held(self) -> set[int]:
        """Return the blocks in the cache."""
        return set(self._cache)

    @property
    def waiting(self) -> int:
        """Prompts that wait."""
        return len(self._waiting)

    def matched(self, task: Task) -> int:
        """Return how many of a prompt's tokens are cached now; never all."""
        cache, count = self._cache, 0
        for block in task.blocks:
            if block not in cache:
                break
            count += 1
        return min(count * self.block, task.tokens - 1)

    def _next(self) -> None:
        if self._waiting and self.up:
            task = self._waiting.popleft()
            self._queued -= task.tokens - task.expected
            self._begin(task)
        else:
            self.current = None

    def _begin(self, task: Task) -> None:
        self.current = task
        task.cached = cached = self.matched(task)
        now = task.began = self._clock.now
        task.computing_s = seconds = self.factor * self.model.seconds(task.tokens - cached, cached)
        task.computed = now + seconds
        self._clock.call(now + seconds, self._done, task)
        self._begins(task)

    def _done(self, task: Task) -> None:
        if task is not self.current:
            return  # it was given up
        self.changed = True
        self.busy_s += task.computing_s
        if task.blocks:
            self._keep(task.blocks)
        self._next()
        self._computed(task)

    def _keep(self, blocks: tuple[int, ...]) -> None:
        cache = self._cache
        fresh = tuple([block for block in blocks if block not in cache])
        for block in fresh:
            cache[block] = None
        touch = cache.move_to_end
        for block in reversed(blocks):
            touch(block)
        if fresh:
            self.seq += 1
            self.events.append(Stored(self.seq, fresh))
        over = len(cache) - self.model.cache_blocks
        if over > 0:
            self.seq += 1
            self.events.append(Removed(self.seq, tuple([cache.popitem(last=False)[0] for _ in range(over)])))

    def begin_anew(self) -> None:
        """Come back, empty."""
        self.up = self.changed = True


class Decode:
    """A decode worker: a slot and pages from the request's arrival to its end, tokens of all at one pace.

    `seated(task)` is called when a request has a slot and pages, `ended(task)` when it has its last token.
    """

    def __init__(
        self, name: str, index: int, model: DecodeModel, clock: Clock,
        seated: Callable[[Task], None], ended: Callable[[Task], None],
    ) -> None:  # fmt: skip
        self.name, self.index, self.model = name, index, model
        self.computer: Prefill | None = None
        """Computes prompts here."""
        self.up = True
        self.seats = self.pages_used = 0
        self.produced = 0.0
        """Tokens that a request which was here from the start would have had."""
        self.busy_s = 0.0
        self.changed = True
        self._clock, self._seated, self._ended = clock, seated, ended
        self._waiting: deque[Task] = deque()
        self._running: list[tuple[float, int, Task]] = []
        self._batch = 0
        self._resident = 0.0
        """Tokens of those that decode, less `produced` for each."""
        self._count = 0
        self._at = 0.0
        self._wakes = inf
        self._pace = 1.0
        """Over the usual: less while a prompt is computed here, or the worker is slow."""
        self._slow = 1.0
        self._step, self._slope = 0.0, 0.0
        """Seconds of a step at `_at`, and what each further step is longer."""

    def submit(self, task: Task) -> None:
        """Ask for a slot and pages; `seated` is called once they are there."""
        self.changed = True
        task.pages = -(-(task.tokens + task.output) // self.model.page_size)
        self._waiting.append(task)
        self._admit()

    def begin(self, task: Task) -> None:
        """A request's KV is here, and its first token: decode the others."""
        self._advance()
        self.changed = True
        self._count += 1
        task.base = self.produced
        task.goal = self.produced + max(task.output - 1, 0)
        task.decoding = True
        self._batch += 1
        self._resident += task.tokens - self.produced
        heapq.heappush(self._running, (task.goal, self._count, task))
        self._plan()

    def cancel(self, task: Task) -> int:
        """Give a request up, wherever it is; return how many tokens the client has of this attempt."""
        self.changed = True
        if not task.seated >= 0:
            if task in self._waiting:
                self._waiting.remove(task)
            return 0
        count = 0
        if task.decoding:
            self._advance()
            count = max(0, min(int(self.produced - task.base + 1e-6) + 1, task.output - 1))
            self._running = [entry for entry in self._running if entry[2] is not task]
            heapq.heapify(self._running)
            self._leave(task)
            self._plan()
        self._free(task)
        self._admit()
        return count

    def computing(self, *, now_so: bool) -> None:
        """A prompt begins, or ends, to be computed here."""
        self._set_pace(self.model.beside if now_so else 1.0, self._slow)

    def begin_anew(self) -> None:
        """Come back, empty."""
        self.up = self.changed = True
        if self.computer is not None:
            self.computer.begin_anew()

    def slow(self, factor: float) -> None:
        """Take `factor` times as long for each step from now on."""
        self._set_pace(self._pace * self._slow, factor)

    def tpot_s(self) -> float:
        """Return the time of a step now, for those that decode."""
        return self.model.step(self._batch, self._resident + self._batch * self.produced) * self._slow

    def load(self) -> Load:
        """Return what the worker says of itself."""
        model = self.model
        held = self.seats + len(self._waiting)
        if self._batch:
            self._advance()
            self._plan()
        tpot = self.tpot_s() if self._batch else None
        free = max(0, model.pages - self.pages_used)
        computer = self.computer
        return Load(
            None if computer is None else computer.queued_tokens(), held, free, model.pages, model.page_size,
            None if computer is None else computer.model.tokens_per_s / computer.factor, tpot,
            None if computer is None else computer.seq,
        )  # fmt: skip

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot and pages."""
        return len(self._waiting)

    @property
    def batch(self) -> int:
        """Requests that decode."""
        return self._batch

    @property
    def resident(self) -> float:
        """Tokens of those that decode."""
        return self._resident + self._batch * self.produced

    def _set_pace(self, beside: float, slow: float) -> None:
        self.changed = True
        self._advance()
        self._slow, self._pace = slow, beside / slow
        self._plan()

    def _admit(self) -> None:
        while self._waiting and self.seats < self.model.slots and self.up:
            task = self._waiting[0]
            if self.pages_used + task.pages > self.model.pages and self.seats:
                return
            self._waiting.popleft()
            self.seats += 1
            self.pages_used += task.pages
            task.seated = self._clock.now
            self._seated(task)

    def _free(self, task: Task) -> None:
        self.seats -= 1
        self.pages_used -= task.pages

    def _leave(self, task: Task) -> None:
        self._batch -= 1
        self._resident -= task.tokens - task.base
        if not self._batch:
            self._resident = 0.0

    def _advance(self) -> None:
        """Let tokens come up to now; `_plan` must follow, whatever changes in between."""
        now = self._clock.now
        seconds, self._at = now - self._at, now
        if not self._batch or seconds <= 0:
            return
        self.busy_s += seconds
        worth = seconds * self._pace
        if worth > 0:
            step = self._step
            self.produced += 2 * worth / (step + sqrt(step * step + 2 * self._slope * worth))

    def _plan(self) -> None:
        """Set the step time from here on, and look again at the next end."""
        if not self._running:
            return
        model, batch, resident = self.model, self._batch, self._resident + self._batch * self.produced
        left = max(0.0, self._running[0][0] - self.produced)
        self._step = step = model.step(batch, resident)
        if left and (model.step_token_s or model.curve is not None):
            self._slope = max(0.0, (model.step(batch, resident + batch * left) - step) / left)
        else:
            self._slope = 0.0
        if self._pace <= 0:
            return
        when = self._at + left * (step + self._slope * left / 2) / self._pace
        if when < self._wakes:
            self._wakes = when
            self._clock.call(when, self._look, when)

    def _look(self, when: float) -> None:
        if when != self._wakes:
            return  # something sooner was planned meanwhile
        self._wakes = inf
        self._advance()
        over = []
        running, until = self._running, self.produced + 1e-6
        while running and running[0][0] <= until:
            task = heapq.heappop(running)[2]
            over.append(task)
            self._leave(task)
            self._free(task)
        self._plan()
        if over:
            self.changed = True
            for task in over:
                self._ended(task)
            self._admit()

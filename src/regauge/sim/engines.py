"""How fast workers are, by a few constants or a curve of yours, and a prefill worker on a manual clock: a queue, and a prefix cache.

It computes one prompt at a time, first come first served. `decode.py` has the decode worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import inf, nan
from typing import TYPE_CHECKING, cast

from regauge.blocks import CacheEvent, Removed, Stored
from regauge.errors import ConfigError
from regauge.route.cluster import Load
from regauge.route.request import Life
from regauge.sim.clock import Clock

if TYPE_CHECKING:
    from regauge.sim.decode import Decode

NOTES = 8
"""Uses that are remembered for each cached block, at most."""


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
        self._cache: dict[Hashable, object] = {}
        """Block -> the stamp of the prompt that used it last; an `int` would be unpacked and packed again at each block."""
        self._stamps = 0
        self._used: deque[tuple[object, list[Hashable]]] = deque()
        """Prompts by when they were computed: an LRU whose cost is per prompt, and not per block."""
        self._noted = 0
        """Blocks in it."""

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
        self._used.clear()
        self._noted = 0
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
        return cast("set[int]", set(self._cache))

    @property
    def waiting(self) -> int:
        """Prompts that wait."""
        return len(self._waiting)

    def matched(self, task: Task) -> int:
        """Return how many of a prompt's tokens are cached now; never all."""
        cache, count = self._cache, 0
        blocks: tuple[Hashable, ...] = task.blocks
        for block in blocks:
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
        """Put a prompt's blocks in front, and let the least recently used ones go; of one prompt its end before its beginning."""
        cache, names = self._cache, list[Hashable](blocks)
        self._stamps += 1
        stamp: object = self._stamps
        fresh = []
        for block in names:
            if block not in cache:
                fresh.append(block)
            cache[block] = stamp
        if fresh:
            self.seq += 1
            self.events.append(Stored(self.seq, cast("tuple[int, ...]", tuple(fresh))))
        self._used.append((stamp, names))
        self._noted += len(blocks)
        over = len(cache) - self.model.cache_blocks
        if over > 0:
            self._evict(over)
        if self._noted > NOTES * (len(cache) + len(blocks)):
            self._tidy()

    def _evict(self, count: int) -> None:
        cache, used = self._cache, self._used
        gone: list[Hashable] = []
        while len(gone) < count:
            stamp, blocks = used[0]
            while blocks and len(gone) < count:
                block = blocks.pop()
                self._noted -= 1
                if cache.get(block) is stamp:  # else it was used since, or is gone
                    del cache[block]
                    gone.append(block)
            if not blocks:
                used.popleft()
        self.seq += 1
        self.events.append(Removed(self.seq, cast("tuple[int, ...]", tuple(gone))))

    def _tidy(self) -> None:
        """Forget uses that later ones have made void."""
        cache = self._cache
        notes = ((stamp, [block for block in blocks if cache.get(block) is stamp]) for stamp, blocks in self._used)
        self._used = deque((stamp, blocks) for stamp, blocks in notes if blocks)
        self._noted = sum(len(blocks) for _, blocks in self._used)

    def begin_anew(self) -> None:
        """Come back, empty."""
        self.up = self.changed = True

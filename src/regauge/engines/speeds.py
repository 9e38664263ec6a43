"""How fast an engine computes: prompts over their length, decode steps over batch and context. The engine does the work, this takes the times.

Every point is measured once in a round, in another order each, so that what changes on the machine meanwhile falls on all of them alike; its
time is the median over the rounds, its spread the middle half of them. A first pass over all points is not counted.

The curves are what a catalogue's accelerator names (`sim/devices.py`): `tokens,seconds` of a prefill, and of a decode step, where the tokens
are those that lie in the cache, of all requests together.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final, Protocol

from regauge.errors import ConfigError

MOST_POINTS: Final = 200
MOST_ROUNDS: Final = 100
MOST_TOKENS: Final = 1 << 22
MOST_BATCH: Final = 4_096


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured."""

    prompts: tuple[int, ...] = (32, 128, 256, 512, 1_024)
    """Tokens, none of them cached."""
    batches: tuple[int, ...] = (1, 2, 4, 8)
    """Requests that decode together,"""
    contexts: tuple[int, ...] = (128, 512)
    """with so many tokens each when they begin."""
    rounds: int = 5
    steps: int = 8
    """Decode steps of a measurement."""

    def __post_init__(self) -> None:
        for name, most, least in (
            ("prompts", MOST_TOKENS, 2),
            ("batches", MOST_BATCH, 1),
            ("contexts", MOST_TOKENS, 1),
        ):
            values = getattr(self, name)
            if not least <= len(values) <= MOST_POINTS or not all(1 <= x <= most for x in values):
                raise ConfigError(f"{name}: give {least} to {MOST_POINTS} numbers from 1 to {most:,}")
            if list(values) != sorted(set(values)):
                raise ConfigError(f"{name}: give them ascending, each once")
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise ConfigError(f"rounds: give a number from 1 to {MOST_ROUNDS}, not {self.rounds}")
        if not 2 <= self.steps <= 10_000:
            raise ConfigError(f"steps: give a number from 2 to 10,000, not {self.steps}")
        if len(self.batches) * len(self.contexts) < 2:
            raise ConfigError("batches, contexts: a curve needs two points or more: give another batch")

    @property
    def longest(self) -> int:
        """Most tokens of one request."""
        return max(max(self.prompts) + 1, max(self.contexts) + self.steps + 2)

    @property
    def resident(self) -> int:
        """Most tokens of all requests together."""
        return max(max(self.prompts) + 1, max(self.batches) * (max(self.contexts) + self.steps + 2))


class Subject(Protocol):
    """An engine that is measured."""

    async def prefill(self, tokens: int) -> float:
        """Return the seconds from a prompt of so many uncached tokens to its first token."""

    async def decode(self, batch: int, context: int, steps: int) -> Step:
        """Return what a step of so many requests takes, each of `context` tokens, as the mean of `steps` of them."""


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step, as measured."""

    seconds: float
    resident: float
    """Tokens in the cache, of all requests, in the middle of the measurement."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One point: every round's seconds."""

    tokens: float
    """Of the prompt; of a decode step: resident, of all requests."""
    samples: tuple[float, ...]
    batch: int = 0
    """0: a prefill."""
    context: int = 0

    @property
    def seconds(self) -> float:
        """Return the median."""
        return median(self.samples)

    @property
    def spread(self) -> float:
        """Return the width of the middle half of the samples over their median; 0 of a single one."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.seconds


@dataclass(frozen=True, slots=True)
class Speeds:
    """All points of one engine."""

    prefill: tuple[Timed, ...]
    """Ascending in tokens."""
    decode: tuple[Timed, ...]
    """By context, then by batch."""

    def steps(self, context: int) -> tuple[Timed, ...]:
        """Return the decode steps with one context, ascending in batch."""
        return tuple(point for point in self.decode if point.context == context)


async def measure(
    subject: Subject, grid: Grid, say: Callable[[int, int], None] = lambda _done, _of: None, seed: int = 0
) -> Speeds:
    """Measure all points of a grid; `say` is told how many measurements are done, of how many. Raises what the subject raises."""
    rng = random.Random(seed)  # noqa: S311  # an order, no secret
    points: list[tuple[int, int]] = [(0, tokens) for tokens in grid.prompts]
    points += [(batch, context) for context in grid.contexts for batch in grid.batches]
    samples: dict[tuple[int, int], list[Step]] = {point: [] for point in points}
    total, done = len(points) * (grid.rounds + 1), 0
    for turn in range(grid.rounds + 1):
        for batch, tokens in rng.sample(points, len(points)):
            if batch:
                step = await subject.decode(batch, tokens, grid.steps)
            else:
                step = Step(await subject.prefill(tokens), tokens)
            if turn:
                samples[batch, tokens].append(step)
            done += 1
            say(done, total)
    made = [
        Timed(median(s.resident for s in taken), tuple(s.seconds for s in taken), batch, tokens if batch else 0)
        for (batch, tokens), taken in samples.items()
    ]
    return Speeds(tuple(p for p in made if not p.batch), tuple(p for p in made if p.batch))


def table(points: Sequence[Timed]) -> str:
    """Return the points as CSV with the columns `tokens` and `seconds`, ascending in tokens, as a catalogue reads them."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("tokens", "seconds"))
    for point in sorted(points, key=lambda each: each.tokens):
        rows.writerow((f"{point.tokens:.6g}" if point.tokens < 1e6 else round(point.tokens), f"{point.seconds:.6g}"))
    return out.getvalue()


def off(points: Sequence[Timed], curve: Callable[[float], float]) -> float:
    """Return by how much a curve misses points: the largest relative error, with its sign."""
    return max((curve(p.tokens) / p.seconds - 1.0 for p in points), key=abs)

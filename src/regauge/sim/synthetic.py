"""Arrivals like those of a trace, as many and as fast as wanted: `generate(fit(trace), count, rate, seed)`.

They have the trace's lengths, their tails, and how prompt and answer go together; its bursts; its reuse of prefixes and the time until it. They have no
request of it, so a likeness can be given away where a trace cannot. What is not kept: the time of day, and whatever else changes over the trace.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import erfc, isfinite, sqrt

from regauge.errors import ConfigError
from regauge.sim.synthetic_fit import fit
from regauge.sim.synthetic_model import Fitted, Lengths, Quantiles, Reuse, Sessions, Times, dump, load, quantile
from regauge.sim.trace import Arrival

__all__ = ["Fitted", "dump", "fit", "generate", "load"]

POOL = 4_096
"""Prompts that others may go on from: the latest."""
LOOK = 48
"""Of them, looked at around the time that is wanted for one that is long enough."""


def generate(fitted: Fitted, count: int, rate: float | None = None, seed: int = 0) -> Iterator[Arrival]:
    """Yield so many arrivals, in order of time. `rate`: requests a second, of a closed loop sessions a second; None: as the trace had.

    Raises ConfigError, at the first arrival, unless both are positive.
    """
    per_s = fitted.times.per_s if rate is None else rate
    if not isfinite(per_s) or per_s <= 0:
        where = (
            "the trace does not say how often sessions begin; give a rate"
            if rate is None
            else f"rate: {rate}; give a positive number"
        )
        raise ConfigError(where)
    if count < 1:
        raise ConfigError(f"count: {count}; give 1 or more")
    rng = random.Random(seed)  # noqa: S311  # a simulation
    times = _times(fitted.times, per_s, rng)
    if fitted.sessions is not None:
        yield from _closed(fitted, fitted.sessions, times, count, rng)
        return
    pool = _Pool(fitted.block, rng)
    for _ in range(count):
        at = next(times)
        if fitted.reuse is None:
            tokens, output, _ = _draw(fitted.fresh, rng)
            yield Arrival(at, tokens, output, ())
        else:
            yield pool.arrival(at, fitted.fresh, fitted.reuse)


def _times(times: Times, per_s: float, rng: random.Random) -> Iterator[float]:
    """Yield times without end, from 0 on."""
    shape = 1.0 / times.cv**2
    scale = 1.0 / shape / per_s
    fast = rng.random() < times.high_s / (times.high_s + times.low_s)
    at, until = 0.0, rng.expovariate(1.0 / (times.high_s if fast else times.low_s))
    yield at
    while True:
        rest = rng.gammavariate(shape, scale)
        while times.high != times.low:
            speed = times.high if fast else times.low
            if (until - at) * speed >= rest:
                rest /= speed
                break
            rest -= (until - at) * speed
            at, fast = until, not fast
            until = at + rng.expovariate(1.0 / (times.high_s if fast else times.low_s))
        at += rest
        yield at


def _level(score: float) -> float:
    """Return the share of a normal distribution below a score."""
    return 0.5 * erfc(-score / sqrt(2))


def _draw(lengths: Lengths, rng: random.Random) -> tuple[int, int, float]:
    """Return tokens of prompt and answer, and the prompt's normal score."""
    score = rng.gauss(0, 1)
    prompt = max(1, round(quantile(lengths.prompt, _level(score))))
    return prompt, _output(lengths, score, rng), score


def _output(lengths: Lengths, score: float, rng: random.Random) -> int:
    return max(1, round(_with(lengths.output, lengths.correlation, score, rng)))


def _with(table: Quantiles, correlation: float, score: float, rng: random.Random) -> float:
    """Return a draw of a table whose normal score has this correlation with a given one."""
    return quantile(table, _level(correlation * score + sqrt(1 - correlation**2) * rng.gauss(0, 1)))


@dataclass(slots=True)
class _Pool:
    """The latest prompts of an open loop, in order of time."""

    block: int
    rng: random.Random
    used: list[float] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    """Blocks of each that another went on from."""
    named: int = 0

    def arrival(self, at: float, fresh: Lengths, reuse: Reuse) -> Arrival:
        """Return a request that begins a session, or goes on from a prompt of about the right age."""
        rng = self.rng
        if not self.named:
            self.named = reuse.common
        if rng.random() >= reuse.follow:
            tokens, output, _ = _draw(fresh, rng)
            kept: tuple[int, ...] = tuple(range(min(reuse.common, tokens // self.block)))
        else:
            tokens, output, score = _draw(reuse.following, rng)
            share = _with(reuse.kept, reuse.correlation, score, rng)
            wanted = min(tokens // self.block, round(share * tokens / self.block))
            kept = self.take(at - quantile(reuse.gap_s, rng.random()), wanted)[:wanted]
        more = tokens // self.block - len(kept)
        blocks = (*kept, *range(self.named, self.named + more))
        self.named += more
        self.used.append(at)
        self.prompts.append(blocks)
        self.since.append(0)
        if len(self.used) > 2 * POOL:
            del self.used[:POOL], self.prompts[:POOL], self.since[:POOL]
        return Arrival(at, tokens, output, blocks)

    def take(self, at: float, wanted: int) -> tuple[int, ...]:
        """Return the prompt that came nearest to a time and has so many blocks, else the longest of those looked at.

        If another went on from it since by as many blocks, these were used then and not at that time.
        """
        place = bisect_left(self.used, at)
        best = -1
        for step in range(LOOK):
            for near in (place - 1 - step, place + step):
                if 0 <= near < len(self.prompts):
                    size = len(self.prompts[near])
                    if size >= wanted > self.since[near]:
                        return self._go_on(near, wanted)
                    if best < 0 or size > len(self.prompts[best]):
                        best = near
        return self._go_on(best, wanted) if best >= 0 else ()

    def _go_on(self, place: int, wanted: int) -> tuple[int, ...]:
        self.since[place] = max(self.since[place], wanted)
        return self.prompts[place]


def _closed(
    fitted: Fitted, sessions: Sessions, times: Iterator[float], count: int, rng: random.Random
) -> Iterator[Arrival]:
    place = named = 0
    while True:
        at, turns = next(times), max(1, round(quantile(sessions.turns, rng.random())))
        score = rng.gauss(0, 1)
        before: tuple[int, ...] = ()
        for turn in range(turns):
            if turn and rng.random() >= sessions.steady:
                score = rng.gauss(0, 1)
            tokens = max(1, round(_at_phase(sessions.phases, turn / max(1, turns - 1), _level(score))))
            whole = tokens // fitted.block if fitted.block else 0
            possible = min(len(before), whole)
            kept: tuple[int, ...] = before[: round(quantile(sessions.kept, rng.random()) * possible)]
            blocks = (*kept, *range(named, named + whole - len(kept)))
            named += whole - len(kept)
            think = quantile(sessions.think_s, rng.random()) if turn else 0.0
            output = _output(fitted.fresh, score, rng)
            yield Arrival(at, tokens, output, blocks, place - 1 if turn else -1, think)
            place += 1
            if place == count:
                return
            before = blocks


def _at_phase(phases: tuple[Quantiles, ...], phase: float, level: float) -> float:
    """Return a prompt's quantile between the tables of two phases."""
    where = phase * (len(phases) - 1)
    low = min(int(where), len(phases) - 2)
    first, second = quantile(phases[low], level), quantile(phases[low + 1], level)
    return first + (second - first) * (where - low)

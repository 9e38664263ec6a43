"""From times measured on a real engine to the simulated one's constants. Pure arithmetic: what was measured goes in.

| what | measured | model |
|---|---|---|
| a step of prompt tokens | prompts alone, some with a cached beginning | lines between the measured steps, plus a constant for each pair of a token and one before its chunk |
| a decode step | batches over contexts | a time for each batch, lines between them, plus a constant for each resident token |
| both at once | prompts while others decode, and the other way round | a factor for each |
| the rest of a first token's time | prompts alone, seen by the client | fixed, plus a constant for each token |
| what a load costs beside that | a load of its own, real and simulated | a factor for prompts, one for decode steps |

A prompt is computed in chunks that are cut at the multiples of `chunk`, as the embedded engine and vLLM cut theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import median

import numpy as np

from regauge.errors import ConfigError
from regauge.sim.curves import Measured, fit


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's computing as measured: `tokens` in all, of which the first `cached` were there."""

    tokens: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Batch:
    """A decode step as measured."""

    batch: int
    resident: float
    """Tokens in the cache, of all requests."""
    seconds: float


def cuts(first: int, end: int, chunk: int) -> list[tuple[int, int]]:
    """Return the chunks [start, stop) of tokens [first, end), cut at the multiples of `chunk`."""
    found = []
    while first < end:
        stop = min(end, first - first % chunk + chunk)
        found.append((first, stop))
        first = stop
    return found


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """How long prompts take."""

    curve: Measured
    """Seconds of one step over its tokens."""
    pair_s: float
    """For each pair of a token and one before its chunk."""
    chunk: int
    residuals: tuple[float, ...] = ()
    """Modelled over measured, minus 1, of each sample that this was fitted to."""

    def step(self, parts: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of a step that computes these chunks [start, stop), each of another prompt."""
        chunks = list(parts)
        tokens = sum(stop - start for start, stop in chunks)
        return self.curve(tokens) + self.pair_s * sum((stop - start) * start for start, stop in chunks)

    def __call__(self, tokens: int, cached: int) -> float:
        """Return the seconds of a prompt alone: `tokens` are computed after `cached` ones."""
        return sum(self.step([part]) for part in cuts(cached, cached + tokens, self.chunk))

    def slowed(self, factor: float) -> PromptTimes:
        """Return the same, each step so many times as long."""
        points = tuple((tokens, factor * seconds) for tokens, seconds in self.curve.points)
        return replace(self, curve=Measured(points), pair_s=factor * self.pair_s)


def prompt_times(samples: Sequence[Prompt], chunk: int) -> PromptTimes:
    """Fit prompts that were alone. Of one chunk, none of it cached: at least two lengths, a whole chunk among them.

    The curve goes through the median of each length. The pairs' constant is the least squares of relative errors over the longer
    prompts and the cached ones, not below 0. Raises ConfigError for samples that are no times, or too few.
    """
    for each in samples:
        if not 0 <= each.cached < each.tokens or not 0.0 < each.seconds < inf:
            raise ConfigError(f"{each}: is no measured prompt: 0 <= cached < tokens, a positive time")
    single = {each.tokens for each in samples if not each.cached and each.tokens <= chunk}
    if len(single) < 2 or chunk not in single:
        raise ConfigError(f"prompts: measure two lengths or more up to the chunk of {chunk} tokens, and that itself")
    curve = Measured(
        tuple((n, median(s.seconds for s in samples if not s.cached and s.tokens == n)) for n in sorted(single))
    )
    flat = PromptTimes(curve, 0.0, chunk)
    over = under = 0.0
    for each in samples:
        pairs = sum((stop - start) * start for start, stop in cuts(each.cached, each.tokens, chunk))
        share, rest = pairs / each.seconds, 1.0 - flat(each.tokens - each.cached, each.cached) / each.seconds
        over += share * rest
        under += share * share
    found = PromptTimes(curve, max(0.0, over / under) if under else 0.0, chunk)
    residuals = tuple(found(s.tokens - s.cached, s.cached) / s.seconds - 1.0 for s in samples)
    return PromptTimes(curve, found.pair_s, chunk, residuals)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long decode steps take."""

    batches: tuple[tuple[int, float], ...]
    """Batch and seconds without resident tokens, ascending."""
    token_s: float
    """For each resident token."""
    residuals: tuple[float, ...] = ()

    def __call__(self, batch: int, resident: float) -> float:
        """Return the seconds of a step; beyond the measured batches the last line goes on."""
        if len(self.batches) == 1:
            return self.batches[0][1] + self.token_s * resident
        return Measured(self.batches)(batch) + self.token_s * resident

    def slowed(self, factor: float) -> StepTimes:
        """Return the same, each step so many times as long."""
        batches = tuple((batch, factor * seconds) for batch, seconds in self.batches)
        return replace(self, batches=batches, token_s=factor * self.token_s)


def step_times(samples: Sequence[Batch]) -> StepTimes:
    """Fit steps: a time for each batch, and one constant for resident tokens (not below 0), by least squares of relative errors.

    Raises ConfigError for samples that are no times, or none.
    """
    for each in samples:
        if each.batch < 1 or not 0.0 <= each.resident < inf or not 0.0 < each.seconds < inf:
            raise ConfigError(f"{each}: is no measured step: a batch of 1 or more, a positive time")
    if not samples:
        raise ConfigError("steps: none was measured")
    batches = sorted({each.batch for each in samples})
    seconds = np.array([each.seconds for each in samples])
    own = np.array([[float(each.batch == b) for b in batches] for each in samples]) / seconds[:, None]
    resident = np.array([each.resident for each in samples])[:, None] / seconds[:, None]
    one = np.ones(len(samples))
    best, *_ = np.linalg.lstsq(np.hstack([own, resident]), one, rcond=None)
    if best[-1] < 0.0:
        best = np.append(np.linalg.lstsq(own, one, rcond=None)[0], 0.0)
    found = StepTimes(tuple((b, float(t)) for b, t in zip(batches, best[:-1], strict=True)), float(best[-1]))
    return StepTimes(found.batches, found.token_s, tuple(found(s.batch, s.resident) / s.seconds - 1.0 for s in samples))


@dataclass(frozen=True, slots=True)
class Beside:
    """What computing of one kind does to the other on shared cores: times as long while both go on."""

    prompt: float = 1.0
    step: float = 1.0

    def __post_init__(self) -> None:
        if not (1.0 <= self.prompt < inf and 1.0 <= self.step < inf):
            raise ConfigError(f"beside: {self.prompt}, {self.step}: factors of 1 or more")


def beside(
    prompts: Sequence[Prompt], alone: PromptTimes, steps: Sequence[tuple[Batch, float]], step_alone: StepTimes
) -> Beside:
    """Return the factors, from prompts computed while others decoded, and steps (with the share of their time in which prompts were computed).

    Medians of measured over alone. Below 1 is noise, and is 1. Raises ConfigError where nothing was measured.
    """
    if not prompts or not steps:
        raise ConfigError("beside: measure prompts while others decode, and steps while prompts are computed")
    longer = median(each.seconds / alone(each.tokens - each.cached, each.cached) for each in prompts)
    ratios = []
    for each, share in steps:
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"beside: a share of {share}: more than 0 and at most 1")
        ratios.append(1.0 + (each.seconds / step_alone(each.batch, each.resident) - 1.0) / share)
    return Beside(max(1.0, longer), max(1.0, median(ratios)))


@dataclass(frozen=True, slots=True)
class Latency:
    """What a first token takes beside waiting and computing."""

    fixed_s: float
    token_s: float = 0.0
    """For each token of the prompt."""

    def __call__(self, tokens: float) -> float:
        """Return the seconds of a prompt of so many tokens."""
        return self.fixed_s + self.token_s * tokens


def latency(samples: Sequence[tuple[int, float, float]]) -> Latency:
    """Fit (tokens, seconds to the first token as the client sees it, seconds of computing) of prompts that were alone.

    Raises ConfigError where computing took longer than the whole.
    """
    rest = [(tokens, seen - computing) for tokens, seen, computing in samples]
    if not rest or not all(isfinite(s) and s > 0.0 for _, s in rest):
        raise ConfigError("latency: a first token takes longer than the computing of its prompt")
    medians = [(n, median(s for m, s in rest if m == n)) for n in sorted({n for n, _ in rest})]
    curve = fit(medians, degree=min(1, len(medians) - 1)).curve
    return Latency(curve.fixed, curve.linear)


CLOSE = 0.01
"""By how much a simulated calibration load may miss the real one."""
PASSES = 12
DAMPED = 2 / 3
"""Of each correction's logarithm: times grow with the factor, and faster where requests queue."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Of prompts, and of decode steps: factors, or seconds of a load."""

    prompt: float = 1.0
    step: float = 1.0

    def __post_init__(self) -> None:
        if not (0.0 < self.prompt < inf and 0.0 < self.step < inf):
            raise ConfigError(f"pace: {self.prompt}, {self.step}: give numbers above 0")


def under_load(measured: Pace, simulated: Callable[[Pace], Pace]) -> Pace:
    """Return how many times as long everything must take for a simulated load to take as long as the real one did.

    `measured` has the load's mean seconds to the first token, and between tokens; `simulated` gets factors, and returns the same of the simulated
    load. Each factor is corrected by what its seconds miss, until neither misses 1 %: who shares a step with whom changes in jumps, so the best of
    twelve is taken where jumps are in the way. Raises ConfigError where that misses 5 %: the load was disturbed, or is too short.
    """
    factors, best, missed = Pace(), Pace(), inf
    for _ in range(PASSES):
        found = simulated(factors)
        off = Pace(measured.prompt / found.prompt, measured.step / found.step)
        wide = max(abs(off.prompt - 1.0), abs(off.step - 1.0))
        if wide < missed:
            best, missed = factors, wide
        if missed < CLOSE:
            break
        factors = Pace(factors.prompt * off.prompt**DAMPED, factors.step * off.step**DAMPED)
    if missed > 5 * CLOSE:
        raise ConfigError(
            f"under load: the nearest simulated load misses the real one by {missed:.0%}; is the machine busy?"
        )
    return best

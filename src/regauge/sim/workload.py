"""What comes: requests with their lengths and cached parts, and how fast. Of a trace, or made of means and percentiles.

A workload is a weighted sample. That of a log-normal is its quantiles' bins, each with its own mean, so that the sample has the
distribution's mean exactly and no seed: mean = exp(mu + sigma^2 / 2), and the part of it between two z-scores is
Phi(b - sigma) - Phi(a - sigma).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, exp, inf, isfinite, log, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from regauge.errors import ConfigError
from regauge.sim.trace import Arrival, Trace, spread

Floats = NDArray[np.float64]
MAX_TOKENS = 1 << 24
_BINS_PROMPT, _BINS_OUTPUT, _Z = 64, 16, 4.0
_WHOLE = 2048
"""Requests of a trace that are kept as they are; more are merged into cells."""
_FRESH, _LONG, _ANSWERS = 64, 8, 4
_Z99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts: all alike, or log-normal with a mean and a 99th percentile."""

    mean: float
    p99: float = 0.0
    """0: all alike."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.mean <= MAX_TOKENS:
            raise ConfigError(f"tokens {self.mean:g}: give a mean from 1 to {MAX_TOKENS}")
        most = self.mean * exp(_Z99**2 / 2)
        if self.p99 and not self.mean < self.p99 <= most:
            raise ConfigError(
                f"tokens {self.mean:g}:{self.p99:g}: the 99th percentile of a log-normal lies over its mean, and at most at "
                f"{most:.0f}; give a trace for a heavier tail"
            )

    def sigma(self) -> float:
        """Return the standard deviation of ln(tokens): the lesser root of sigma^2 / 2 - z99 sigma + ln(p99 / mean) = 0."""
        return _Z99 - sqrt(max(_Z99**2 - 2.0 * log(self.p99 / self.mean), 0.0)) if self.p99 else 0.0

    def bins(self, count: int) -> tuple[Floats, Floats]:
        """Return values and weights whose mean is the distribution's."""
        if not self.p99:
            return np.array([float(self.mean)]), np.ones(1)
        edges = np.array([-inf, *np.linspace(-_Z, _Z, count - 1), inf])
        sigma = self.sigma()
        weights, parts = np.diff(_below(edges)), np.diff(_below(edges - sigma))
        return self.mean * parts / weights, weights


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A weighted sample of requests, and their rate."""

    name: str
    prompt: Floats
    """Tokens of each, cached ones counted."""
    cached: Floats
    output: Floats
    weight: Floats
    """Sums to 1."""
    rate: float
    """Requests per second."""
    arrival_cv2: float = 1.0
    """Squared coefficient of variation of the time between arrivals; 1: Poisson."""
    prompt_p99: float = 0.0
    """99th percentile of the prompts' tokens, where the sample is coarser than what it stands for; 0: the sample's own."""

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < inf:
            raise ConfigError(f"rate {self.rate:g}: give requests per second, more than 0")
        if not 0.0 <= self.arrival_cv2 < inf:
            raise ConfigError(f"arrivals' squared variation {self.arrival_cv2:g}: is finite and not negative")
        if not len(self.prompt):
            raise ConfigError(f"{self.name}: no requests")

    def mean(self, values: Floats) -> float:
        """Return the mean over requests of a value for each."""
        return float(values @ self.weight)

    @property
    def hit(self) -> float:
        """Share of prompt tokens that are cached."""
        return self.mean(self.cached) / self.mean(self.prompt)


def of_lengths(
    prompt: Lengths, output: Lengths, rate: float, *, hit: float = 0.0, arrival_cv2: float = 1.0
) -> Workload:
    """Return a workload of independent lengths, each request with the same cached share. Raises ConfigError for nonsense."""
    _share(hit)
    p, wp = prompt.bins(_BINS_PROMPT)
    o, wo = output.bins(_BINS_OUTPUT)
    prompts, outputs = np.repeat(p, len(o)), np.tile(o, len(p))
    weights = np.outer(wp, wo).ravel()
    name = f"{_text(prompt)} tokens in, {_text(output)} out"
    return Workload(name, prompts, prompts * hit, outputs, weights, rate, arrival_cv2, prompt.p99)


def of_trace(
    trace: Trace, *, rate: float | None = None, hit: float | None = None, cache_tokens: float = inf, seed: int = 0
) -> Workload:
    """Return the workload of a trace. Raises ConfigError where the trace does not say what is needed, and for nonsense.

    `rate`: requests per second in place of the trace's own; sessions in closed loops have none. `hit`: a share that is cached, in place
    of what the trace's blocks say; those are counted with one cache of `cache_tokens`, least recently used blocks leaving first. Arrivals
    that are rounded to ticks are spread over them by `seed`.
    """
    arrivals: Sequence[Arrival] = trace.arrivals
    if not arrivals:
        raise ConfigError(f"{trace.name}: no requests")
    if not cache_tokens > 0.0:
        raise ConfigError(f"cache of {cache_tokens:g} tokens: give a positive number")
    if trace.tick_s:
        arrivals = spread(arrivals, seed, trace.tick_s)
    prompt = np.array([a.tokens for a in arrivals], float)
    name = trace.name
    if hit is not None:
        cached = prompt * _share(hit)
    elif trace.block:
        cached = np.minimum(np.array(cached_tokens(arrivals, trace.block, cache_tokens), float), prompt - 1.0)
        size = "endless cache" if cache_tokens == inf else f"cache of {cache_tokens:,.0f} tokens"
        name = f"{trace.name}, cached as by one {size}"
    else:
        raise ConfigError(f"{trace.name}: says nothing of reuse: give the cached share as --hit, 0 for none")
    own, cv2 = _pace(trace, arrivals)
    if rate is None and own is None:
        raise ConfigError(f"{trace.name}: its requests wait for one another, or come at one time: give --rate")
    output = np.array([a.output for a in arrivals], float)
    p99 = float(np.quantile(prompt, 0.99))
    weight = np.full(len(arrivals), 1.0 / len(arrivals))
    sample = (prompt, cached, output, weight)
    if len(prompt) > _WHOLE:
        sample = _cells(*sample)
    return Workload(name, *sample, float(own if rate is None else rate), cv2, p99)  # type: ignore[arg-type]


def _pace(trace: Trace, arrivals: Sequence[Arrival]) -> tuple[float | None, float]:
    """Requests per second and the squared variation of the time between; none and 1 for closed loops."""
    at = np.array([a.at for a in arrivals])
    span = float(at[-1] - at[0])
    if span <= 0.0 or any(a.after >= 0 for a in trace.arrivals):
        return None, 1.0
    gaps = np.diff(at)
    return len(gaps) / span, float(np.var(gaps) / np.mean(gaps) ** 2) if len(gaps) > 1 else 1.0


def cached_tokens(arrivals: Sequence[Arrival], block: int, cache_tokens: float = inf) -> list[int]:
    """Return how many tokens of each prompt one cache holds when it comes: its leading blocks that were seen before.

    Blocks leave least recently used first once there are more than `cache_tokens` of them.
    """
    held: OrderedDict[int, None] = OrderedDict()
    most = cache_tokens / block if block else 0.0
    found = []
    for arrival in arrivals:
        known = 0
        while known < len(arrival.blocks) and arrival.blocks[known] in held:
            known += 1
        found.append(known * block)
        if most == inf:
            held.update(dict.fromkeys(arrival.blocks[known:]))
            continue
        for each in reversed(arrival.blocks):  # a prefix is used whenever what follows it is: it goes last
            held[each] = None
            held.move_to_end(each)
        while len(held) > most:
            held.popitem(last=False)
    return found


def _cells(prompt: Floats, cached: Floats, output: Floats, weight: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Merge requests that are alike: neighbours in computed tokens, then in prompt, then in output. All means are kept.

    The 2 % with most to compute get half of the bins, and the longest request one of its own.
    """
    place = np.argsort(np.argsort(prompt - cached, kind="stable"), kind="stable") / len(prompt)
    half = _FRESH // 2
    cell = np.where(place < 0.98, place / 0.98 * half, half + (place - 0.98) / 0.02 * half).astype(int)
    for values, parts in ((prompt, _LONG), (output, _ANSWERS)):
        order = np.lexsort((values, cell))
        counts = np.bincount(cell)
        starts = np.cumsum(counts) - counts
        part = np.empty(len(cell), int)
        part[order] = (np.arange(len(cell)) - starts[cell[order]]) * parts // counts[cell[order]]
        cell = cell * parts + part
    cell[int(np.argmax(prompt + output))] = int(cell.max()) + 1
    weights = np.bincount(cell, weight)
    held = weights > 0.0
    means = [np.bincount(cell, weight * values)[held] / weights[held] for values in (prompt, cached, output)]
    return means[0], means[1], means[2], np.asarray(weights[held], float)


def _share(hit: float) -> float:
    if not (isfinite(hit) and 0.0 <= hit < 1.0):
        raise ConfigError(f"hit {hit:g}: give the cached share of prompts, from 0 to below 1")
    return hit


def _below(z: Floats) -> Floats:
    return np.array([0.5 * (1.0 + erf(x / sqrt(2.0))) for x in z])


def _text(lengths: Lengths) -> str:
    return f"{lengths.mean:g}" + (f" (P99 {lengths.p99:g})" if lengths.p99 else "")

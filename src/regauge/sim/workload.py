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
from regauge.sim.trace import Arrival

Floats = NDArray[np.float64]
MAX_TOKENS = 1 << 24
_BINS_PROMPT, _BINS_OUTPUT, _Z = 64, 16, 4.0
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
    return Workload(name, prompts, prompts * hit, outputs, weights, rate, arrival_cv2)


def of_arrivals(
    name: str, arrivals: Sequence[Arrival], block: int, *, rate: float | None = None, hit: float | None = None,
    cache_tokens: float = inf,
) -> Workload:  # fmt: skip
    """Return the workload of a trace. Raises ConfigError for a trace of one request without a rate, and for nonsense.

    `rate`: requests per second in place of the trace's own. `hit`: a share that is cached in place of what the trace's blocks
    say; those are counted with one cache of `cache_tokens`, least recently used blocks leaving first.
    """
    if not arrivals:
        raise ConfigError(f"{name}: no requests")
    prompt = np.array([a.tokens for a in arrivals], float)
    if hit is not None:
        cached = prompt * _share(hit)
    else:
        cached = np.minimum(np.array(cached_tokens(arrivals, block, cache_tokens), float), prompt)
    at = np.array([a.at for a in arrivals])
    span = float(at[-1] - at[0])
    if rate is None and span <= 0.0:
        raise ConfigError(f"{name}: its requests come at one time: give --rate")
    own = (len(at) - 1) / span if span > 0.0 else inf
    gaps = np.diff(at)
    cv2 = float(np.var(gaps) / np.mean(gaps) ** 2) if span > 0.0 and len(gaps) > 1 else 1.0
    output = np.array([a.output for a in arrivals], float)
    weight = np.full(len(at), 1.0 / len(at))
    return Workload(name, prompt, cached, output, weight, own if rate is None else rate, cv2)


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
        for each in reversed(arrival.blocks):  # a prefix is used whenever what follows it is: it goes last
            held[each] = None
            held.move_to_end(each)
        while len(held) > most:
            held.popitem(last=False)
    return found


def _share(hit: float) -> float:
    if not (isfinite(hit) and 0.0 <= hit < 1.0):
        raise ConfigError(f"hit {hit:g}: give the cached share of prompts, from 0 to below 1")
    return hit


def _below(z: Floats) -> Floats:
    return np.array([0.5 * (1.0 + erf(x / sqrt(2.0))) for x in z])


def _text(lengths: Lengths) -> str:
    return f"{lengths.mean:g}" + (f" (P99 {lengths.p99:g})" if lengths.p99 else "")

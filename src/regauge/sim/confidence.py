"""How sure a mean over seeds is: Student's t, without a library of statistics.

The distribution function of t with n degrees of freedom is 1 - I(n / (n + t^2); n / 2, 1 / 2) / 2 for t > 0 (Abramowitz and Stegun, 26.7.1), I being
the regularised incomplete beta function; its continued fraction (26.5.8) is summed by Lentz's method, its inverse found by bisection.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, inf, isfinite, lgamma, log, log1p, sqrt

from regauge.errors import ConfigError

LEVEL = 0.95
_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and the interval that holds the true one with probability `level`."""

    mean: float
    low: float
    """-inf and inf where one seed alone was run: nothing is known of the spread."""
    high: float
    seeds: int

    @property
    def half(self) -> float:
        """Return half of the interval's width."""
        return (self.high - self.low) / 2

    @property
    def certain(self) -> bool:
        """Say whether the interval is on one side of 0: of a difference, that it is one."""
        return self.low > 0.0 or self.high < 0.0


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Return the mean of independent values with its interval. Raises ConfigError for none, and for one that is not finite."""
    if not values or not all(map(isfinite, values)):
        raise ConfigError(f"confidence: give one finite value or more, not {list(values)}")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, -inf, inf, 1)
    half = quantile((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def paired(values: Sequence[float], others: Sequence[float], level: float = LEVEL) -> Estimate:
    """Return the mean of `values` minus `others`, run by run: both are of the same seeds, in the same order.

    What a seed does to both falls out of the differences, so that the interval is narrower than those of the means.
    Raises ConfigError for unlike numbers of runs.
    """
    if len(values) != len(others):
        raise ConfigError(f"confidence: {len(values)} and {len(others)} runs are no pairs; run the same seeds")
    return estimate([value - other for value, other in zip(values, others, strict=True)], level)


@cache
def quantile(probability: float, freedom: int) -> float:
    """Return the t below which Student's distribution has `probability`. Raises ConfigError outside (0, 1) or for no freedom."""
    if not 0.0 < probability < 1.0 or freedom < 1:
        raise ConfigError(f"quantile({probability}, {freedom}): probability in (0, 1), one degree of freedom or more")
    if probability < 0.5:
        return -quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _below(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _below(t: float, freedom: int) -> float:
    return 1 - _beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    return exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _away(1 - (a + b) * x / (a + 1))
    total = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away(1 + term * d)
            c = _away(1 + term / c)
            total *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return total


def _away(value: float) -> float:
    return value if abs(value) > _TINY else _TINY

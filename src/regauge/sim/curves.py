"""Curves over a number of tokens: fitted to given points, or measured and read between their points.

Both are called with tokens and return the measured unit (seconds, bytes, tokens per second). What a fit misses is kept with it.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

import numpy as np

from regauge.errors import ConfigError

MAX_POINTS = 10_000

Points = Sequence[tuple[float, float]]
"""(tokens, value) pairs."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """fixed + linear x tokens + square x tokens^2, none of them negative."""

    fixed: float
    linear: float = 0.0
    square: float = 0.0

    def __call__(self, tokens: float) -> float:
        """Return the value at so many tokens."""
        return self.fixed + tokens * (self.linear + tokens * self.square)


@dataclass(frozen=True, slots=True)
class Fit:
    """A polynomial and by how much it misses each point that it was fitted to."""

    curve: Polynomial
    residuals: tuple[float, ...]
    """Fitted over given, minus 1, in the order of the points."""

    def worst(self) -> float:
        """Return the largest residual, without its sign."""
        return max(abs(r) for r in self.residuals)


def fit(points: Points, *, degree: int = 2) -> Fit:
    """Fit a polynomial of degree 0 to 2 by least squares of relative errors, its coefficients not negative.

    The best of all choices of coefficients that may differ from 0: exact for so few. Raises ConfigError for points that are
    not positive or fewer than the coefficients.
    """
    tokens, values = _checked(points)
    if not 0 <= degree <= 2 or len(points) <= degree:
        raise ConfigError(f"points: a fit of degree {degree} needs {degree + 1} points or more, and a degree of 0 to 2")
    columns = np.stack([tokens**k for k in range(3)], axis=1) / values[:, None]
    best, least = np.zeros(3), inf
    for used in itertools.chain.from_iterable(
        itertools.combinations(range(degree + 1), n) for n in range(1, degree + 2)
    ):
        part, *_ = np.linalg.lstsq(columns[:, used], np.ones(len(values)), rcond=None)
        full = np.zeros(3)
        full[list(used)] = part
        error = float(np.sum((columns @ full - 1.0) ** 2))
        if part.min() >= 0.0 and error < least:
            best, least = full, error
    return Fit(Polynomial(*(float(x) for x in best)), tuple(float(x) for x in columns @ best - 1.0))


@dataclass(frozen=True, slots=True)
class Measured:
    """Straight lines between measured points; beyond them the first or last line goes on, but never below 0."""

    points: tuple[tuple[float, float], ...]
    """Ascending in tokens; two or more."""

    def __call__(self, tokens: float) -> float:
        """Return the value at so many tokens."""
        xs = [x for x, _ in self.points]
        at = min(max(int(np.searchsorted(xs, tokens)), 1), len(xs) - 1)
        (a, y), (b, z) = self.points[at - 1], self.points[at]
        return max(y + (z - y) * (tokens - a) / (b - a), 0.0)


def read_measured(path: Path, *, value: str) -> Measured:
    """Read a CSV file with a header and the columns `tokens` and `value`. Raises ConfigError with the line that is wrong."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            missing = {"tokens", value} - set(rows.fieldnames or ())
            if missing:
                raise ConfigError(
                    f"{path}:1: no column {', '.join(sorted(missing))}; the header names tokens and {value}"
                )
            read = itertools.islice(rows, MAX_POINTS + 1)
            points = [_row(row, value, f"{path}:{rows.line_num}") for row in read]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
    tokens = [x for x, _ in points]
    if not 2 <= len(points) <= MAX_POINTS or tokens != sorted(set(tokens)):
        raise ConfigError(f"{path}: give 2 to {MAX_POINTS} points, ascending in tokens")
    return Measured(tuple(points))


def _row(row: dict[str, str], value: str, where: str) -> tuple[float, float]:
    try:
        found = float(row["tokens"]), float(row[value])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: tokens and {value} are numbers") from error
    if not all(isfinite(x) and x > 0.0 for x in found):
        raise ConfigError(f"{where}: tokens and {value} are finite and positive")
    return found


def _checked(points: Points) -> tuple[np.ndarray, np.ndarray]:
    tokens, values = np.array([p[0] for p in points], float), np.array([p[1] for p in points], float)
    if not (np.isfinite(tokens).all() and np.isfinite(values).all() and (tokens >= 0).all() and (values > 0).all()):
        raise ConfigError("points: tokens are finite and not negative, values finite and positive")
    return tokens, values

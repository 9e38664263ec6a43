"""How fast computing goes at each moment: a machine's cores change their speed while a load runs, and queues make much of it.

What was measured goes in: the times and costs of one small piece of work that was computed again and again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite

from regauge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Course:
    """Factors over time. Raises ConfigError for times that do not ascend, and for factors that are none."""

    points: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    """Seconds, and how many times as long computing takes from then on; the first factor holds before its time, too."""

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("course: no points; give times and factors")
        if not all(isfinite(at) and 0.0 < factor < inf for at, factor in self.points):
            raise ConfigError("course: give finite times, and factors above 0")
        if any(later <= at for (at, _), (later, _) in pairwise(self.points)):
            raise ConfigError("course: its times must ascend")

    def during(self, begin: float, end: float) -> float:
        """Return how many times as long what was computed from `begin` to `end` took: `end - begin` over the seconds at a factor of 1.

        Raises ConfigError where `end` is not after `begin`.
        """
        if not begin < end:
            raise ConfigError(f"course: from {begin} to {end}: give an end after the begin")
        edges = [begin, *(at for at, _ in self.points if begin < at < end), end]
        return (end - begin) / sum((later - at) / self._factor(at) for at, later in pairwise(edges))

    def cut(self, begin: float, end: float) -> Course:
        """Return the course from `begin` to `end`, whose times count from `begin`."""
        inner = ((at - begin, factor) for at, factor in self.points if begin < at < end)
        return Course(((0.0, self._factor(begin)), *inner))

    def changes(self) -> Iterator[tuple[float, float]]:
        """Yield times from 0 on at which the factor changes, and what it is then; that of 0 first, whatever it is."""
        last = self._factor(0.0)
        yield 0.0, last
        for at, factor in self.points:
            if at > 0.0 and factor != last:
                last = factor
                yield at, factor

    def _factor(self, at: float) -> float:
        place = bisect_right(self.points, at, key=lambda point: point[0])
        return self.points[max(0, place - 1)][1]


@dataclass(frozen=True, slots=True)
class Drift:
    """Of prompts, and of decode steps."""

    prompt: Course = Course()
    step: Course = Course()

    def cut(self, begin: float, end: float) -> Drift:
        """Return both from `begin` to `end`, with times from `begin`."""
        return Drift(self.prompt.cut(begin, end), self.step.cut(begin, end))


STEADY = Drift()


def course(beats: Sequence[tuple[float, float]], usual: float) -> Course:
    """Return the course of measured (seconds, cost) of one piece of work, over its `usual` cost: each holds from half-way to its neighbours.

    Raises ConfigError for no beats, times that do not ascend, and costs that are none.
    """
    begins = [beats[0][0] if beats else 0.0, *((one[0] + two[0]) / 2 for one, two in pairwise(beats))]
    return Course(tuple((at, cost / usual) for at, (_, cost) in zip(begins, beats, strict=False)))

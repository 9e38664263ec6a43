"""Rates: what a total has grown by between two samples of it, over the time between them. Pure; every rate that regauge shows comes from here.

A rate is of two samples of one counter by one clock. Where they are not - another process answered, a counter went back, no time has passed - there is none,
and none is shown: a figure above what was carried is worse than no figure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """A counter at one moment."""

    total: int
    at: float
    """Seconds of the clock of whoever counts."""
    process: int = 0
    """Who counts: another one begins anew."""


def grown(before: Sample | None, after: Sample) -> int:
    """Return what has come on top since; of a process that began anew, or with no sample before it, all that it has. Never below 0."""
    if before is None or before.process != after.process or after.total < before.total:
        return max(0, after.total)
    return after.total - before.total


def rate(before: Sample | None, after: Sample) -> float | None:
    """Return the mean rate between two samples, per second; None: they say nothing about one."""
    if before is None or before.process != after.process:
        return None
    seconds, more = after.at - before.at, after.total - before.total
    return more / seconds if seconds > 0 and more >= 0 else None

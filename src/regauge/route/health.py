"""When a worker is left out for a while, and how it comes back: one request at a time, then all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from regauge.config_route import RouteConfig

Health = Literal["up", "ejected", "probing"]
SLOW_SAMPLES = 8
"""First tokens of a worker, and of each of two peers, without which nobody is called slow."""
RATIO_STEP = 0.2
PROBES = 2
"""Good answers, one after the other, that end a probation."""


@dataclass(slots=True)
class Breaker:
    """One worker's record of late."""

    failures: int = 0
    """In a row."""
    ejections: int = 0
    until: float | None = None
    """Ejected until then, and on probation after it; None: neither."""
    probe: str | None = None
    """The one attempt that a worker on probation has."""
    passed: int = 0
    ratio: float = 1.0
    """Mean of measured over predicted times to the first token."""
    samples: int = 0
    why: str = ""

    def state(self, now: float) -> Health:
        """Return whether the worker takes requests, none, or one at a time."""
        if self.until is None:
            return "up"
        return "ejected" if now < self.until else "probing"

    def takes(self, now: float) -> bool:
        """Return whether one more request may go to the worker."""
        return self.until is None or (now >= self.until and self.probe is None)

    def given(self, attempt: str, now: float) -> None:
        """An attempt goes to the worker."""
        if self.until is not None and now >= self.until:
            self.probe = attempt

    def over(self, attempt: str) -> None:
        """An attempt is over, without saying anything of the worker."""
        if self.probe == attempt:
            self.probe = None

    def good(self, attempt: str) -> None:
        """The worker did its part of an attempt."""
        self.failures = 0
        if self.probe == attempt:
            self.probe = None
            self.passed += 1
            if self.passed >= PROBES:
                self.until, self.ejections, self.ratio, self.samples, self.why = None, 0, 1.0, 0, ""

    def bad(self, attempt: str, why: str, config: RouteConfig, now: float, *, spare: bool) -> bool:
        """The worker failed an attempt; return whether that ejects it. It is never without a `spare` worker of its roles."""
        self.failures += 1
        if self.probe == attempt:
            self.probe = None
            self.eject(f"failed while on probation: {why}", config, now)
            return True
        if self.failures >= config.eject_failures and spare and self.until is None:
            self.eject(f"{self.failures} failures in a row, the last: {why}", config, now)
            return True
        return False

    def timed(self, ratio: float) -> None:
        """A first token took `ratio` times as long as predicted."""
        self.samples += 1
        self.ratio += RATIO_STEP * (min(ratio, 100.0) - self.ratio)

    def slow(self, peers: Sequence[Breaker], config: RouteConfig) -> bool:
        """Return whether the worker is an outlier among its peers (itself not among them)."""
        others = [peer.ratio for peer in peers if peer.samples >= SLOW_SAMPLES and peer.until is None]
        return len(others) >= 2 and self.outlier(median(others), config)

    def outlier(self, usual: float, config: RouteConfig) -> bool:
        """Return whether the worker is one where `usual` is the peers' ratio."""
        known = self.samples >= SLOW_SAMPLES and self.until is None
        return known and self.ratio > config.eject_ratio * max(usual, 0.1)

    def eject(self, why: str, config: RouteConfig, now: float) -> None:
        """Leave the worker out, each time twice as long."""
        seconds = min(config.eject_s * 2 ** min(self.ejections, 30), config.eject_most_s)
        self.until, self.passed, self.failures, self.why = now + seconds, 0, 0, why
        self.ejections += 1

"""Measured rate and delay of a link, and who has fallen behind its share. No I/O; times are given."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set

GAIN = 0.25
"""Weight of a rate sample below the estimate: it follows a lasting change within about 8 samples."""
LANDINGS = 4
"""Least landings in a rate sample: bytes come in chunks, and fewer would measure the chunk."""
DELAYS = 16
"""Delay samples whose least counts: queueing only adds to a delay."""
FORGET_S = 1.0
"""Seconds of idleness after which a measured rate says nothing any more."""


class RateMeter:
    """Bytes per second while there was work: samples, each over several landings; a better one counts at once, a worse
    one by an exponentially weighted mean, because what a link has shown it can do, while much else can slow a sample down.

    Starts at, returns to after idleness, and never exceeds `line`; never falls under 1/64 of it, so that a link that
    recovers is noticed.
    """

    def __init__(self, line: float, period_s: float) -> None:
        self.line = line
        self.rate = line
        self._period = period_s
        self._since: float | None = None
        self._idle_since: float | None = None
        self._bytes = 0
        self._landings = 0

    def busy(self, now: float) -> None:
        """Work is outstanding from now on. No effect if it was before."""
        if self._since is None:
            if self._idle_since is not None and now - self._idle_since > FORGET_S:
                self.rate = self.line
            self._restart(now)

    def landed(self, nbytes: int, now: float) -> None:
        """Bytes have come."""
        if self._since is None:
            return
        self._bytes += nbytes
        self._landings += 1
        span = now - self._since
        if span >= self._period and span > 0 and self._landings >= LANDINGS:
            sample = min(self._bytes / span, self.line)
            slower = max(self.rate + GAIN * (sample - self.rate), self.line / 64)
            self.rate = max(sample, slower)
            self._restart(now)

    def idle(self, now: float) -> None:
        """Nothing is outstanding: what is measured of the current sample is dropped, since its end was not full."""
        self._since = None
        self._idle_since = now

    def _restart(self, now: float) -> None:
        self._since, self._bytes, self._landings = now, 0, 0


class DelayMeter:
    """Least of the last samples of a delay; `start` until there is one."""

    def __init__(self, start: float) -> None:
        self.delay = start
        """Seconds, above 0."""
        self._samples: deque[float] = deque(maxlen=DELAYS)

    def sample(self, seconds: float) -> None:
        """Add a measured delay."""
        self._samples.append(seconds)
        self.delay = max(min(self._samples), 1e-6)


class Shares:
    """By how many bytes each tenant with work lags behind its weighted share of what was granted.

    Granting `n` bytes while tenants with weights w are waiting owes each `n * w / sum(w)`, and charges `n` to the one
    that got them. A tenant without work is owed nothing; one that got more than its share is charged `bound` at most.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.lag: dict[str, float] = {}

    def active(self, present: Set[str]) -> None:
        """Say which tenants have work; the others' accounts are closed."""
        if present == self.lag.keys():
            return
        for gone in self.lag.keys() - present:
            del self.lag[gone]
        for tenant in present - self.lag.keys():
            self.lag[tenant] = 0.0

    def grant(self, tenant: str, nbytes: int, bound: float) -> None:
        """A tenant with work got bytes."""
        total = sum(self._weights.get(name, 1.0) for name in self.lag)
        for name in self.lag:
            self.lag[name] += nbytes * self._weights.get(name, 1.0) / total
        self.lag[tenant] = max(self.lag[tenant] - nbytes, -bound)

    def behind(self, bound: float) -> str | None:
        """Return the tenant that lags most, if that is at least `bound`."""
        if len(self.lag) < 2:
            return None
        tenant = max(sorted(self.lag), key=self.lag.__getitem__)
        return tenant if self.lag[tenant] >= bound else None

"""A manual clock: what is to happen, in the order of its times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf


class Clock:
    """Runs what is due, in order of time, then of asking; seconds. What runs may ask for more, not before now."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0
        self.ran = 0
        """Events so far."""

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something run at a time; a time that has passed means now."""
        self._asked += 1
        heapq.heappush(self._due, (max(when, self.now), self._asked, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Have something run so many seconds from now."""
        self.at(self.now + seconds, what)

    def run(self, until: float = inf) -> None:
        """Run until nothing is due any more, or not before `until`."""
        while self._due and self._due[0][0] <= until:
            self.now, _, what = heapq.heappop(self._due)
            self.ran += 1
            what()

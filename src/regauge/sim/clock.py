"""A manual clock: what is to happen, in the order of its times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

_Entry = tuple[float, int, Callable[[Any], object], Any]


def _plainly(what: Callable[[], object]) -> None:
    what()


class Clock:
    """Runs what is due, in order of time, then of asking; seconds. What runs may ask for more, not before now."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[_Entry] = []
        self._asked = 0

    @property
    def ran(self) -> int:
        """Events so far."""
        return self._asked - len(self._due)

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have something run at a time; a time that has passed means now."""
        self.call(when, _plainly, what)

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Have something run so many seconds from now."""
        self.call(self.now + seconds, _plainly, what)

    def call(self, when: float, what: Callable[[Any], object], argument: Any) -> None:
        """Have `what(argument)` run at a time; cheaper than a closure for each event."""
        self._asked = asked = self._asked + 1
        heappush(self._due, (max(when, self.now), asked, what, argument))

    def run(self, until: float = inf) -> None:
        """Run until nothing is due any more, or not before `until`."""
        due = self._due
        while due:
            if due[0][0] > until:
                return
            self.now, _, what, argument = heappop(due)
            what(argument)

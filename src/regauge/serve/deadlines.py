"""Many deadlines on one timer of the event loop: nearly all of them are given up before their time, and a timer for each costs more than that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """What is to be done at a time, unless it is cancelled before."""

    __slots__ = ("_all", "at", "late")

    def __init__(self, at: float, late: Callable[[], None], among: set[Deadline]) -> None:
        self.at = at
        self.late = late
        self._all = among

    def cancel(self) -> None:
        """Give it up; twice does nothing more."""
        self._all.discard(self)


class Deadlines:
    """For one event loop. The timer stands for the earliest deadline since it was set, and when it rings for the earliest of those that are left."""

    def __init__(self) -> None:
        self._open: set[Deadline] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, at: float, late: Callable[[], None]) -> Deadline:
        """Have `late` called at a time of the loop's clock."""
        made = Deadline(at, late, self._open)
        self._open.add(made)
        if self._timer is None or at < self._timer.when():
            self._set(at)
        return made

    def close(self) -> None:
        """Give all up."""
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for each in [each for each in self._open if each.at <= now]:
            if each in self._open:  # one before it may have cancelled it
                self._open.discard(each)
                each.late()
        if self._open:
            first = min(each.at for each in self._open)
            if self._timer is None or first < self._timer.when():
                self._set(first)

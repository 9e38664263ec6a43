"""KV that went over another plane than compute: what the transfers moved, and the compute plane's interfaces did not carry. Pure.

It is a lower bound that is never above the truth. What has certainly crossed between two instants is what was counted as landed at the
second, less what had been counted or was on its way at the first. If the interfaces carried fewer bytes in a time that contains this one, the rest went
elsewhere. Whatever else they carried (headers, other workers) only hides some of it.

Interfaces may tell their counters late (drivers read them from the card once a second), so that the second reading is taken some time after
(`SETTLE_S`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 5.0
SETTLE_S: Final = 2.5
"""Below WINDOW_S: one window at a time waits for the interfaces."""


@dataclass(frozen=True, slots=True)
class Crossed:
    """Bytes of chunks to and from other hosts, since a worker started."""

    sent: int = 0
    """That have landed there."""
    sending: int = 0
    """On their way: at most so many of them have crossed already, and are not in `sent`."""
    received: int = 0
    receiving: int = 0


@dataclass(frozen=True, slots=True)
class Carried:
    """What the compute plane's interfaces of a host have counted, all together."""

    life: Hashable
    """Which interfaces, of which boot: another one begins anew."""
    sent: int
    received: int


def missing(begin: tuple[Crossed, Carried], end: tuple[Crossed, Carried]) -> int | None:
    """Return the bytes that certainly went elsewhere between two readings; None where a counter went back, or is another one.

    Of `begin` the interfaces were read no later than the transfers, of `end` no earlier.
    """
    (was, carried_before), (now, carried) = begin, end
    if carried.life != carried_before.life:
        return None
    total = 0
    for crossed, on_the_way, grew in (
        (now.sent - was.sent, was.sending, carried.sent - carried_before.sent),
        (now.received - was.received, was.receiving, carried.received - carried_before.received),
    ):
        if crossed < 0 or grew < 0:
            return None
        total += max(0, crossed - on_the_way - grew)
    return total


class Watch:
    """Looks at windows of WINDOW_S, one after the other, and adds up what is missing in each: no byte counts in two of them."""

    def __init__(self) -> None:
        self.missing = 0
        """Bytes, since this began."""
        self._open: tuple[float, Crossed, Carried] | None = None
        self._closing: tuple[float, tuple[Crossed, Carried], Crossed] | None = None

    def look(self, now: float, carried: Carried, crossed: Crossed) -> int:
        """Take a reading, of which the interfaces came first; return what is newly known to be missing."""
        found = 0
        if self._closing is not None and now >= self._closing[0] + SETTLE_S:
            _, begin, last = self._closing
            found = missing(begin, (last, carried)) or 0
            self._closing = None
        if self._open is None or now < self._open[0]:
            self._open = (now, crossed, carried)
        elif now >= self._open[0] + WINDOW_S and self._closing is None:
            self._closing = (now, self._open[1:], crossed)
            self._open = (now, crossed, carried)
        self.missing += found
        return found

"""How long KV waits at one decode NIC, into which many prefill workers send at once (incast).

A fluid model. A transfer's bytes become ready while its prompt is computed, and all that is ready shares the NIC's rate evenly. So a transfer
of B bytes waits for at most B bytes of each other one that has begun: `sum(min(rest, B)) / rate`. Of what others send there only the sum is known: all of it
is taken to be in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

TAIL_S: Final = 0.002
"""What a transfer takes after its last layer, at least: a chunk and the commit."""


@dataclass(slots=True)
class Flow:
    """One transfer that is booked and not known to have landed."""

    ready: float
    """When its first bytes can go: its computation's beginning, as predicted."""
    complete: float
    """When its last bytes can go."""
    rest: float
    """Bytes that have not landed, as estimated."""


class Nic:
    """The transfers to one decode worker."""

    __slots__ = ("_at", "_flows", "_said", "foreign", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        """Bytes per second that the NIC gives to all; 0: unknown."""
        self.foreign = 0.0
        """Bytes in front that are none of our transfers'."""
        self._flows: dict[str, Flow] = {}
        self._at = 0.0
        self._said = (0, -inf)

    @property
    def booked(self) -> float:
        """Bytes of our transfers that have not landed, as estimated."""
        return sum(flow.rest for flow in self._flows.values())

    def __len__(self) -> int:
        return len(self._flows)

    def add(self, name: str, flow: Flow, now: float) -> None:
        """Book a transfer."""
        self._advance(now)
        self._flows[name] = flow

    def drop(self, name: str, now: float) -> None:
        """A transfer has landed, or will not come."""
        self._advance(now)
        self._flows.pop(name, None)

    def said(self, backlog: int, rate: float, now: float) -> None:
        """Take what decode's flow control says: bytes admitted and not landed, of anybody, and the rate of the NIC."""
        self.rate = rate
        if (backlog, now) == self._said:
            return  # by another link of the same NIC
        self._said = (backlog, now)
        self._advance(now)
        begun = [flow for flow in self._flows.values() if flow.ready <= now]
        mine = sum(flow.rest for flow in begun)
        self.foreign = max(0.0, backlog - mine)
        if backlog < mine:
            for flow in begun:
                flow.rest *= backlog / mine

    def finish(self, size: float, ready: float, complete: float, now: float, rate: float) -> tuple[float, float]:
        """Return when `size` bytes would have landed, and the seconds by which they would delay the others, all together.

        They go from `ready` on, the last of them at `complete`. `rate` is the pair's; the NIC's counts if that is lower.
        """
        rate = min(rate, self.rate) if self.rate else rate
        if not rate:
            return complete, 0.0
        begin = max(now, ready)
        if not self._flows and not self.foreign:
            return max(begin + size / rate, complete + TAIL_S), 0.0
        if now > self._at:
            self._advance(now)
        drained = rate * (begin - now)  # until then
        rests = [flow.rest for flow in self._flows.values() if flow.ready < complete]
        foreign = self.foreign - drained
        if foreign < 0:
            drained, foreign = -foreign, 0.0
        else:
            drained = 0.0
        total, shared = sum(rests), 0.0
        if drained < total:
            keep = 1 - drained / total
            shared = total * keep if max(rests) * keep <= size else sum([min(rest * keep, size) for rest in rests])
        landed = begin + (size + foreign + shared) / rate
        return max(landed, complete + TAIL_S), shared / rate

    def _advance(self, now: float) -> None:
        """Let what is ready land, in equal shares, up to now."""
        seconds, self._at = now - self._at, max(self._at, now)
        if seconds <= 0 or not self.rate:
            return
        budget = seconds * self.rate
        took = min(self.foreign, budget)
        self.foreign -= took
        budget -= took
        going = sorted((flow for flow in self._flows.values() if flow.rest > 0 and flow.ready < now), key=_rest)
        for left, flow in zip(range(len(going), 0, -1), going, strict=True):
            took = min(flow.rest, budget / left)
            flow.rest -= took
            budget -= took


def _rest(flow: Flow) -> float:
    return flow.rest

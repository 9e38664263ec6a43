"""The fluid network as plainly as it can be said: every change advances every flow and works out every rate again.

`regauge._native.Fluid` answers the same calls, and touches only what a change touches; it is tested against this. Times are seconds of any clock that
does not run backwards, sizes bytes, rates bytes per second. Ports and flows are numbers, given out in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

CLOSE = 1e-12
"""Relative; a share that misses what a flow produces by less than this is enough for it."""
SAME = 1 + 1e-15
"""Times this close are one: some steps of a double."""


@dataclass(slots=True)
class _Flow:
    number: int
    ports: tuple[int, ...]
    rank: int
    rest: float = 0.0
    """Bytes that are ready and have not crossed."""
    waits: bool = False
    """Something is ready: the flow takes what it is given, else no more than becomes ready."""
    making: list[tuple[float, float]] = field(default_factory=list)
    """(end, bytes per second) of what becomes ready."""
    given: float = 0.0
    sent: float = 0.0
    rate: float = 0.0
    over: bool = False
    """No more bytes will come."""
    when: float = inf
    """Of its next event."""

    @property
    def made(self) -> float:
        return sum(rate for _, rate in self.making)

    @property
    def cap(self) -> float:
        return inf if self.waits else self.made


class Fluid:
    """Flows over ports: per port, ranks in order (0 before 1), and max-min fairly among flows of one rank."""

    def __init__(self) -> None:
        self._ports: list[float] = []
        self._carried: list[float] = []
        self._flows: dict[int, _Flow] = {}
        self._opened = 0
        self._at = 0.0

    def add_port(self, rate: float) -> int:
        """Add a port; return its number."""
        self._ports.append(rate)
        self._carried.append(0.0)
        return len(self._ports) - 1

    def set_port(self, port: int, rate: float, now: float) -> float:
        """Change a port's rate. Return, like all that change something, the time of the next event."""
        self._advance(now)
        self._ports[port] = rate
        return self._share()

    def open(self, ports: Sequence[int], rank: int) -> int:
        """Begin a flow without bytes; return its number."""
        self._opened += 1
        self._flows[self._opened] = _Flow(self._opened, tuple(ports), rank)
        return self._opened

    def add(self, number: int, size: float, over: bool, now: float) -> float:
        """Give a flow more bytes, at once; `over`: they are the last."""
        self._advance(now)
        flow = self._flows[number]
        flow.over |= over
        if size > 0:
            flow.rest, flow.given, flow.waits = flow.rest + size, flow.given + size, True
        return self._share()

    def produce(self, number: int, size: float, seconds: float, over: bool, now: float) -> float:
        """Have `size` bytes become ready evenly over `seconds` from now; `over`: they are the last."""
        end = now + seconds
        if end <= now or not isfinite(size / (end - now)):
            return self.add(number, size, over, now)  # no time that a double could tell
        self._advance(now)
        flow = self._flows[number]
        flow.over |= over
        flow.given += size
        flow.making.append((end, size / (end - now)))  # so that it adds up to `size`
        return self._share()

    def close(self, number: int, now: float) -> tuple[float, float]:
        """End a flow; return the bytes that crossed, and the time of the next event."""
        self._advance(now)
        flow = self._flows.pop(number)
        return flow.sent, self._share()

    def rerank(self, number: int, rank: int, now: float) -> float:
        """Change a flow's rank."""
        self._advance(now)
        self._flows[number].rank = rank
        return self._share()

    def due(self, now: float) -> tuple[list[int], float]:
        """Let happen what is due; return the flows that are done, in order of their opening, and the time of the next event."""
        self._advance(now)
        done = []
        for flow in self._flows.values():
            if flow.when > now * SAME:
                continue
            ended = [each for each in flow.making if each[0] <= now * SAME]
            flow.making = [each for each in flow.making if each not in ended]
            if not ended or not flow.waits:  # all that was ready has crossed
                flow.rest, flow.waits = 0.0, False
            if not flow.making and not flow.waits:
                self._count(flow, flow.given - flow.sent)
                if flow.over:
                    done.append(flow.number)
        for number in done:
            del self._flows[number]
        return done, self._share()

    def next(self) -> float:
        """Return the time of the next event."""
        return min((flow.when for flow in self._flows.values()), default=inf)

    def rate(self, number: int) -> float:
        """Return a flow's rate now."""
        return self._flows[number].rate

    def sent(self, number: int, now: float) -> float:
        """Return the bytes of a flow that have crossed."""
        self._advance(now)
        return self._flows[number].sent

    def ready(self, number: int, now: float) -> float:
        """Return the bytes of a flow that are ready and have not crossed."""
        self._advance(now)
        return self._flows[number].rest

    def carried(self, port: int, now: float) -> float:
        """Return the bytes that have crossed a port."""
        self._advance(now)
        return self._carried[port]

    def backlog(self, port: int, now: float) -> float:
        """Return the bytes that are ready and wait for a port."""
        self._advance(now)
        return sum(flow.rest for flow in self._flows.values() if port in flow.ports)

    def used(self, port: int) -> float:
        """Return the sum of the rates over a port."""
        return sum(flow.rate for flow in self._flows.values() if port in flow.ports)

    def _count(self, flow: _Flow, size: float) -> None:
        flow.sent += size
        for port in flow.ports:
            self._carried[port] += size

    def _advance(self, now: float) -> None:
        seconds, self._at = now - self._at, now
        if seconds <= 0:
            return
        for flow in self._flows.values():
            self._count(flow, flow.rate * seconds)
            if flow.waits:
                flow.rest = max(0.0, flow.rest + (flow.made - flow.rate) * seconds)

    def _share(self) -> float:
        """Set the rates, and the time at which each flow changes by itself."""
        going = [flow for flow in self._flows.values() if flow.cap > 0]
        shares = rates([(flow.ports, flow.cap, flow.rank) for flow in going], dict(enumerate(self._ports)))
        for flow in self._flows.values():
            flow.rate = 0.0
        for flow, share in zip(going, shares, strict=True):
            made = flow.made
            if not flow.waits and share >= made * (1 - CLOSE):
                flow.rate = made
            else:
                flow.rate, flow.waits = share, True
        for flow in self._flows.values():
            flow.when = min((end for end, _ in flow.making), default=self._at if flow.over and not flow.waits else inf)
            if flow.waits and flow.rate > flow.made:
                flow.when = min(flow.when, self._at + flow.rest / (flow.rate - flow.made))
        return self.next()


def rates(flows: Sequence[tuple[Iterable[int], float, int]], ports: Mapping[int, float]) -> list[float]:
    """Return the max-min fair rates of flows, each (ports, most, rank), by progressive filling; better ranks take first.

    The port with the smallest share fixes its flows first, unless a flow wants less (Bertsekas and Gallager, Data Networks, 6.5.2).
    """
    left, shares = dict(ports), [0.0] * len(flows)
    for rank in sorted({rank for _, _, rank in flows}):
        rising = {index for index, flow in enumerate(flows) if flow[2] == rank}
        while rising:
            counts: dict[int, int] = {}
            for index in rising:
                for port in flows[index][0]:
                    counts[port] = counts.get(port, 0) + 1
            tightest = min(counts, key=lambda port: left[port] / counts[port])
            share = left[tightest] / counts[tightest]
            least = min(rising, key=lambda index: flows[index][1])
            if flows[least][1] <= share:
                fixed, share = [least], flows[least][1]
            else:
                fixed = [index for index in rising if tightest in flows[index][0]]
            for index in fixed:
                rising.discard(index)
                shares[index] = share
                for port in flows[index][0]:
                    left[port] = max(0.0, left[port] - share)
    return shares

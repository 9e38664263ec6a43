"""The network as a fluid: flows over ports share each port max-min fairly.

That is the best that congestion control can do without knowing what the flows are for; 12 senders into one receiver get a twelfth each. A flow's bytes
may come in parts (a prompt's KV while it is computed); it takes no share while it has none. Nothing is lost, and delays are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from regauge.sim.clock import Clock

LEAST = 1.0
"""Bytes; less counts as nothing, since rates are floats."""


@dataclass(slots=True)
class Flow:
    """One transfer: the ports that it crosses, and what is left of the bytes that are ready."""

    ports: tuple[str, ...]
    done: Callable[[], None]
    rest: float = 0.0
    last: bool = False
    """No more bytes will come: it is over when none are left."""
    rate: float = 0.0


class Network:
    """Ports of given rates (bytes per second), and the flows over them."""

    def __init__(self, clock: Clock, ports: Mapping[str, float]) -> None:
        self.ports = dict(ports)
        self.carried = dict.fromkeys(ports, 0.0)
        """Bytes that crossed each port."""
        self._clock = clock
        self._flows: list[Flow] = []
        self._going: list[Flow] = []
        self._at = 0.0
        self._turn = 0

    def open(self, ports: Sequence[str], done: Callable[[], None]) -> Flow:
        """Begin a flow without bytes; `done` is called when its last byte has crossed."""
        flow = Flow(tuple(ports), done)
        self._flows.append(flow)
        return flow

    def add(self, flow: Flow, size: float, *, last: bool) -> None:
        """Give a flow more bytes."""
        self._advance()
        idle = flow.rest < LEAST
        flow.rest += size
        flow.last = last
        if idle and (flow.rest >= LEAST or last):
            self._going.append(flow)
        self._share()

    def rest(self, port: str) -> float:
        """Return the bytes that are ready and wait for a port."""
        self._advance()
        return sum(flow.rest for flow in self._going if port in flow.ports)

    def _advance(self) -> None:
        seconds, self._at = self._clock.now - self._at, self._clock.now
        if seconds <= 0:
            return
        for flow in self._going:
            size = min(flow.rest, flow.rate * seconds)
            flow.rest -= size
            for port in flow.ports:
                self.carried[port] += size

    def _share(self) -> None:
        """Set the rates, and look again when the first flow has nothing left."""
        rates(self._going, self.ports)
        self._turn += 1
        turn = self._turn
        soonest = min((flow.rest / flow.rate if flow.rest >= LEAST else 0.0 for flow in self._going), default=inf)
        if soonest < inf:
            self._clock.after(soonest, lambda: self._look(turn))

    def _look(self, turn: int) -> None:
        if turn != self._turn:
            return  # rates have changed since
        self._advance()
        empty = [flow for flow in self._going if flow.rest < LEAST]
        self._going = [flow for flow in self._going if flow.rest >= LEAST]
        over = [flow for flow in empty if flow.last]
        for flow in over:
            self._flows.remove(flow)
        self._share()
        for flow in over:
            flow.done()


def rates(flows: Sequence[Flow], ports: Mapping[str, float]) -> None:
    """Set max-min fair rates by progressive filling: the port with the smallest share fixes its flows first.

    Bertsekas and Gallager, Data Networks, 6.5.2.
    """
    left: dict[str, float] = {}
    crossing: dict[str, list[Flow]] = {}
    for flow in flows:
        flow.rate = 0.0
        for port in flow.ports:
            crossing.setdefault(port, []).append(flow)
            left[port] = ports[port]
    counts = {port: len(over) for port, over in crossing.items()}
    while counts:
        port = min(counts, key=lambda name: left[name] / counts[name])
        share = left[port] / counts[port]
        for flow in crossing[port]:
            if flow.rate:
                continue
            flow.rate = share
            for other in flow.ports:
                left[other] = max(0.0, left[other] - share)
                counts[other] -= 1
        counts = {name: count for name, count in counts.items() if count > 0}

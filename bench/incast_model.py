"""A receiver's port under incast, simulated on a manual clock; it drives the real flow-control objects.

What is modelled: `senders` NICs and one receiver port of the same rate, a constant one-way delay, a FIFO buffer of finite size at the port. Bytes move in slices,
cut-through. A slice that finds the buffer full is dropped ("drop": the NIC goes back to the hole one delay after something came out of order, or after a time-out,
and what was sent behind the hole is thrown away on arrival, as RoCE does), or all senders are stopped above a high mark until a low one ("pause", as PFC does;
spreading of the pause through the fabric is not modelled). Slices that queue past a mark are marked, and their sender told (ECN). Control messages take the same delay
and are not lost. Baselines decide at the sender, so their control takes no time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from regauge.config import FlowConfig
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_sender import SenderFlow
from regauge.move.flow_types import Credit, Demand, FlowAction, NicLimits, Policy


@dataclass(frozen=True)
class Arrival:
    """One transfer: known `lead_s` before its bytes are ready, as a request is while it is prefilled."""

    name: str
    sender: int
    nbytes: int
    ready: float
    deadline: float


@dataclass(frozen=True)
class Port:
    """The simulated network."""

    senders: int = 12
    bytes_per_s: float = 50e9
    one_way_s: float = 0.000_25
    buffer_bytes: int = 64 << 20
    mark_bytes: int = 24 << 20
    full: Literal["drop", "pause"] = "drop"
    timeout_s: float = 0.004
    lead_s: float = 0.02


@dataclass
class Outcome:
    """What came of a run. Times in seconds, from ready to the last byte."""

    seconds: dict[str, float] = field(default_factory=dict)
    misses: int = 0
    dropped: int = 0
    wasted: int = 0
    """Bytes that crossed the port in vain."""
    makespan: float = 0.0


@dataclass
class _Wire:
    """One transfer at its sender's NIC and at the receiver."""

    arrival: Arrival
    sent: int = 0
    landed: int = 0
    resend: int | None = None
    nak_until: float = 0.0
    moved_at: float = 0.0
    """When something of it was last sent again, or landed in order."""
    timer: bool = False


class Incast:
    """One run. `slice_bytes` is the granularity of the wire."""

    def __init__(self, port: Port, policy: Policy, limits: FlowConfig, slice_bytes: int) -> None:
        self.port, self.slice = port, slice_bytes
        rtt = 2 * port.one_way_s
        nic = NicLimits("rx", port.bytes_per_s, rtt)
        self.receiver = ReceiverFlow([nic], limits=limits, policy=policy)
        self.senders = [
            SenderFlow([NicLimits("tx", port.bytes_per_s, rtt)], order=policy.sender_order, burst_bytes=slice_bytes)
            for _ in range(port.senders)
        ]
        self.aimd = policy.name == "fair-share"
        self.control_s = port.one_way_s if policy.windowed else 0.0
        self.wires: dict[str, _Wire] = {}
        self.out = Outcome()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self.now = 0.0
        self._nic_free = [0.0] * port.senders
        self._kicked = [False] * port.senders
        self._resends: list[deque[str]] = [deque() for _ in range(port.senders)]
        self._port_free = 0.0
        self._queued = 0
        self._paused = False
        self._ticking = False

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        """Play all arrivals to their end. Raises RuntimeError if one never ends."""
        for arrival in arrivals:
            self._at(max(arrival.ready - self.port.lead_s, 0.0), self._arrive, arrival)
        while self._events:
            self.now, _, action, args = heapq.heappop(self._events)
            action(*args)
        if len(self.out.seconds) != len(arrivals):
            raise RuntimeError(f"{len(arrivals) - len(self.out.seconds)} transfers never ended")
        return self.out

    def _at(self, when: float, action: Callable[..., None], *args: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, action, args))

    def _arrive(self, a: Arrival) -> None:
        self.wires[a.name] = _Wire(a)
        self.senders[a.sender].offer(a.name, "rx", a.nbytes, "tx")
        demand = Demand(a.name, str(a.sender), a.nbytes, deadline=a.deadline, unit_bytes=min(self.slice, a.nbytes))
        self._do(self.receiver.arrive(demand, self.now))
        self._at(a.ready, self._ready, a)
        if not self._ticking:
            self._ticking = True
            self._tick()

    def _ready(self, a: Arrival) -> None:
        self.senders[a.sender].ready(a.name, a.nbytes)
        self._kick(a.sender)
        self._at(self.now + self.control_s, self._backlog, a)

    def _backlog(self, a: Arrival) -> None:
        self._do(self.receiver.backlog(a.name, a.nbytes, self.now))

    def _tick(self) -> None:
        self._do(self.receiver.tick(self.now))
        wake = self.receiver.next_wake()
        self._ticking = wake is not None
        if wake is not None:
            for wire in self.wires.values():
                if wire.landed < wire.arrival.nbytes:
                    self._do(self.receiver.renew(wire.arrival.name, self.now))
            self._at(wake, self._tick)

    def _do(self, actions: Sequence[FlowAction]) -> None:
        for action in actions:
            if isinstance(action, Credit):
                self._at(self.now + self.control_s, self._credit, action)

    def _credit(self, credit: Credit) -> None:
        sender = int(credit.peer)
        self.senders[sender].credit(credit, self.now)
        self._kick(sender)

    def _kick(self, sender: int) -> None:
        if not self._kicked[sender]:
            self._kicked[sender] = True
            self._at(max(self.now, self._nic_free[sender]), self._send, sender)

    def _send(self, sender: int) -> None:
        self._kicked[sender] = False
        if self._paused:
            return
        flow = self.senders[sender]
        resends = self._resends[sender]
        if resends:
            self._resend(sender, resends)
            return
        turn = flow.choose("tx", self.now, most=self.slice)
        if turn is None:
            wake = flow.next_wake("tx", self.now)
            if wake is not None:
                self._kicked[sender] = True
                self._at(max(wake, self.now + 1e-9), self._send, sender)
            return
        flow.sent(turn.transfer, turn.nbytes, self.now)
        wire = self.wires[turn.transfer]
        wire.sent += turn.nbytes
        self._transmit(sender, turn.transfer, turn.start, turn.nbytes)

    def _resend(self, sender: int, resends: deque[str]) -> None:
        name = resends[0]
        wire = self.wires[name]
        start = wire.resend
        if start is None or start >= wire.sent:
            wire.resend = None
            resends.popleft()
            self._kick(sender)
            return
        n = min(self.slice, wire.sent - start)
        wire.resend, wire.moved_at = start + n, self.now
        resends.rotate(-1)
        self._transmit(sender, name, start, n)

    def _transmit(self, sender: int, name: str, start: int, n: int) -> None:
        took = n / self.port.bytes_per_s
        self._nic_free[sender] = self.now + took
        self._at(self.now + took + self.port.one_way_s, self._enqueue, sender, name, start, n)
        self._kick(sender)

    def _enqueue(self, sender: int, name: str, start: int, n: int) -> None:
        """The slice's last byte is at the port; its first may have left already (cut-through)."""
        finish = max(self._port_free + n / self.port.bytes_per_s, self.now)
        if self.port.full == "drop" and self._queued + n > self.port.buffer_bytes and finish > self.now:
            self.out.dropped += n
            self._watch(sender, name)
            return
        self._port_free = finish
        self._queued += n
        if self.port.full == "pause" and self._queued > self.port.buffer_bytes // 2:
            self._paused = True
        if self.aimd and self._queued > self.port.mark_bytes:
            self._at(self.now + self.port.one_way_s, self._marked, sender)
        self._at(finish, self._land, sender, name, start, n)

    def _marked(self, sender: int) -> None:
        self.senders[sender].congested("tx", self.now)

    def _land(self, sender: int, name: str, start: int, n: int) -> None:
        self._queued -= n
        if self._paused and self._queued < self.port.buffer_bytes // 4:
            self._paused = False
            for i in range(self.port.senders):
                self._at(self.now + self.port.one_way_s, self._kick, i)
        wire = self.wires[name]
        if start != wire.landed:
            self.out.wasted += n
            if start > wire.landed:
                self._at(self.now + self.port.one_way_s, self._go_back, sender, name, wire.landed)
            return
        wire.landed += n
        wire.moved_at = self.now
        self._do(self.receiver.landed(name, wire.landed, self.now))
        if wire.landed == wire.arrival.nbytes:
            self._done(wire.arrival)

    def _watch(self, sender: int, name: str) -> None:
        """A retransmission timer: one per transfer, from its first loss until it has ended."""
        wire = self.wires[name]
        if not wire.timer:
            wire.timer = True
            self._at(self.now + self.port.timeout_s, self._timeout, sender, name)

    def _timeout(self, sender: int, name: str) -> None:
        wire = self.wires[name]
        if wire.landed == wire.arrival.nbytes:
            return
        quiet_until = wire.moved_at + self.port.timeout_s
        if quiet_until <= self.now and wire.landed < wire.sent:
            self._rewind(sender, wire)
            quiet_until = self.now + self.port.timeout_s
        self._at(max(quiet_until, self.now + self.port.timeout_s / 4), self._timeout, sender, name)

    def _go_back(self, sender: int, name: str, hole: int) -> None:
        wire = self.wires[name]
        # Once per round trip and hole: what is under way comes out of order for that long.
        if self.now >= wire.nak_until and hole == wire.landed:
            self._rewind(sender, wire)

    def _rewind(self, sender: int, wire: _Wire) -> None:
        wire.nak_until = self.now + 2 * self.port.one_way_s + self.port.buffer_bytes / self.port.bytes_per_s
        wire.resend, wire.moved_at = wire.landed, self.now
        if wire.arrival.name not in self._resends[sender]:
            self._resends[sender].append(wire.arrival.name)
        self._kick(sender)

    def _done(self, a: Arrival) -> None:
        self.out.seconds[a.name] = self.now - a.ready
        self.out.misses += self.now > a.deadline
        self.out.makespan = self.now
        self._do(self.receiver.end(a.name, self.now))
        self.senders[a.sender].end(a.name)


def ideal(arrivals: Sequence[Arrival], bytes_per_s: float, one_way_s: float) -> dict[str, float]:
    """Seconds of each transfer on a fluid receiver that serves the shortest remaining first, and one delay.

    No schedule has a lower mean: Schrage, "A proof of the optimality of the shortest remaining processing time discipline" (1968).
    """
    seconds: dict[str, float] = {}
    heap: list[tuple[float, float, str]] = []
    now = 0.0
    for arrival in [*sorted(arrivals, key=lambda a: a.ready), None]:
        until = arrival.ready if arrival is not None else float("inf")
        while heap and now < until:
            left, ready, name = heapq.heappop(heap)
            step = min(left / bytes_per_s, until - now)
            now += step
            left -= step * bytes_per_s
            if left > 1e-3:
                heapq.heappush(heap, (left, ready, name))
            else:
                seconds[name] = now - ready + one_way_s
        now = max(now, until)
        if arrival is not None:
            heapq.heappush(heap, (float(arrival.nbytes), arrival.ready, arrival.name))
    return seconds

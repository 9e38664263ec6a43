"""How long KV waits at one decode NIC, into which many prefill workers send at once (incast).

A fluid model. A transfer's bytes become ready while its prompt is computed, and all that is ready shares the NIC's rate evenly. So a transfer
of B bytes waits for at most B bytes of each other one that has begun: `sum(min(rest, B)) / rate`. Of what others send there only the sum is known: all of it
is taken to be in front.

Even shares have every transfer that goes served alike, so that one number says how far all of them are: `_served`, what each would have had that was here
from the start. A transfer that begins at `_served` = S with B bytes has landed at S + B, its *mark*. Time passes by moving that number, not each transfer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf
from operator import attrgetter
from typing import Final

TAIL_S: Final = 0.002
"""What a transfer takes after its last layer, at least: a chunk and the commit."""


class Flow:
    """One transfer that is booked and not known to have landed."""

    __slots__ = ("complete", "going", "ready", "rest")

    def __init__(self, ready: float, complete: float, rest: float) -> None:
        self.ready = ready
        """When its first bytes can go: its computation's beginning, as predicted."""
        self.complete = complete
        """When its last bytes can go."""
        self.rest = rest
        """Bytes; once it goes, its mark."""
        self.going = False


_READY = attrgetter("ready")


class Nic:
    """The transfers to one decode worker."""

    __slots__ = ("_at", "_flows", "_marks", "_pending", "_said", "_served", "foreign", "idle", "moving", "rate")

    def __init__(self) -> None:
        self.rate = 0.0
        """Bytes per second that the NIC gives to all; 0: unknown. Set by `said` and `paced`."""
        self.foreign = 0.0
        """Bytes in front that are none of our transfers'."""
        self.moving = 0.0
        """Bytes of our transfers that go, up to rounding."""
        self.idle = True
        """Nothing is on its way, ours or others', for certain."""
        self._flows: dict[str, Flow] = {}
        self._marks: list[float] = []
        """Of those that go and have not landed, ascending."""
        self._pending: list[Flow] = []
        """Those that have not begun, the first of them first."""
        self._served = 0.0
        self._at = 0.0
        self._said = (0, -inf)

    @property
    def booked(self) -> float:
        """Bytes of our transfers that have not landed, as estimated."""
        served = self._served
        return sum([mark - served for mark in self._marks], 0.0) + sum([flow.rest for flow in self._pending], 0.0)

    def __len__(self) -> int:
        return len(self._flows)

    def add(self, name: str, flow: Flow, now: float) -> None:
        """Book a transfer."""
        if now > self._at:
            self._advance(now)
        self._flows[name] = flow
        self.idle = False
        if flow.ready < now:
            self._begin(flow)
        elif not self._pending or flow.ready >= self._pending[-1].ready:
            self._pending.append(flow)
        else:
            insort(self._pending, flow, key=_READY)

    def drop(self, name: str, now: float) -> None:
        """A transfer has landed, or will not come."""
        flow = self._flows.pop(name, None)
        if flow is None:
            return
        if now > self._at:
            self._advance(now)
        self.idle = not self._flows and not self.foreign
        if not flow.going:
            self._pending.remove(flow)
        elif flow.rest > self._served:
            self.moving -= flow.rest - self._served
            del self._marks[bisect_left(self._marks, flow.rest)]

    def paced(self, rate: float, now: float) -> None:
        """The NIC's rate is another one from now on."""
        if rate != self.rate:
            self._advance(now)
            self.rate = rate

    def said(self, backlog: int, rate: float, now: float) -> None:
        """Take what decode's flow control says: bytes admitted and not landed, of anybody, and the rate of the NIC."""
        self.paced(rate, now)
        if (backlog, now) == self._said:
            return  # by another link of the same NIC
        self._said = (backlog, now)
        self._advance(now)
        while self._pending and self._pending[0].ready <= now:
            self._begin(self._pending.pop(0))
        served = self._served
        mine = sum([mark - served for mark in self._marks], 0.0)
        self.foreign = max(0.0, backlog - mine)
        self.idle = not self._flows and not self.foreign
        if backlog < mine:
            share = backlog / mine
            self._marks.clear()
            for flow in self._flows.values():
                if flow.going and flow.rest > served:
                    flow.rest = served + (flow.rest - served) * share
                    if flow.rest > served:
                        self._marks.append(flow.rest)
            self._marks.sort()
            self.moving = float(backlog)

    def finish(self, size: float, ready: float, complete: float, now: float, rate: float) -> tuple[float, float]:
        """Return when `size` bytes would have landed, and the seconds by which they would delay the others, all together.

        They go from `ready` on, the last of them at `complete`. `rate` is the pair's; the NIC's counts if that is lower.
        """
        if self.rate and self.rate < rate:
            rate = self.rate
        if not rate:
            return complete, 0.0
        begin = max(now, ready)
        landed = complete + TAIL_S
        if self.idle:
            sent = begin + size / rate
            return (max(landed, sent)), 0.0
        if now > self._at:
            self._advance(now)
        drained = rate * (begin - now)  # until then
        served = self._served
        rests = [mark - served for mark in self._marks]
        for flow in self._pending:
            if flow.ready >= complete:
                break
            rests.append(flow.rest)
        foreign = self.foreign - drained
        if foreign < 0:
            drained, foreign = -foreign, 0.0
        else:
            drained = 0.0
        total, most, shared = 0.0, 0.0, 0.0
        for rest in rests:
            total += rest
            most = max(most, rest)
        if drained < total:
            keep = 1 - drained / total
            if most * keep <= size:
                shared = total * keep
            else:
                for rest in rests:
                    shared += min(rest * keep, size)
        sent = begin + (size + foreign + shared) / rate
        return (max(landed, sent)), shared / rate

    def least(self, size: float, begin: float, now: float, rate: float) -> tuple[float, float]:
        """Return bounds from below for `finish`, in constant time: bytes in front, and those of them that are our transfers'.

        `rate` is the lower one of the pair's and the NIC's. What has begun since the last event, and what has not begun, is left out.
        """
        at = self._at
        gone = rate * (begin - now)
        if now > at:
            gone += self.rate * (now - at)
        foreign = self.foreign - gone
        moving = self.moving
        if foreign < 0:
            moving += foreign
            foreign = 0.0
        if moving <= 0:
            return foreign, 0.0
        if moving > size:
            moving = size
        return foreign + moving, moving

    def _begin(self, flow: Flow) -> None:
        self.moving += flow.rest
        mark = self._served + flow.rest
        if mark > self._served:
            insort(self._marks, mark)
        flow.rest, flow.going = mark, True

    def _advance(self, now: float) -> None:
        """Let what is ready land, in equal shares, up to now."""
        pending = self._pending
        while pending and pending[0].ready < now:
            flow = pending.pop(0)
            if flow.ready > self._at:
                self._serve(flow.ready)
            self._begin(flow)
        self._serve(now)

    def _serve(self, until: float) -> None:
        budget = (until - self._at) * self.rate
        if until > self._at:
            self._at = until
        if budget <= 0:
            return
        if self.foreign:
            took = min(self.foreign, budget)
            self.foreign -= took
            budget -= took
        marks, served = self._marks, self._served
        while marks:
            left = len(marks)
            need = (marks[0] - served) * left
            if need > budget:
                self.moving -= budget
                served += budget / left
                break
            budget -= need
            served = marks[0]
            self.moving -= need
            del marks[0]
        if marks:
            while marks and marks[0] <= served:  # equal ones land together
                del marks[0]
        else:
            self.moving = 0.0
        self._served = served

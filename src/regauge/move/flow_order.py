"""Which transfer comes next. Pure: reads the books, changes nothing.

Two goals pull apart. Serving the shortest remaining first gives the least mean time and a short tail, and knows no deadlines. Serving the earliest deadline
first meets all deadlines when all can be met, and collapses when they cannot: it spends the link on those that are lost already. So:

1. The transfers that can still be on time are found by Moore's rule (J. M. Moore, Management Science 15(1), 1968, known as Moore-Hodgson): go through them by
   deadline, and whenever one would be late, give up the one that needs longest. No other set of transfers that are all
   there keeps more of them on time.
2. As long as those keep slack, the shortest remaining is served, whoever it is, late ones too: somebody still waits for them.
3. When the slack is gone, the earliest deadline among those of step 1 is served: it must go on *now*.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from regauge.config import FlowConfig
from regauge.move.flow_ledger import Flow
from regauge.move.flow_types import Rank


def _shortest(flow: Flow) -> tuple[int, float, str]:
    return (flow.total - flow.granted, flow.arrived, flow.demand.transfer)


@dataclass(frozen=True, slots=True)
class Order:
    """The order among transfers of one NIC at one moment."""

    limits: FlowConfig
    rate: float
    """Bytes per second of the NIC."""
    begin: float
    """When the next credit's first byte can land: now, one delay, and what is under way."""
    now: float

    def needs(self, flow: Flow) -> float:
        """Return the seconds that the transfer's bytes without credit take on the whole NIC."""
        return (flow.total - flow.granted) / self.rate

    def slack(self, flow: Flow) -> float | None:
        """Return the seconds by which the deadline can still be met if it goes on now; None without a deadline."""
        deadline = flow.demand.deadline
        return None if deadline is None else deadline - self.begin - self.needs(flow)

    def late(self, flow: Flow) -> bool:
        """Whether the deadline is out of reach, by more than a measured rate can be wrong."""
        slack = self.slack(flow)
        return slack is not None and slack < -0.02 * self.needs(flow)

    def aged(self, flow: Flow) -> bool:
        """Whether bytes have been ready without credit for too long."""
        return flow.hungry and self.now - flow.hungry_since >= self.limits.max_wait_s

    def oldest(self, flows: Iterable[Flow]) -> Flow | None:
        """Return the aged transfer that has waited longest; None if none has aged."""
        return min(filter(self.aged, flows), key=lambda f: (f.hungry_since, f.demand.transfer), default=None)

    def on_time(self, flows: Iterable[Flow]) -> list[Flow]:
        """Return the transfers that can all meet their deadlines, by deadline: as many as possible."""
        due = [(f.demand.deadline, f.demand.transfer, f) for f in flows if f.demand.deadline is not None]
        due.sort(key=lambda entry: entry[:2])
        longest: list[tuple[float, str]] = []
        given_up: set[str] = set()
        end = self.begin
        for deadline, name, flow in due:
            needs = self.needs(flow)
            heapq.heappush(longest, (-needs, name))
            end += needs
            if end > deadline:
                saved, name = heapq.heappop(longest)
                end += saved
                given_up.add(name)
        return [flow for _, name, flow in due if name not in given_up]

    def first(self, flows: Sequence[Flow], step: int) -> tuple[Flow, Rank]:
        """Return who gets the next `step` bytes, and as what. Raises ValueError if there is nobody."""
        waited_for = [f for f in flows if not f.demand.bulk]
        if not waited_for:
            return min(flows, key=_shortest), Rank.BULK
        on_time = self.on_time(waited_for)
        pool: Sequence[Flow] = waited_for
        if self.limits.late != "shared":
            safe = {f.demand.transfer for f in on_time}
            pool = [f for f in waited_for if f.demand.deadline is None or f.demand.transfer in safe]
            if not pool:
                return min(waited_for, key=_shortest), Rank.BULK
        shortest = min(pool, key=_shortest)
        end = self.begin + step / self.rate + self.limits.urgent_s
        for flow in on_time:
            if flow is shortest:
                break
            end += self.needs(flow)
            if flow.demand.deadline is not None and end > flow.demand.deadline:
                return on_time[0], Rank.URGENT
        return shortest, Rank.NORMAL

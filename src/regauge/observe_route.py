"""Metrics of routing: what the router has decided, and how far its index of prefix caches can be relied on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

DECISIONS: Final = ("placed", "no_worker", "no_room", "deadline", "tpot", "overload")
"""What the router says of an attempt (`route.cluster.Reason`)."""


@dataclass(frozen=True)
class RouteMetrics:
    """The router's own totals, counted by what they have grown."""

    decisions: Counter
    gaps: Counter
    dropped: Counter
    blocks: Gauge
    told: dict[str, int] = field(default_factory=dict)
    """The totals when they were last counted."""

    @classmethod
    def create(cls, registry: CollectorRegistry) -> RouteMetrics:
        """Return them on a registry."""
        return cls(
            decisions=Counter(
                "regauge_route_decisions_total",
                "Attempts that the router has placed, and those that it has not, by the reason.",
                ["decision"],
                registry=registry,
            ),
            gaps=Counter(
                "regauge_prefix_index_gaps_total",
                "Times that events of a worker's prefix cache were missing.",
                registry=registry,
            ),
            dropped=Counter(
                "regauge_prefix_index_dropped_total",
                "Blocks that the prefix index has forgotten for want of room (route.index_blocks).",
                registry=registry,
            ),
            blocks=Gauge(
                "regauge_prefix_index_blocks",
                "Blocks in the prefix index, over all workers; of several gateway processes, in the largest.",
                registry=registry,
                multiprocess_mode="livemax",
            ),
        )

    def count(self, decisions: Mapping[str, int], *, gaps: int, dropped: int, blocks: int) -> None:
        """Take the totals so far; `decisions` by what was decided, of which those not in `DECISIONS` are left out."""
        for decision in DECISIONS:
            if grown := self._grown(decision, decisions.get(decision, 0)):
                self.decisions.labels(decision).inc(grown)
        self.gaps.inc(self._grown("gaps", gaps))
        self.dropped.inc(self._grown("dropped", dropped))
        self.blocks.set(blocks)

    def _grown(self, name: str, total: int) -> int:
        before, self.told[name] = self.told.get(name, 0), total
        return total - before

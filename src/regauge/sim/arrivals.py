"""The requests of a scenario: a trace, cut, speeded up and multiplied, or made ones; and for each seed its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.sim.scenario import TraceTable
from regauge.sim.trace import BLOCK, Arrival, generate, paced, read, spread

MADE = 2_000
"""Made requests, unless the scenario says how many,"""
RATE = 1.0
"""and how many a second."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What comes."""

    name: str
    table: TraceTable
    arrivals: Sequence[Arrival]
    block: int
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Return how many come."""
        return len(self.arrivals) if self.table.file else self.table.requests or MADE

    def of(self, seed: int) -> list[Arrival]:
        """Return the arrivals of a seed: ticks of the trace spread, or made, by it."""
        if not self.table.file:
            return generate(seed, self.table.requests or MADE, self.table.rate or RATE)
        return paced(spread(self.arrivals, seed), self.table.scale)

    def told(self) -> dict[str, Any]:
        """Return what they are, for a report."""
        return {"name": self.name, "requests": self.count, "block": self.block}


def load(table: TraceTable) -> Requests:
    """Read a scenario's trace. Raises ConfigError as `trace.read`."""
    if not table.file:
        return Requests("made conversations", table, (), BLOCK)
    arrivals = read(Path(table.file))
    return Requests(Path(table.file).name, table, arrivals[: table.requests or None], BLOCK)

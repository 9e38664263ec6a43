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
    """Of a file; empty where the seed makes them."""
    block: int
    """Tokens of a block."""
    tick_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Return how many come."""
        return len(self.arrivals) if self.table.file else self.table.requests or MADE

    def of(self, seed: int) -> Sequence[Arrival]:
        """Return the arrivals of a seed: ticks of the trace spread, or all made, by it."""
        if not self.table.file:
            return generate(seed, self.count, self.table.rate or RATE)
        moved = spread(self.arrivals, seed, self.tick_s) if self.tick_s else self.arrivals
        return paced(moved, self.table.scale)

    def told(self) -> dict[str, Any]:
        """Return what they are, for a report."""
        return {"name": self.name, "requests": self.count, "block": self.block}


def load(table: TraceTable) -> Requests:
    """Read a scenario's trace. Raises ConfigError as `trace.read`, naming file, line and remedy."""
    if not table.file:
        return Requests("made conversations", table, (), BLOCK)
    trace = read(Path(table.file), form=table.format, limit=table.requests)
    return Requests(trace.name, table, trace.arrivals, trace.block or BLOCK, trace.tick_s, trace.notes)

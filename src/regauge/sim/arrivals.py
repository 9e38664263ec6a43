"""The requests of a scenario: a trace, cut, speeded up and multiplied, or made ones; and for each seed its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.errors import ConfigError
from regauge.sim.scenario import TraceTable
from regauge.sim.trace import BLOCK, Arrival, Trace, generate, read
from regauge.sim.trace_shape import dequantised, parse_slice, replicas, scaled, sliced, staggered

MADE = 2_000
"""Made requests, unless the scenario says how many,"""
RATE = 1.0
"""and how many a second."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What comes."""

    table: TraceTable
    trace: Trace | None
    """None: the seed makes them."""

    @property
    def name(self) -> str:
        """Return what to call them."""
        return "made conversations" if self.trace is None else self.trace.name

    @property
    def count(self) -> int:
        """Return how many come."""
        if self.trace is None:
            return self.table.requests or MADE
        return len(self.trace) * self.table.copies

    @property
    def block(self) -> int:
        """Return the tokens of a block; of a trace that says nothing of reuse, some number that does not matter."""
        return (self.trace.block if self.trace is not None else 0) or BLOCK

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the reader of results must know."""
        if self.trace is None:
            return ()
        if self.table.rate is not None:
            return (f"{self.name}: sessions begin at random, {self.table.rate:g} a second",)
        return self.trace.notes

    def of(self, seed: int) -> Iterable[Arrival]:
        """Return the arrivals of a seed: by it, ticks of the trace are spread, sessions begin, copies are moved, or all is made."""
        table, trace = self.table, self.trace
        if trace is None:
            return generate(seed, self.count, table.rate or RATE)
        if table.rate is not None:
            trace = staggered(trace, table.rate, seed)
        if table.copies == 1:
            return dequantised(trace, seed).arrivals
        copied = replicas(trace, table.copies, seed)
        return tuple(copied) if _sessions(trace) else copied

    def told(self) -> dict[str, Any]:
        """Return what they are, for a report."""
        return {"name": self.name, "requests": self.count, "block": self.block}


def load(table: TraceTable) -> Requests:
    """Read a scenario's trace. Raises ConfigError naming file, line and remedy, or the field that does not go with this trace."""
    if not table.file:
        return Requests(table, None)
    trace = read(Path(table.file), form=table.format)
    if table.slice:
        trace = sliced(trace, parse_slice(table.slice))
    if table.requests and table.requests < len(trace):
        trace = sliced(trace, parse_slice(f"0:{table.requests}r"))
    together = all(each.at == 0.0 for each in trace.arrivals)
    if together and len(trace) > 1 and table.rate is None:
        raise ConfigError(
            f"trace.rate: {trace.name} does not say when its sessions begin; say how many a second (--rate)"
        )
    if not together and table.rate is not None:
        raise ConfigError(f"trace.rate: {trace.name} says when its requests come; pace it by trace.scale (--scale)")
    return Requests(table, scaled(trace, table.scale))


def _sessions(trace: Trace) -> bool:
    return any(each.after >= 0 for each in trace.arrivals)

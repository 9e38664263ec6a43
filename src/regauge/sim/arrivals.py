"""The requests of a scenario: a trace, cut, speeded up and multiplied, or made ones; and for each seed its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.errors import ConfigError
from regauge.sim import synthetic
from regauge.sim.scenario import TraceTable
from regauge.sim.synthetic_fit import fit
from regauge.sim.synthetic_model import Fitted
from regauge.sim.trace import BLOCK, Arrival, Trace, generate, read
from regauge.sim.trace_shape import dequantised, parse_slice, replicas, scaled, sliced, staggered

MADE = 2_000
"""Made requests, unless the scenario says how many,"""
RATE = 1.0
"""and how many a second."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What comes."""

    name: str
    count: int
    block: int
    """Tokens of a block; of a trace that says nothing of reuse, some number that does not matter."""
    table: TraceTable
    trace: Trace | None = None
    """None: they are made."""
    like: Fitted | None = None
    """How; None: as conversations."""
    notes: tuple[str, ...] = ()
    """What the reader of results must know."""

    def of(self, seed: int) -> Iterable[Arrival]:
        """Return the arrivals of a seed: by it, ticks of the trace are spread, sessions begin, copies are moved, or all is made."""
        table, trace = self.table, self.trace
        if trace is None:
            if self.like is None:
                return generate(seed, self.count, table.rate or RATE)
            return tuple(synthetic.generate(self.like, self.count, table.rate, seed))
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
    if table.like:
        like = synthetic.load(Path(table.like)) if table.like.endswith(".json") else fit(_read(table.like, table))
        if table.rate is None and not like.times.per_s > 0:
            raise ConfigError(
                f"trace.rate: {like.name} does not say how often sessions begin; say how many a second (--rate)"
            )
        return Requests(f"like {like.name}", table.requests or MADE, like.block or BLOCK, table, like=like)
    if not table.file:
        return Requests("made conversations", table.requests or MADE, BLOCK, table)
    trace = _read(table.file, table)
    if table.requests and table.requests < len(trace):
        trace = sliced(trace, parse_slice(f"0:{table.requests}r"))
    notes = trace.notes
    unknown = () if trace.block else (f"{trace.name} says nothing of prompts that begin alike, so nothing is cached",)
    if all(each.at == 0.0 for each in trace.arrivals) and len(trace) > 1:
        if table.rate is None:
            raise ConfigError(
                f"trace.rate: {trace.name} does not say when its sessions begin; say how many a second (--rate)"
            )
        if table.scale != 1.0:
            raise ConfigError(
                "trace.scale: sessions of this trace begin as often as trace.rate (--rate) says; change that"
            )
        notes = (f"{trace.name}: sessions begin at random, {table.rate:g} a second",)
    elif table.rate is not None:
        raise ConfigError(f"trace.rate: {trace.name} says when its requests come; pace it by trace.scale (--scale)")
    count = len(trace) * table.copies
    return Requests(trace.name, count, trace.block or BLOCK, table, scaled(trace, table.scale), notes=notes + unknown)


def _read(name: str, table: TraceTable) -> Trace:
    trace = read(Path(name), form=table.format)
    return sliced(trace, parse_slice(table.slice)) if table.slice else trace


def _sessions(trace: Trace) -> bool:
    return any(each.after >= 0 for each in trace.arrivals)

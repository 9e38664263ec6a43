"""How long prefill and a decode step take, with how far each may be off. A model: what it says is not measured.

Every uncertain number is an `Interval`; what is computed of them is computed for the lowest, the likeliest and the highest, so that a
result's limits hold if all inputs err the same way at once.

| time | formula | source |
|---|---|---|
| prefill | overhead + operations / (rate x compute) | roofline (Williams et al., 2009): prefill of long prompts is bound by compute |
| decode step | overhead + max((weights read + KV read) / (bandwidth x memory), operations / (rate x compute)) | the same, bound by memory |
| weights read | total x (1 - (1 - active / total)^batch) | distinct experts of `batch` independent uniform draws |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from regauge.errors import ConfigError
from regauge.sim.devices import Accelerator, Curves, Figure, curves
from regauge.sim.work import Work

_UNMEASURED = Curves(None, None)


@dataclass(frozen=True, slots=True)
class Interval:
    """A likeliest value between the lowest and the highest that it may be."""

    low: float
    value: float
    high: float

    def __post_init__(self) -> None:
        if not (isfinite(self.low) and isfinite(self.high) and self.low <= self.value <= self.high):
            raise ConfigError(f"interval {self.low}, {self.value}, {self.high}: low <= value <= high, all finite")

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.value + other.value, self.high + other.high)

    def __mul__(self, other: Interval) -> Interval:
        """Return the product of two that are not negative."""
        return Interval(self.low * other.low, self.value * other.value, self.high * other.high)

    def __truediv__(self, other: Interval) -> Interval:
        """Return the quotient of one that is not negative by one that is positive."""
        return Interval(self.low / other.high, self.value / other.value, self.high / other.low)


def exactly(value: float) -> Interval:
    """Return an interval of one value."""
    return Interval(value, value, value)


def of(figure: Figure, unit: float = 1.0) -> Interval:
    """Return a catalogue's figure with its range, times a unit (10^12 for tera)."""
    low, high = (figure.value if x is None else x for x in (figure.low, figure.high))
    return Interval(low * unit, figure.value * unit, high * unit)


@dataclass(frozen=True, slots=True)
class Machine:
    """The cards that work on one request together, and what part of their peak they reach."""

    rate: Interval
    """Operations per second at the peak, all cards."""
    bandwidth: Interval
    """Bytes per second of memory, all cards."""
    compute: Interval
    """Part of the peak rate that is reached (MFU)."""
    memory: Interval
    """Part of the bandwidth that is reached."""
    overhead: float = 0.0
    """Seconds of a prefill beside its computing."""
    step_overhead: float = 0.0
    """Seconds of a decode step beside its reading and computing."""
    measured: Curves = _UNMEASURED
    """What was measured, which then stands in place of the roofline."""


def machine(card: Accelerator, cards: int, *, fp8: bool, compute: Interval, memory: Interval) -> Machine:
    """Return so many cards of the catalogue together, without overheads, with the curves that the card names.

    Raises ConfigError for a card whose rate nobody published, and for a curve that cannot be read.
    """
    rate = card.fp8_tflops if fp8 else card.bf16_tflops
    if rate is None or card.memory_gb_per_s is None:
        field = ("fp8_tflops" if fp8 else "bf16_tflops") if rate is None else "memory_gb_per_s"
        raise ConfigError(f"{card.name}: no {field} in the catalogue; add it in a file of your own")
    if cards < 1:
        raise ConfigError("cards: one or more")
    return Machine(
        of(rate, cards * 1e12), of(card.memory_gb_per_s, cards * 1e9), compute, memory, measured=curves(card)
    )


def prefill_seconds(work: Work, first: int, end: int, on: Machine) -> Interval:
    """Return the seconds of prefilling tokens [first, end), those before `first` being in the cache.

    Of a measured curve T: T(end) - T(first) + T(0), what the tokens add, and the fixed part once.
    """
    operations = work.operations(first, end)
    if on.measured.prefill is not None:
        curve = on.measured.prefill
        return exactly(max(curve(end) - curve(first), 0.0) + curve(0.0))
    return exactly(on.overhead) + exactly(operations) / (on.rate * on.compute)


@dataclass(frozen=True, slots=True)
class Point:
    """One published or measured prefill rate."""

    tokens: int
    """Of the prompt."""
    tokens_per_s: float
    """Prompt tokens, cached ones counted."""
    hit: float = 0.0
    """Part of the prompt that was in the cache, from its start."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The one constant that fits points best, and how far it is from each."""

    fitted: Interval
    """Its limits are the least and the greatest that one point alone asks for."""
    at: tuple[float, ...]
    """What each point alone asks for."""
    residuals: tuple[float, ...]
    """Modelled over given tokens per second, minus 1."""
    impossible: tuple[int, ...]
    """Points, by place, that ask for more than the whole peak rate."""


def fit_efficiency(work: Work, points: Sequence[Point], rate: float) -> Efficiency:
    """Fit one efficiency to points by least squares of relative errors; `rate` is the peak, in operations per second.

    Modelled over given is eta / eta_k, so the best eta is sum(1 / eta_k) / sum(1 / eta_k^2). Raises ConfigError for
    nonsense.
    """
    if not points or not 0.0 < rate < inf:
        raise ConfigError("efficiency: give one or more points and a positive peak rate")
    asked = []
    for p in points:
        if p.tokens < 1 or not 0.0 < p.tokens_per_s < inf or not 0.0 <= p.hit < 1.0:
            raise ConfigError(f"{p}: tokens and rate are positive, hit is from 0 to below 1")
        seconds = p.tokens / p.tokens_per_s
        asked.append(work.operations(round(p.tokens * p.hit), p.tokens) / seconds / rate)
    best = sum(1 / x for x in asked) / sum(1 / x**2 for x in asked)
    residuals = tuple(best / x - 1.0 for x in asked)
    return Efficiency(
        Interval(min(asked), min(max(best, min(asked)), max(asked)), max(asked)),
        tuple(asked),
        residuals,
        tuple(k for k, x in enumerate(asked) if x > 1.0),
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """What a model's weights take, in bytes, all ranks together."""

    total: float
    active: float
    """Of those that one token goes through."""

    def read(self, batch: int) -> float:
        """Return the bytes of weights that a step of `batch` tokens reads, experts being drawn evenly and independently."""
        if batch < 1 or not 0.0 < self.active <= self.total:
            raise ConfigError("weights: batch is 1 or more, 0 < active <= total")
        return self.total * (1.0 - (1.0 - self.active / self.total) ** batch)


def decode_seconds(
    work: Work, weights: Weights, on: Machine, *, batch: int, context: int, token_bytes: float
) -> Interval:
    """Return the seconds of one decode step of `batch` requests with `context` tokens each.

    `token_bytes`: KV bytes that a step reads for one token of context. A measured curve is read at batch x context tokens.
    """
    nbytes = weights.read(batch) + batch * context * token_bytes
    if on.measured.decode is not None:
        return exactly(on.measured.decode(batch * context))
    read = exactly(nbytes) / (on.bandwidth * on.memory)
    computed = exactly(batch * work.operations(context, context + 1)) / (on.rate * on.compute)
    slower = Interval(max(read.low, computed.low), max(read.value, computed.value), max(read.high, computed.high))
    return exactly(on.step_overhead) + slower

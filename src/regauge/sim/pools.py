"""What one instance of either pool does, and what crosses between them: everything about a plan that does not depend on how many servers
there are.

Every uncertain constant has three values. `Which` says whose world is computed: "low" has all rates at their lowest, "value" at their
likeliest, "high" at their highest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil, inf, isinf, sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np

from regauge.errors import ConfigError, Refused
from regauge.layout.config import language_model, read_config
from regauge.layout.presets import load_named
from regauge.plan import cost
from regauge.plan.cost import Setting
from regauge.plan.explain import Explanation, explain
from regauge.sim.ask import SPANNING, Ask, Pool, Side, known
from regauge.sim.curves import Measured
from regauge.sim.devices import Accelerator, Figure, Nic
from regauge.sim.memory import Kept, kept, room, spans
from regauge.sim.model import (
    Efficiency,
    Interval,
    Machine,
    Weights,
    decode_seconds,
    exactly,
    fit_efficiency,
    machine,
    of,
)
from regauge.sim.plan_result import ENDLESS
from regauge.sim.queueing import poisson_percentile
from regauge.sim.work import Term, Work, model_work
from regauge.sim.workload import Floats

Which = Literal["low", "value", "high"]
WORLDS: tuple[Which, ...] = ("low", "value", "high")
MAX_BATCH = 1 << 16
_TOKENS = (1024, 9216)
"""Prompts whose transfer is planned: bytes of a token are the difference's, those of a request the rest."""
_Z99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, slots=True)
class Site:
    """A pool with the catalogue's figures filled in."""

    side: Side
    pool: Pool
    card: Accelerator
    cards: int
    nic: Nic
    nics: int
    weights: Weights
    """Bytes."""
    kept: Kept
    spans: range
    """Servers that an instance may span."""

    def line(self, which: Which) -> float:
        """Return the line rate of a NIC in bytes per second."""
        assert self.nic.gbit_per_s is not None  # noqa: S101  # the catalogue has it of every NIC
        return float(getattr(of(self.nic.gbit_per_s, 1e9 / 8), which))

    def payload(self, which: Which) -> float:
        """Return the payload bytes per second of a NIC."""
        assert self.nic.share is not None  # noqa: S101  # refused by `_site`
        return self.line(which) * float(getattr(of(self.nic.share), which))

    def room(self, span: int) -> float:
        """Return the bytes for KV in an instance."""
        return room(self.pool, self.card, self.cards, span, self.weights.total)

    @property
    def fp8(self) -> bool:
        """Whether it computes in 8 bits: weights of 8 bits or fewer on a card that has such a rate."""
        return self.pool.weight_bits <= 8.0 and self.card.fp8_tflops is not None

    def machine(self, span: int, which: Which) -> Machine:
        """Return an instance's machine in one world. A curve that was measured is that of an instance, whatever it spans."""
        one = machine(self.card, self.cards, fp8=self.fp8, compute=self.pool.compute, memory=self.pool.memory)
        scale = 1.0 + (span - 1) * getattr(SPANNING, which)
        parts = {name: getattr(getattr(one, name), which) for name in ("rate", "bandwidth", "compute", "memory")}
        return Machine(
            exactly(parts["rate"] * scale), exactly(parts["bandwidth"] * scale), exactly(parts["compute"]), exactly(parts["memory"]),
            self.pool.overhead_s, self.pool.step_overhead_s, one.measured,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Facts:
    """What follows from a question before servers are counted."""

    ask: Ask
    work: Work
    prefill: Site
    decode: Site
    crossing: Explanation
    """Of the first of `_TOKENS`."""
    wire_token: float
    """Bytes that cross for a token, all copies."""
    wire_fixed: float
    """And for a request."""
    kernel_token_s: float
    """Seconds of kernels for a token: gathering, converting, scattering."""
    hidden: int
    """Elements of a token's activation."""
    fit: Efficiency | None
    steps: dict[tuple[int, Which], Step] = field(default_factory=dict)
    times: dict[tuple[Side, int, Which], Floats] = field(default_factory=dict)

    @cached_property
    def sent(self) -> Floats:
        """Bytes that cross for each request."""
        load = self.ask.workload
        tokens = load.prompt - load.cached if self.ask.delta else load.prompt
        return self.wire_fixed + self.wire_token * tokens

    @cached_property
    def sent_mean(self) -> float:
        """Bytes that cross for the mean request."""
        return self.ask.workload.mean(self.sent)

    def prefill_s(self, span: int, which: Which, site: Site | None = None) -> Floats:
        """Return the seconds of each request's prefill on an instance of the prefill pool, or another."""
        load, at = self.ask.workload, site or self.prefill
        key = (at.side, span, which)
        if key not in self.times:
            self.times[key] = prefill_times(self.work, load.cached, load.prompt, at.machine(span, which))
        return self.times[key]

    def step(self, span: int, which: Which) -> Step:
        """Return the decode step of an instance."""
        key = (span, which)
        if key not in self.steps:
            self.steps[key] = Step(self, self.decode.machine(span, which))
        return self.steps[key]


class Step:
    """A decode step of one instance: its time by the number of requests in it."""

    def __init__(self, facts: Facts, on: Machine) -> None:
        load, kept_ = facts.ask.workload, facts.decode.kept
        context, stay = load.prompt + load.output / 2.0, load.output * load.weight
        self._facts, self._on, self._known = facts, on, dict[int, tuple[float, bool]]()
        self.context = float(stay @ context / stay.sum())
        """Mean tokens of a request that is generating."""
        self.token_bytes = float(stay @ kept_.read(context) / stay.sum()) / self.context
        """KV bytes that a step reads for a token of context."""
        self.output = load.mean(load.output)

    def __call__(self, batch: int) -> float:
        """Return the seconds of a step."""
        return self._at(batch)[0]

    def between(self, batch: float) -> float:
        """Return the seconds of a step, linear between whole batches; `ENDLESS` beyond all."""
        if isinf(batch) or batch > MAX_BATCH:
            return ENDLESS
        low = max(int(batch), 1)
        return self(low) + (self(low + 1) - self(low)) * max(batch - low, 0.0)

    def computing(self, batch: int) -> bool:
        """Say whether a step is bound by computing, not by the memory's bandwidth."""
        return self._at(batch)[1]

    def _at(self, batch: int) -> tuple[float, bool]:
        if batch not in self._known:
            facts, context = self._facts, max(round(self.context), 1)
            seconds = decode_seconds(
                facts.work, facts.decode.weights, self._on, batch=batch, context=context, token_bytes=self.token_bytes
            ).value
            computed = (
                batch * facts.work.operations(context, context + 1) / (self._on.rate.value * self._on.compute.value)
            )
            self._known[batch] = seconds, computed + self._on.step_overhead >= seconds * (1.0 - 1e-12)
        return self._known[batch]

    def most(self, seconds: float) -> int:
        """Return the largest batch whose step takes at most so long; 0: none."""
        if self(1) > seconds:
            return 0
        low, high = 1, 2
        while high <= MAX_BATCH and self(high) <= seconds:
            low, high = high, 2 * high
        return low if high > MAX_BATCH else _bisect(low, high, lambda b: self(b) <= seconds)

    def generating(self, rate: float) -> float:
        """Return how many requests generate at a time at so many requests per second; inf: more than it can bear.

        The least batch b with b / step(b) >= tokens per second, times the part of it that the load fills.
        """
        tokens = rate * self.output
        if tokens <= 0.0:
            return 0.0
        low, high = 0, 1
        while high <= MAX_BATCH and high / self(high) < tokens:
            low, high = high, 2 * high
        if high > MAX_BATCH:
            return inf
        batch = high if low == 0 else _bisect(high, low, lambda b: b / self(b) >= tokens)
        return tokens * self(batch)


@dataclass(frozen=True, slots=True)
class Resident:
    """KV in a decode instance at a time, bytes: requests come at random, so it is a compound Poisson variable."""

    mean: float
    peak: float
    """Its 99th percentile, by the normal distribution."""


def resident(facts: Facts, rate: float, step_s: float, hold: Floats) -> Resident:
    """Return the KV of a decode instance that gets `rate` requests per second.

    Pages for prompt and answer are there from the grant on: while prefill computes (`hold`, seconds of each), and while tokens are
    generated.
    """
    load = facts.ask.workload
    kv = facts.decode.kept.bytes(load.prompt + load.output)
    stay = hold + load.output * step_s
    mean, square = rate * load.mean(kv * stay), rate * load.mean(kv * kv * stay)
    return Resident(mean, mean + _Z99 * sqrt(square))


def seen(generating: float, share: float) -> int:
    """Return the batch that a share of the steps' requests see at most: themselves and a Poisson number of others."""
    return 1 + poisson_percentile(generating, share)


def facts(ask: Ask) -> Facts:
    """Work out what follows from a question. Raises ConfigError, LayoutError; Refused for layouts without a path, for a model that does
    not fit, and for given rates over the peak."""
    total, active = _sizes(ask)
    work = model_work(ask.model, active * 1e9)
    ask, fit = _fitted(ask, work)
    prefill, decode = _site(ask, "prefill", total, active), _site(ask, "decode", total, active)
    kv, line, kernels = (ask.prefill.kv, ask.decode.kv), prefill.line("value"), cost.encode(ask.kernels)
    near, far = (_crossing(ask.model, kv, line, ask.chunk_tokens, kernels, n) for n in _TOKENS)
    between = _TOKENS[1] - _TOKENS[0]
    token = (far.wire_bytes - near.wire_bytes) / between
    copies = ask.decode.copies
    values, _ = read_config(ask.model)
    return Facts(
        ask, work, prefill, decode, near, token * copies, (near.wire_bytes - token * _TOKENS[0]) * copies,
        (_kernels(far) - _kernels(near)) / between * copies, language_model(values).integer("hidden_size"), fit,
    )  # fmt: skip


def prefill_times(work: Work, cached: Floats, prompt: Floats, on: Machine) -> Floats:
    """Return the seconds of many prefills: `model.prefill_seconds` of each, at the machine's likeliest constants."""
    curve = on.measured.prefill
    if curve is not None:
        start = float(curve(0.0))
        return np.maximum(_curve(curve, prompt) - _curve(curve, cached), 0.0) + start
    rate = on.rate.value * on.compute.value
    done = work.per_token * (prompt - cached) + sum(
        (_pairs(t, prompt) - _pairs(t, cached) for t in work.terms), np.zeros_like(prompt)
    )
    return np.asarray(on.overhead + done / rate)


def _pairs(term: Term, end: Floats) -> Floats:
    short = term.per_pair * end * (end - 1.0) / 2.0
    if not term.most:
        return np.asarray(short, float)
    long = term.per_pair * (term.most * (term.most - 1) / 2.0 + (end - term.most) * term.most)
    return np.asarray(np.where(end <= term.most, short, long), float)


def _curve(curve: Measured, tokens: Floats) -> Floats:
    """`Measured` of many: between points np.interp, beyond them the outermost lines."""
    x, y = (np.array(column) for column in zip(*curve.points, strict=True))
    found = np.interp(tokens, x, y)
    for beyond, (a, b), at in ((tokens < x[0], (0, 1), 0), (tokens > x[-1], (-2, -1), -1)):
        slope = (y[b] - y[a]) / (x[b] - x[a])
        found = np.where(beyond, y[at] + slope * (tokens - x[at]), found)
    return np.asarray(np.maximum(found, 0.0), float)


def _bisect(yes: int, no: int, holds: Callable[[int], bool]) -> int:
    """Return the last number on the way from `yes` to `no` for which a monotone condition holds."""
    while abs(yes - no) > 1:
        middle = (yes + no) // 2
        yes, no = (middle, no) if holds(middle) else (yes, middle)
    return yes


def _sizes(ask: Ask) -> tuple[float, float]:
    """Parameters in 10^9, total and of one token."""
    if ask.total_b and ask.active_b:
        total, active = ask.total_b, ask.active_b
    else:
        size = ask.catalogue.models.get(ask.model)
        if size is None or size.total_b is None or size.active_b is None:
            listed = ", ".join(sorted(ask.catalogue.models))
            raise ConfigError(
                f"model: the catalogue has no size of {ask.model!r}; it has {listed}; give --parameters TOTAL:ACTIVE"
            )
        total, active = ask.total_b or size.total_b.value, ask.active_b or size.active_b.value
    if active > total:
        raise ConfigError(f"parameters: {active:g} of {total:g} x 10^9 are active: give no more than there are")
    return total, active


def _fitted(ask: Ask, work: Work) -> tuple[Ask, Efficiency | None]:
    """Fit prefill's efficiency to given rates of one server."""
    if not ask.points:
        return ask, None
    pool = ask.prefill
    card, cards = _cards(ask, pool)
    fp8 = pool.weight_bits <= 8.0 and card.fp8_tflops is not None
    peak = machine(card, cards, fp8=fp8, compute=pool.compute, memory=pool.memory).rate.value
    fit = fit_efficiency(work, ask.points, peak)
    if fit.impossible:
        reasons = [
            f"{ask.points[k].tokens_per_s:g} tokens/s at {ask.points[k].tokens} tokens ask for {fit.at[k]:.0%} of the peak rate of "
            f"{cards} x {card.name}: give the part of the prompt that was cached, as TOKENS:RATE:HIT"
            for k in fit.impossible
        ]
        raise Refused(tuple(reasons))
    return replace(ask, prefill=replace(pool, compute=fit.fitted)), fit


def _cards(ask: Ask, pool: Pool) -> tuple[Accelerator, int]:
    card = known(ask.catalogue.accelerators, pool.device, "device")
    return card, pool.cards or int(_given(card.cards, "cards", card.name).value)


def _given(figure: Figure | None, field_: str, name: str) -> Figure:
    if figure is None:
        raise ConfigError(f"{name}: no {field_} in the catalogue; add it in a file of your own")
    return figure


def _site(ask: Ask, side: Side, total: float, active: float) -> Site:
    pool: Pool = getattr(ask, side)
    card, cards = _cards(ask, pool)
    name = pool.nic or card.nic
    nic = known(ask.catalogue.nics, name, f"{side}.nic")
    _given(nic.share, "share", f"nics.{name}")
    nics = pool.nics or int(_given(card.nics, "nics", card.name).value)
    if pool.rails > nics:
        raise ConfigError(f"{side}.rails {pool.rails}: a server has {nics} NICs")
    layout = load_named(pool.kv, ask.model)
    held = kept(layout, ask.model, pool.copies)
    load = ask.workload
    longest = float(held.bytes(load.prompt + (load.output if side == "decode" else 0.0)).max())
    weights = Weights(total * 1e9 * pool.weight_bits / 8.0, active * 1e9 * pool.weight_bits / 8.0)
    return Site(side, pool, card, cards, nic, nics, weights, held, spans(ask, side, pool, card, cards, total, longest))


@lru_cache(maxsize=64)
def _crossing(model: str, kv: tuple[str, str], line: float, chunk: int, kernels: bytes, tokens: int) -> Explanation:
    """Plan the transfer of so many tokens; `kernels` are the constants as TOML."""
    setting = Setting("rdma", line, chunk_tokens=chunk)
    return explain(
        *(load_named(side, model) for side in kv), tokens=tokens, constants=cost.decode(kernels), setting=setting
    )


def _kernels(crossing: Explanation) -> float:
    """Seconds of kernels in the chosen ways, both sides."""
    parts = ("gather", "scatter", "kernel")
    return sum(g.decision.chosen.parts.get(p, 0.0) for g in crossing.groups for p in parts)


def interval(worlds: Iterable[float]) -> Interval:
    """Return the interval of a figure in the three worlds, whichever way it goes with the rates; endless ones as `ENDLESS`."""
    found = [ENDLESS if isinf(x) else x for x in worlds]
    return Interval(min(found), found[1], max(found))


def whole(instances: float) -> int:
    """Return the least number of instances that is not below an exact need, one at least."""
    return max(1, ceil(instances - 1e-9))

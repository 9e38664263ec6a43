"""A plan's servers in the simulator, with the real router: its percentiles beside those in closed form. SIMULATED.

The workers are the model's at its likeliest constants; what differs from the closed forms is what a router does: each instance has a
queue of its own, prefix caches are finite and apart, NICs carry what comes when it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from regauge.config_route import RouteConfig
from regauge.errors import ConfigError
from regauge.sim.cluster import Cluster
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.fleet import Fleet
from regauge.sim.log import Log
from regauge.sim.model import decode_seconds, prefill_seconds
from regauge.sim.plan_result import Plan
from regauge.sim.pools import Facts, facts
from regauge.sim.trace import Arrival, Trace, paced, spread
from regauge.sim.workload import Floats

WARM = 0.1
"""Part of the requests that fill queues and caches and are not counted."""
MAX_REQUESTS = 2_000_000
MAX_PAIRS = 100_000
"""Pairs of instances: the router knows a link of each, some 10 s to tell it all."""
_PAGE = 64
_BATCHES = 4096
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of the requests that were counted."""

    mean: float
    p50: float
    p90: float
    p99: float
    met: float
    """Share of all that were counted, refused ones too, within the SLO."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the simulator says of a plan."""

    requests: int
    """That were counted."""
    complete: float
    """Share of them."""
    ttft: Spread
    """Without the decode step that follows, which the closed form counts."""
    tpot: Spread
    hit: float
    prefill_busy: float
    seconds: float
    """Of the simulated clock."""


def simulate(plan: Plan, requests: int, *, trace: Trace | None = None, seed: int = 0) -> Simulated:
    """Run so many requests through a plan's servers. Raises ConfigError for a trace in closed loops and for counts that cannot be.

    `trace`: the one that the plan's workload is of, for its prefixes and its order; None: requests drawn from the workload, each with the
    workload's cached share.
    """
    if not 100 <= requests <= MAX_REQUESTS:
        raise ConfigError(f"--simulate {requests}: give 100 to {MAX_REQUESTS} requests")
    p, d = plan.prefill, plan.decode
    if (pairs := (p.servers // p.span) * (d.servers // d.span)) > MAX_PAIRS:
        raise ConfigError(
            f"--simulate: {pairs:,} pairs of instances, {MAX_PAIRS:,} at most: plan a part of the load on a part of the servers"
        )
    found, slo = facts(plan.ask), plan.ask.slo
    asked = _drawn(found, requests, seed) if trace is None else _traced(found, trace, requests, seed)
    result = Fleet(_cluster(found, plan, trace), RouteConfig(), seed).run(asked, warm=int(len(asked) * WARM))
    log = result.log
    if not log.complete.any():
        raise ConfigError("the simulation completed no request: there is no room for any on these servers")
    return Simulated(
        len(log), float(log.complete.mean()), _spread(log.ttft(), slo.ttft_s, log), _spread(log.tpot(), slo.tpot_s, log),
        result.hit if trace is not None else found.ask.workload.hit, result.prefill_busy, result.seconds,
    )  # fmt: skip


def _spread(values: Floats, limit: float, log: Log) -> Spread:
    """The times of complete requests; those of one token have no time per token, and keep to any limit."""
    without = int(log.complete.sum()) - len(values)
    met = (int((values <= limit).sum()) + without) / len(log)
    if not len(values):
        return Spread(0.0, 0.0, 0.0, 0.0, met)
    p50, p90, p99 = (float(x) for x in np.quantile(values, (0.5, 0.9, 0.99)))
    return Spread(float(values.mean()), p50, p90, p99, met)


def _drawn(found: Facts, requests: int, seed: int) -> Sequence[Arrival]:
    load, rng = found.ask.workload, np.random.default_rng(seed)
    chosen = rng.choice(len(load.prompt), requests, p=load.weight / load.weight.sum())
    at = np.cumsum(rng.exponential(1.0 / load.rate, requests))
    prompts, outputs = (np.maximum(np.rint(x[chosen]), 1).astype(int) for x in (load.prompt, load.output))
    return [Arrival(float(t), int(p), int(o), ()) for t, p, o in zip(at, prompts, outputs, strict=True)]


def _traced(found: Facts, trace: Trace, requests: int, seed: int) -> Sequence[Arrival]:
    if any(a.after >= 0 for a in trace.arrivals):
        raise ConfigError(
            f"{trace.name}: its requests wait for one another, which a rate cannot pace: see `regauge sim`"
        )
    own: Sequence[Arrival] = trace.arrivals[:requests]
    if trace.tick_s:
        own = spread(own, seed, trace.tick_s)
    span = own[-1].at - own[0].at
    return paced(own, found.ask.workload.rate * span / max(len(own) - 1, 1)) if span > 0.0 else own


def _cluster(found: Facts, plan: Plan, trace: Trace | None) -> Cluster:
    load, p, d = found.ask.workload, plan.prefill, plan.decode
    block = trace.block if trace is not None and trace.block else _BLOCK
    site = found.prefill
    blocks = int(site.room(p.span) / (max(site.kept.token, 1.0) * block))
    kept = found.decode.kept
    tokens = found.decode.room(d.span) / (kept.token + kept.fixed / max(load.mean(load.prompt + load.output), 1.0))
    share = load.hit if trace is None else 0.0
    crossing = found.wire_token * (1.0 - load.hit if found.ask.delta else 1.0) + found.wire_fixed / load.mean(
        load.prompt
    )
    return Cluster(
        p.servers // p.span, d.servers // d.span,
        PrefillModel(_speed(found, p.span), 0.0, 0.0, blocks, _prefill(found, p.span, share)),
        DecodeModel(_BATCHES, max(int(tokens / _PAGE), 1), _PAGE, found.step(d.span, "value")(1), 0.0, 0.0, _decode(found, d.span)),
        bytes_per_token=crossing, prefill_nic=site.payload("value"), decode_nic=found.decode.payload("value"),
        prefill_nics=p.nics * p.span, decode_nics=d.nics * d.span, block=block,
    )  # fmt: skip


def _speed(found: Facts, span: int) -> float:
    """Computed tokens per second, as the router is told."""
    load = found.ask.workload
    return load.mean(load.prompt - load.cached) / load.mean(found.prefill_s(span, "value"))


def _prefill(found: Facts, span: int, share: float) -> Callable[[int, int], float]:
    """Seconds of so many tokens after so many cached ones; `share` of the first is cached where the trace has no blocks."""
    on = found.prefill.machine(span, "value")

    def seconds(tokens: int, cached: int) -> float:
        hit = min(round(tokens * share), tokens - 1)
        return prefill_seconds(found.work, cached + hit, cached + tokens, on).value

    return seconds


def _decode(found: Facts, span: int) -> Callable[[int, float], float]:
    """Seconds of a step of so many requests with so many tokens together: linear in the tokens, as the plan has it."""
    on, step = found.decode.machine(span, "value"), found.step(span, "value")
    weights = found.decode.weights

    def seconds(batch: int, resident: float) -> float:
        many = max(batch, 1)
        context = max(round(resident / many), 1)
        return decode_seconds(found.work, weights, on, batch=many, context=context, token_bytes=step.token_bytes).value

    return seconds

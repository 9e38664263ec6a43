"""The plan: a question's servers, what they do, what binds, and what would change it. Modelled, not measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import numpy as np

from regauge.sim.ask import ASSUMED, COMPUTE, MEMORY, NETWORK_MOST, RESERVE, Ask, Assumed, known
from regauge.sim.model import Interval, exactly
from regauge.sim.plan_result import ENDLESS, Memory, Mix, Need, Network, Offload, Plan, PoolPlan, Times
from regauge.sim.pools import WORLDS, Facts, Site, facts, interval, prefill_times, whole
from regauge.sim.queueing import sharing, sharing_tail
from regauge.sim.sizing import Shape, State, beside, decode_needs, landed, prefill_needs, shape
from regauge.sim.whatif import what_if
from regauge.sim.words import idle, problems, remedies, why
from regauge.sim.workload import Floats

_RATE_HALVINGS = 24


def answer(ask: Ask, *, changes: bool = True) -> Plan:
    """Answer a question. `changes`: also answer it with one thing changed at a time.

    Raises ConfigError and LayoutError for nonsense, Refused for what cannot fit, saying what would.
    """
    found = facts(ask)
    return plan(found, shape(found), changes=changes)


def plan(found: Facts, with_: Shape, *, changes: bool = False) -> Plan:
    """Return what a shape does with a question's workload."""
    ask = found.ask
    states = [State(found, with_, ask.workload.rate, which) for which in WORLDS]
    prefill, decode = _pool(found, with_, states, found.prefill), _pool(found, with_, states, found.decode)
    met = [s.ttft_met() * s.tpot_met() for s in states]
    network = _network(found, with_, states)
    most = interval(_most(found, with_, s) for s in states)
    troubles = problems(ask, states[1], prefill, decode, network)
    free = _free(found)
    enough = (free.prefill_servers, free.decode_servers) if free is not None else (0, 0)
    ratio = _most_asked(prefill) / _most_asked(decode)
    result = Plan(
        ask, _mix(found, states), prefill, decode, network, _times(states, State.ttft, lambda s: s.ttft_mean, State.ttft_met),
        _times(states, State.tpot, lambda s: s.step_s, State.tpot_met),
        interval(ask.workload.rate * m for m in met), most, ratio, _offload(found, with_, states[1], decode), enough, troubles,
        remedies(ask, prefill, decode, network, free), idle(prefill, decode), _assumed(found), found.fit, (),
    )  # fmt: skip
    return what_if(result, with_, answer) if changes else result


def _pool(found: Facts, with_: Shape, states: list[State], site: Site) -> PoolPlan:
    prefill = site.side == "prefill"
    span, count = (with_.prefill_span, with_.prefill) if prefill else (with_.decode_span, with_.decode)
    by_world = [_asked(found, with_, s, site) for s in states]
    # What a decode step is bound by differs between worlds at times: the constraint is the same one.
    keys = list(by_world[1])
    columns = [dict(zip(keys, world.values(), strict=True)) for world in by_world]
    needs = sorted(
        (
            Need(
                k, interval(_servers(world[k], span) for world in columns),
                min(columns[1][k] * span, ENDLESS), why(found, site.side, k),
            )
            for k in keys
        ), key=lambda need: -need.exact,
    )  # fmt: skip
    capacity = site.room(span) + site.weights.total
    reserve = capacity / (1.0 - site.pool.reserve) - capacity
    kept = [s.prefill_kv if prefill else s.kv for s in states]
    memory = Memory(
        capacity + reserve, site.weights.total, reserve, site.room(span),
        interval(k.mean for k in kept), interval(k.peak for k in kept),
    )  # fmt: skip
    binding = needs[0].what
    load = interval(world[binding] / count for world in columns)
    busy = interval(s.rate * s.service.mean / count if prefill else s.fullness for s in states)
    return PoolPlan(
        site.side, site.pool.device, site.card.name, count * span, span, site.cards, site.pool.nic or site.card.nic, site.nics, memory,
        tuple(needs), load, busy,
    )  # fmt: skip


def _servers(instances: float, span: int) -> float:
    return inf if instances == inf else float(whole(instances) * span)


def _asked(found: Facts, with_: Shape, state: State, site: Site) -> dict[str, float]:
    if site.side == "decode":
        return decode_needs(found, with_.decode_span, state.which, state.hold)
    crowded, step_s = beside(found, with_.decode, with_.decode_span, state.which)
    return prefill_needs(found, with_.prefill_span, state.which, crowded, step_s)


def _times(
    states: list[State],
    at: Callable[[State, float], float],
    mean: Callable[[State], float],
    met: Callable[[State], float],
) -> Times:
    def of(share: float) -> Interval:
        return interval(at(s, share) for s in states)

    share = states[0].facts.ask.slo.share
    return Times(
        interval(mean(s) for s in states),
        of(0.5),
        of(0.9),
        of(0.99),
        of(share),
        interval(met(s) for s in states),
    )


def _most(found: Facts, with_: Shape, state: State) -> float:
    """The highest rate at which everything is met."""
    low, high = 0.0, state.rate
    for _ in range(40):
        if not State(found, with_, high, state.which).holds():
            break
        low, high = high, 2.0 * high
    for _ in range(_RATE_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if State(found, with_, middle, state.which).holds() else (low, middle)
    return low


def _network(found: Facts, with_: Shape, states: list[State]) -> Network:
    ask, p, d = found.ask, found.prefill, found.decode
    switch = known(ask.catalogue.switches, ask.switch, "switch")
    assert switch.ports is not None  # noqa: S101  # the catalogue has it of every switch

    def of(figure: Callable[[State], float]) -> Interval:
        return interval(figure(s) for s in states)

    def alone(s: State) -> float:
        return found.sent_mean / min(p.pool.rails * p.payload(s.which), d.pool.rails * d.payload(s.which))

    mean_tokens = ask.workload.mean(ask.workload.prompt - ask.workload.cached * ask.delta)
    kernel_s = found.kernel_token_s * mean_tokens
    inner = 2.0 * found.hidden * (with_.prefill_span - 1) * ask.workload.rate / with_.prefill
    uncached = ask.workload.mean(ask.workload.prompt - ask.workload.cached)
    verdict = found.crossing.verdict
    return Network(
        verdict.path, verdict.reasons, p.kept.token, found.wire_token, d.kept.token, found.sent_mean,
        of(lambda s: s.egress), of(lambda s: s.load(p)), of(lambda s: s.ingress), of(lambda s: s.load(d)),
        of(lambda s: s.ingress / (d.nics * d.line(s.which))),
        with_.prefill_servers * p.nics / (with_.decode_servers * d.nics),
        of(alone), of(lambda s: alone(s) * sharing(s.crowded)), of(lambda s: alone(s) * sharing_tail(s.crowded)),
        of(lambda s: with_.prefill_servers * found.sent_mean / (d.pool.rails * d.payload(s.which))),
        exactly(kernel_s), ask.kernels.source if kernel_s else "nothing is converted or gathered", exactly(inner * uncached),
        with_.prefill_servers * p.nics + with_.decode_servers * d.nics, int(switch.ports.value), switch.name,
    )  # fmt: skip


def _mix(found: Facts, states: list[State]) -> Mix:
    load = found.ask.workload
    prompt, cached, output = (load.mean(x) for x in (load.prompt, load.cached, load.output))
    order = np.argsort(load.prompt)
    own = float(load.prompt[order][np.searchsorted(np.cumsum(load.weight[order]), 0.99 * load.weight.sum())])
    return Mix(
        load.name, load.rate, prompt, load.prompt_p99 or own, prompt - cached, output, load.hit, load.rate * prompt, load.rate * cached,
        load.rate * output, interval(s.service.cv2 for s in states),
    )  # fmt: skip


def _free(found: Facts) -> Shape | None:
    """The servers that would be found if none were given; none if no number meets what is asked."""
    ask = found.ask
    pools = [replace(pool, servers=0) for pool in (ask.prefill, ask.decode)]
    asked = (
        found
        if pools == [ask.prefill, ask.decode]
        else facts(replace(ask, prefill=pools[0], decode=pools[1], points=()))
    )
    best = shape(asked)
    return best if State(asked, best, ask.workload.rate, "low" if ask.sure else "value").holds() else None


def _most_asked(pool: PoolPlan) -> float:
    """Servers that the constraints which can be met ask for, before rounding."""
    return max((need.exact for need in pool.needs if need.exact < ENDLESS), default=1.0)


def _offload(found: Facts, with_: Shape, state: State, decode: PoolPlan) -> Offload:
    load = found.ask.workload
    fresh = load.prompt - load.cached
    order = np.argsort(fresh, kind="stable")
    here, there = state.prefill_s, found.prefill_s(with_.decode_span, state.which, found.decode)
    own = decode.needs[0].exact / decode.servers
    count, at = balance(
        (load.weight * here)[order] * (load.rate / with_.prefill),
        (load.weight * there)[order] * (load.rate / with_.decode),
        own,
    )
    quicker = _quicker(found, with_)
    alone = float(load.weight @ here) * load.rate / with_.prefill
    if not count:
        text = f"decode's own work takes {own:.0%} of it, prefill is busy {alone:.0%}: decode has nothing to spare"
        return Offload(0.0, 0.0, quicker, text)
    share = float(load.weight[order][:count].sum())
    text = f"both are then busy {at:.0%}; prefill alone would be {alone:.0%}, decode {own:.0%}"
    return Offload(float(fresh[order][count - 1]), share, quicker, text)


def balance(here: Floats, there: Floats, own: float) -> tuple[int, float]:
    """Return how many of the shortest prompts decode should prefill, and the load of prefill then: the balance of PrfaaS (arXiv
    2604.15039v2), decode's own work counted, so that decode is as busy as prefill or a little less.

    `here`, `there`: load that each prompt, shortest first, puts on the prefill pool or on the decode pool; `own`: decode's load without.
    """
    moved = np.concatenate([[0.0], np.cumsum(there)])
    left = float(here.sum()) - np.concatenate([[0.0], np.cumsum(here)])
    fits = np.nonzero(own + moved <= left)[0]
    count = int(fits[-1]) if len(fits) else 0
    return count, float(left[count])


def _quicker(found: Facts, with_: Shape) -> float:
    """Uncached prompts up to which decode has the first token sooner by itself, with nothing waiting and nothing on the links."""
    longest = float(found.ask.workload.prompt.max())
    tokens = np.unique(np.geomspace(1.0, longest, 256).round())
    none = np.zeros_like(tokens)
    there = prefill_times(found.work, none, tokens, found.decode.machine(with_.decode_span, "value"))
    here = prefill_times(found.work, none, tokens, found.prefill.machine(with_.prefill_span, "value"))
    later = np.nonzero(there > landed(found, here, 0.0, with_.prefill_span, "value", prompt=tokens))[0]
    return float(tokens[later[0] - 1]) if len(later) and later[0] else 0.0 if len(later) else longest


def _assumed(found: Facts) -> tuple[Assumed, ...]:
    """The constants that this question did not give."""
    ask = found.ask
    used = [
        ("compute", COMPUTE in (ask.prefill.compute, ask.decode.compute)),
        ("memory", MEMORY in (ask.prefill.memory, ask.decode.memory)),
        ("spanning", found.prefill.spans[-1] > 1 or found.decode.spans[-1] > 1),
        ("overhead", 0.0 in (ask.prefill.overhead_s, ask.decode.step_overhead_s)),
        ("network", NETWORK_MOST.value < 1.0),
        ("reserve", RESERVE in (ask.prefill.reserve, ask.decode.reserve)),
    ]
    return tuple(ASSUMED[name] for name, is_used in used if is_used)

"""How many servers of each kind a workload needs.

Each constraint asks for a number of servers by itself; the one that asks for most binds. A pool is one queue in order of arrival before
instances that each prefill one prompt at a time (`queueing.py`); a decode instance is a batch whose size is the requests that generate at
a time. What crosses shares the decode NICs.

    time to the first token = wait + max(prefill + last chunk's crossing, whole crossing, kernels) + one decode step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf, isinf

import numpy as np

from regauge.errors import Refused
from regauge.sim.ask import MAX_SERVERS, NETWORK_MOST, Ask
from regauge.sim.plan_result import ENDLESS, Memory, Mix, Need, Network, Offload, Plan, PoolPlan, Times, WhatIf
from regauge.sim.pools import Facts, Resident, Site, Step, Which, resident, seen, whole
from regauge.sim.queueing import (
    Moments,
    Wait,
    condensed,
    moments,
    percentile,
    poisson_below,
    share_within,
    sharing,
    wait,
)
from regauge.sim.workload import Floats

__all__ = [
    "ENDLESS",
    "Memory",
    "Mix",
    "Need",
    "Network",
    "Offload",
    "Plan",
    "PoolPlan",
    "Shape",
    "State",
    "Times",
    "WhatIf",
    "shape",
]

_HALVINGS = 48
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Instances of either pool, and the servers that each spans."""

    prefill: int
    prefill_span: int
    decode: int
    decode_span: int

    @property
    def prefill_servers(self) -> int:
        """Servers of the prefill pool."""
        return self.prefill * self.prefill_span

    @property
    def decode_servers(self) -> int:
        """Servers of the decode pool."""
        return self.decode * self.decode_span


@dataclass(frozen=True, eq=False)
class State:
    """A shape at a rate, in one world."""

    facts: Facts
    shape: Shape
    rate: float
    which: Which

    @property
    def egress(self) -> float:
        """Payload bytes per second that leave a prefill server."""
        return self.rate * self.facts.sent_mean / self.shape.prefill_servers

    @property
    def ingress(self) -> float:
        """Payload bytes per second that enter a decode server."""
        return self.rate * self.facts.sent_mean / self.shape.decode_servers

    def load(self, site: Site) -> float:
        """Return the share of a site's payload rate that is used."""
        used = self.egress if site.side == "prefill" else self.ingress
        return used / (site.nics * site.payload(self.which))

    @property
    def crowded(self) -> float:
        """Load of the busier side."""
        return max(self.load(self.facts.prefill), self.load(self.facts.decode))

    @cached_property
    def prefill_s(self) -> Floats:
        """Seconds of each request's prefill."""
        return self.facts.prefill_s(self.shape.prefill_span, self.which)

    @cached_property
    def service(self) -> Moments:
        """Of prefill."""
        return moments(self.prefill_s, self.facts.ask.workload.weight)

    @cached_property
    def waited(self) -> Wait:
        """In prefill's queue."""
        cv2 = self.facts.ask.workload.arrival_cv2
        return wait(self.rate, self.shape.prefill, self.service, arrival_cv2=cv2)

    @cached_property
    def crossed(self) -> Floats:
        """Seconds of each request from the beginning of its prefill until all of its KV has landed."""
        return landed(self.facts, self.prefill_s, self.crowded, self.shape.prefill_span, self.which)

    @cached_property
    def generating(self) -> float:
        """Requests that generate at a time in a decode instance; inf: more than it can bear."""
        return self.facts.step(self.shape.decode_span, self.which).generating(self.rate / self.shape.decode)

    @cached_property
    def step_s(self) -> float:
        """Seconds of the decode step that a token sees on average."""
        return self.facts.step(self.shape.decode_span, self.which).between(self.generating + 1.0)

    @cached_property
    def hold(self) -> Floats:
        """Seconds for which decode's pages are reserved before it generates: while prefill waits, computes and sends.

        A queue or a link that is too small counts as the time that the first token may take: it is to be mended where it is.
        """
        most = self.facts.ask.slo.ttft_s
        return np.minimum(self.crossed, self.prefill_s + most) + min(self.waited.mean, most)

    @cached_property
    def kv(self) -> Resident:
        """KV in a decode instance; where its batch grows without end, at the time per token that is asked for."""
        step_s = self.facts.ask.slo.tpot_s if isinf(self.generating) else self.step_s
        return resident(self.facts, self.rate / self.shape.decode, step_s, self.hold)

    @property
    def endless(self) -> bool:
        """Say whether a queue grows without end: at prefill, on the network, or for decode's memory or time."""
        return (
            self.waited.endless
            or self.crowded >= 1.0
            or isinf(self.generating)
            or self.kv.mean > self.facts.decode.room(self.shape.decode_span)
        )

    @cached_property
    def own(self) -> tuple[Floats, Floats]:
        """Seconds and weights of the time to the first token without the wait, condensed."""
        return condensed(self.crossed + self.step_s, self.facts.ask.workload.weight)

    def ttft(self, share: float) -> float:
        """Return the time to the first token within which a share of the requests has it."""
        return ENDLESS if self.endless else min(percentile(share, *self.own, self.waited), ENDLESS)

    @property
    def ttft_mean(self) -> float:
        """Mean time to the first token."""
        return ENDLESS if self.endless else float(self.own[0] @ self.own[1]) + self.waited.mean

    def ttft_met(self) -> float:
        """Return the share of the requests that have the first token in time."""
        return 0.0 if self.endless else share_within(self.facts.ask.slo.ttft_s, *self.own, self.waited)

    def tpot(self, share: float) -> float:
        """Return the time per token within which a share of the steps is; a request's mean over its steps lies nearer the middle."""
        if isinf(self.generating):
            return ENDLESS
        return self.facts.step(self.shape.decode_span, self.which).between(float(seen(self.generating, share)))

    def tpot_met(self) -> float:
        """Return the share of the steps that take no longer than asked for."""
        most = self.facts.step(self.shape.decode_span, self.which).most(self.facts.ask.slo.tpot_s)
        return 0.0 if isinf(self.generating) or not most else poisson_below(self.generating, most - 1)

    @property
    def fullness(self) -> float:
        """Share of the batch that the time per token allows which generates; inf: no batch does, or it grows without end."""
        most = self.facts.step(self.shape.decode_span, self.which).most(self.facts.ask.slo.tpot_s)
        return self.generating / most if most else inf

    @property
    def prefill_kv(self) -> Resident:
        """KV of the prompts that are being computed, in a prefill instance: no more than one at a time."""
        load = self.facts.ask.workload
        kv = self.facts.prefill.kept.bytes(load.prompt)
        mean = min(self.rate / self.shape.prefill, 1.0 / self.service.mean) * load.mean(kv * self.prefill_s)
        return Resident(mean, percentile(0.99, kv, load.weight, Wait(0.0, ())))

    def holds(self) -> bool:
        """Say whether everything that the question asks is met."""
        ask = self.facts.ask
        return (
            not self.endless
            and self.crowded <= NETWORK_MOST.value
            and self.kv.peak <= self.facts.decode.room(self.shape.decode_span)
            and self.tpot(ask.slo.share) <= ask.slo.tpot_s
            and self.ttft_met() >= ask.slo.share
        )


def landed(
    facts: Facts, prefill_s: Floats, crowded: float, span: int, which: Which, *, prompt: Floats | None = None
) -> Floats:
    """Return the seconds from the beginning of prefill until the KV of each request has landed, on links loaded so far.

    KV crosses chunk by chunk while prefill computes, so that the last chunk alone follows it; the whole may take longer still.
    `prompt`: tokens of other prompts than the workload's, none of them cached.
    """
    load, (a, b) = facts.ask.workload, (facts.prefill, facts.decode)
    rate = min(a.pool.rails * a.payload(which), b.pool.rails * b.payload(which))
    slowdown = sharing(crowded)
    if isinf(slowdown):
        return np.full_like(prefill_s, ENDLESS)
    tokens = load.prompt if prompt is None else prompt
    fresh = tokens - load.cached if prompt is None else tokens
    kernel_s = facts.kernel_token_s / (a.cards * span)
    sent = fresh if facts.ask.delta else tokens
    tail = np.minimum(fresh, facts.ask.chunk_tokens) * (facts.wire_token / rate * slowdown + kernel_s)
    whole_s = (facts.wire_fixed + facts.wire_token * sent) / rate * slowdown
    return np.maximum(np.maximum(prefill_s + tail, whole_s), sent * kernel_s)


# -- what each constraint asks for -------------------------------------------------------------------------------------


def prefill_needs(facts: Facts, span: int, which: Which, crowded: float, step_s: float) -> dict[str, float]:
    """Return the prefill instances that each constraint asks for, exactly; inf: no number would do.

    `crowded`: load of the links, `step_s`: of the first decode step; both are those of a decode pool that is large enough.
    """
    ask, site = facts.ask, facts.prefill
    seconds = facts.prefill_s(span, which)
    service, load = moments(seconds, ask.workload.weight), ask.workload
    own = condensed(landed(facts, seconds, crowded, span, which) + step_s, load.weight)

    def met(instances: int) -> bool:
        waited = wait(load.rate, instances, service, arrival_cv2=load.arrival_cv2)
        return share_within(ask.slo.ttft_s, *own, waited) >= ask.slo.share

    kv = site.kept.bytes(load.prompt)
    return {
        "compute": load.rate * service.mean,
        "TTFT": _least(met, whole(load.rate * service.mean)) if _ever(own, ask) else inf,
        "memory capacity": load.rate * load.mean(kv * seconds) / site.room(span),
        "network": load.rate * facts.sent_mean / (NETWORK_MOST.value * span * site.nics * site.payload(which)),
    }


def decode_needs(facts: Facts, span: int, which: Which, hold: Floats) -> dict[str, float]:
    """Return the decode instances that each constraint asks for, exactly; inf: no number would do."""
    ask, site, step = facts.ask, facts.decode, facts.step(span, which)
    load, most = ask.workload, step.most(ask.slo.tpot_s)
    timed = "compute" if most and step.computing(most) else "memory bandwidth"

    def in_time(rate: float) -> bool:
        generating = step.generating(rate)
        return not isinf(generating) and seen(generating, ask.slo.share) <= most

    def in_memory(rate: float) -> bool:
        generating = step.generating(rate)
        return not isinf(generating) and _peak(facts, step, rate, generating, hold) <= site.room(span)

    return {
        timed: load.rate / _highest(in_time, load.rate) if most else inf,
        "memory capacity": load.rate / _highest(in_memory, load.rate),
        "network": load.rate * facts.sent_mean / (NETWORK_MOST.value * span * site.nics * site.payload(which)),
    }


def _peak(facts: Facts, step: Step, rate: float, generating: float, hold: Floats) -> float:
    return resident(facts, rate, step.between(generating + 1.0), hold).peak


def _ever(own: tuple[Floats, Floats], ask: Ask) -> bool:
    """Say whether the first token comes in time where nobody waits."""
    return share_within(ask.slo.ttft_s, *own, Wait(0.0, ())) >= ask.slo.share


def _least(holds: Callable[[int], bool], first: int) -> float:
    """Return the least number from `first` on for which a monotone condition holds."""
    no, yes = first - 1, first
    while not holds(yes):
        no, yes = yes, 2 * yes
        if yes > 1 << 24:
            return inf
    while yes - no > 1:
        middle = (yes + no) // 2
        no, yes = (no, middle) if holds(middle) else (middle, yes)
    return float(yes)


def _highest(holds: Callable[[float], bool], rate: float) -> float:
    """Return the highest rate for which a condition holds that holds below it; a tiny one if for none."""
    low, high = rate * 1e-9, rate
    while holds(high) and high < rate * 1e9:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# -- how many ----------------------------------------------------------------------------------------------------------


def shape(facts: Facts) -> Shape:
    """Return the servers that a question gives, or as few as meet it; where no number does, as many as the constraints that can be met
    ask for. Counted at the likeliest constants, or at the pessimistic ones if the question says so.

    Raises Refused for more than `MAX_SERVERS`.
    """
    which: Which = "low" if facts.ask.sure else "value"
    least = facts.prefill.spans[0]
    busy = facts.ask.workload.rate * facts.ask.workload.mean(facts.prefill_s(least, which)) * least
    if busy > MAX_SERVERS:
        raise Refused((_too_many(facts.ask.workload.rate, busy),))
    hold = landed(facts, facts.prefill_s(least, which), 0.0, least, which)
    decode_span, decode = _fewest(facts.decode, lambda span: decode_needs(facts, span, which, hold))
    for _ in range(_ROUNDS):
        crowded, step_s = beside(facts, decode, decode_span, which)
        prefill_span, prefill = _fewest(
            facts.prefill,
            lambda span, c=crowded, s=step_s: prefill_needs(facts, span, which, c, s),  # type: ignore[misc]
        )
        found = Shape(prefill, prefill_span, decode, decode_span)
        held = State(facts, found, facts.ask.workload.rate, which).hold
        span, count = _fewest(facts.decode, lambda span, h=held: decode_needs(facts, span, which, h))  # type: ignore[misc]
        if span * count <= found.decode_servers:
            break
        decode_span, decode = span, count
    return found


def _too_many(rate: float, busy: float) -> str:
    return (
        f"prefill: {rate:g} requests/s keep {busy:,.0f} servers busy, {MAX_SERVERS:,} are the most that are planned: split the deployment, "
        "or give a lower rate"
    )


def beside(facts: Facts, decode: int, span: int, which: Which) -> tuple[float, float]:
    """Return the load of the decode links and a decode step, no worse than a pool that is large enough has them."""
    state = State(facts, Shape(1, 1, decode, span), facts.ask.workload.rate, which)
    return min(state.load(facts.decode), NETWORK_MOST.value), min(state.step_s, facts.ask.slo.tpot_s)


def _fewest(site: Site, needs: Callable[[int], dict[str, float]]) -> tuple[int, int]:
    """Return the span and the instances of the fewest servers, the least span of equals.

    A wider span is taken for fewer servers, or where a narrower one cannot meet the times at any number. Given servers make as many
    instances as they can, of the least span that meets everything, else that meets most.
    """
    given = site.pool.servers
    best: tuple[int, int, int, int] | None = None
    for span in site.spans:
        if best is not None and best[0] == 0 and (given or span > best[1]):
            break  # enough as it is; a wider instance alone takes more servers
        asked = needs(span)
        count = whole(max((x for x in asked.values() if not isinf(x)), default=1.0))
        unmet = sum(isinf(x) for x in asked.values())
        if given:
            unmet, count = unmet + sum(x > given // span for x in asked.values()), given // span
        found = (unmet, 0 if given else count * span, span, count)
        best = found if best is None else min(best, found)
    assert best is not None  # noqa: S101  # there is a span, or the question was refused
    return best[2], best[3]

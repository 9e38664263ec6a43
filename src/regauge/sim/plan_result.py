"""What the planner answers. Figures are modelled, not measured; an `Interval` is the likeliest value between the pessimistic and the
optimistic end of every uncertain constant, all erring the same way at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from regauge.sim.ask import Ask, Assumed, Side
from regauge.sim.model import Efficiency, Interval

ENDLESS = 1e9
"""Seconds that stand for a queue that grows without end."""


@dataclass(frozen=True, slots=True)
class Need:
    """How many servers of a pool one constraint asks for."""

    what: str
    """compute, TTFT, memory capacity, memory bandwidth, network ..."""
    servers: Interval
    """Whole instances' servers."""
    exact: float
    """The likeliest, not rounded up to instances; for the margin to the next constraint."""
    why: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one instance."""

    capacity: float
    """All its cards."""
    weights: float
    reserve: float
    room: float
    """For KV: what the others leave."""
    resident: Interval
    """KV at a time: of requests in work (mean)."""
    peak: Interval
    """The 99th percentile of that."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One side, sized."""

    side: Side
    device: str
    name: str
    servers: int
    span: int
    """Servers of an instance."""
    cards: int
    """Of a server."""
    nic: str
    nics: int
    """Of a server."""
    memory: Memory
    needs: tuple[Need, ...]
    """The one that asks for most first."""
    load: Interval
    """Of the constraint that binds: share of what these servers can bear; over 1: too few."""
    busy: Interval
    """Share of the time that the servers compute (prefill), or share of the batch that the times allow (decode)."""

    @property
    def binds(self) -> str:
        """The constraint that fixes the number of servers."""
        return self.needs[0].what

    @property
    def margin(self) -> float:
        """How many times as many servers it asks for as the next one; 1 where no number of servers would do."""
        first, *others = (need.exact for need in self.needs)
        return first / others[0] if others and others[0] > 0.0 and first < ENDLESS else 1.0


@dataclass(frozen=True, slots=True)
class Network:
    """KV on its way. Loads are shares of the payload rate: line rate times the part that payload reaches."""

    path: str
    """DIRECT, REMAP or CONVERT, as `regauge check` says it of the two layouts."""
    reasons: tuple[str, ...]
    prefill_token_bytes: float
    wire_token_bytes: float
    decode_token_bytes: float
    request_bytes: float
    """That cross for the mean request."""
    egress: Interval
    """Bytes per second that leave a prefill server, at the mean load."""
    egress_load: Interval
    ingress: Interval
    """Bytes per second that enter a decode server."""
    ingress_load: Interval
    ingress_line_load: Interval
    """Share of the line rate."""
    incast: float
    """Prefill NICs for each decode NIC."""
    alone_s: Interval
    """The mean request's KV with nothing else on the way."""
    mean_s: Interval
    """The same at the mean load: alone / (1 - load), M/G/1 processor sharing."""
    p99_s: Interval
    burst_s: Interval
    """One from every prefill server at once into one decode NIC."""
    conversion_s: Interval
    """Kernels' time for the mean request, all of it; 0 if nothing is converted."""
    conversion_source: str
    inner: Interval
    """Bytes per second of activations between the servers of a prefill instance; 0 if it spans one."""
    ports: int
    ports_of: int
    """Ports of the switch."""
    switch: str


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: mean and percentiles. `ENDLESS` stands for a queue that grows without end."""

    mean: Interval
    p50: Interval
    p90: Interval
    p99: Interval
    asked: Interval
    """At the share that the SLO names."""
    met: Interval
    """Share of the requests within the SLO."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Which prompts decode servers should prefill themselves."""

    tokens: float
    """Uncached tokens up to which they do so in balance: both pools then equally loaded (PrfaaS); 0: none."""
    share: float
    """Of the requests."""
    quicker: float
    """Uncached tokens up to which decode alone has the first token sooner, nothing waiting on either side."""
    why: str


@dataclass(frozen=True, slots=True)
class Mix:
    """The workload in figures."""

    name: str
    rate: float
    prompt: float
    """Mean tokens."""
    prompt_p99: float
    uncached: float
    output: float
    hit: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    output_tokens_per_s: float
    service_cv2: Interval
    """Squared coefficient of variation of prefill times."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The plan with one thing changed."""

    change: str
    prefill: int
    """Servers; 0: none do."""
    decode: int
    ttft: Interval
    tpot: Interval
    most: float
    """Requests per second that these servers can take."""
    note: str
    """What binds, or why it cannot be."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer."""

    ask: Ask
    mix: Mix
    prefill: PoolPlan
    decode: PoolPlan
    network: Network
    ttft: Times
    tpot: Times
    goodput: Interval
    """Requests per second within both SLOs, at the asked rate."""
    most: Interval
    """Highest rate at which the SLOs are met with these servers."""
    ratio: float
    """Prefill servers for one decode server that the work asks for, before rounding."""
    offload: Offload
    enough: tuple[int, int]
    """The fewest prefill and decode servers that meet what is asked, whatever number was given; (0, 0): no number does."""
    problems: tuple[str, ...]
    """What is not met; empty: the plan fits."""
    remedies: tuple[str, ...]
    idle: str
    """Which pool has room, and how much."""
    assumed: tuple[Assumed, ...]
    fit: Efficiency | None
    """Of prefill's efficiency to the given rates."""
    what_if: tuple[WhatIf, ...]

    @property
    def fits(self) -> bool:
        """Say whether everything asked for is met."""
        return not self.problems

"""What the planner is asked: a model, two pools of servers, a workload, and the times that requests may take.

Zero servers, cards, NICs or an empty name stand for "find it" or "as the catalogue says". Constants without a published source
say so in `ASSUMED`, and have a wide range.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, TypeVar

from regauge.errors import ConfigError
from regauge.plan.cost import DEFAULTS, Constants
from regauge.sim.devices import Catalogue, shipped
from regauge.sim.model import Interval, Point, exactly
from regauge.sim.workload import Workload

Side = Literal["prefill", "decode"]
MAX_SERVERS = 100_000
MAX_SPAN = 16
AUTO_SPAN = 4
"""Servers up to which an instance is widened to meet the times; to hold the model, up to `MAX_SPAN`."""

COMPUTE = Interval(0.12, 0.30, 0.50)
"""Part of the peak rate that prefill reaches."""
MEMORY = Interval(0.45, 0.60, 0.80)
"""Part of the memory bandwidth that a decode step reaches."""
SPANNING = Interval(0.70, 0.90, 1.00)
"""What a further server adds to an instance that spans servers, over what the first does."""
NETWORK_MOST = exactly(0.80)
"""Mean load of the payload rate up to which a network is planned: transfers take 5 times as long there as alone."""
RESERVE = 0.10
"""Part of a card's memory for activations, graphs, the runtime and fragments."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """A constant that is not given, what it is, and where it comes from."""

    what: str
    value: Interval
    source: str


ASSUMED: Mapping[str, Assumed] = {
    "compute": Assumed(
        "part of the peak rate that is reached, by prefill or by a decode step that computing binds", COMPUTE,
        "vendor with SiliconFlow, Dec 2025: DeepSeek-V3 at over 4,000 tokens/s a card of 1 PFLOPS is 0.3; 0.12 fits the article's "
        "two rates to GLM-5.2 at 90 % hits; 0.5 is assumed",
    ),
    "memory": Assumed("part of the memory bandwidth that a decode step reaches", MEMORY, "assumed, no source"),
    "spanning": Assumed("what a further server adds to an instance that spans servers", SPANNING, "assumed, no source"),
    "overhead": Assumed(
        "seconds of a prefill and of a decode step beside the roofline", exactly(0.0),
        "not counted unless given (overhead=, step-overhead=) or measured; 1,000 tokens take 0.44 s on 8 x H200 in arXiv 2604.15039v2, nearly "
        "all of it overhead",
    ),
    "network": Assumed("mean load up to which NICs are planned", NETWORK_MOST, "assumed: processor sharing is at 5 times alone there"),
    "reserve": Assumed(
        "part of a card's memory that is neither weights nor KV", exactly(RESERVE),
        "vLLM's gpu_memory_utilization leaves 0.1 by default",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pool:
    """The servers of one side. An instance holds the weights once and spans `span` servers, which work on each request together."""

    device: str
    """Key of the catalogue."""
    servers: int = 0
    """0: as many as are needed."""
    span: int = 0
    """Servers of an instance; 0: as few as hold the model and meet the times."""
    cards: int = 0
    """Of a server; 0: as the catalogue says."""
    nic: str = ""
    nics: int = 0
    """Of a server, for KV."""
    rails: int = 1
    """NICs that one request's KV is spread over: one where a request lies on one card (data-parallel attention)."""
    kv: str = "fp8_e4m3,page=64"
    """Layout of the cache: a short form, an engine's flags, or a file."""
    copies: int = 1
    """Cards of an instance that each keep a request's whole KV: with tensor parallelism over more cards than KV heads, more than one."""
    weight_bits: float = 8.0
    """Of a parameter, scales counted."""
    compute: Interval = COMPUTE
    memory: Interval = MEMORY
    overhead_s: float = 0.0
    """Of a prefill, beside computing."""
    step_overhead_s: float = 0.0
    """Of a decode step, beside reading and computing."""
    reserve: float = RESERVE


@dataclass(frozen=True, slots=True)
class Slo:
    """Times that a share of the requests must meet."""

    ttft_s: float
    """To the first token."""
    tpot_s: float
    """Per token after it."""
    share: float = 0.9
    """Of the requests: 0.9 asks for the 90th percentiles."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the planner. Raises ConfigError for nonsense, naming the field."""

    model: str
    """A shipped name, a Hugging Face folder, or a config.json."""
    prefill: Pool
    decode: Pool
    workload: Workload
    slo: Slo
    switch: str = "128x400g"
    catalogue: Catalogue = field(default_factory=shipped)
    total_b: float = 0.0
    """Parameters in 10^9; 0: as the catalogue says."""
    active_b: float = 0.0
    chunk_tokens: int = 8192
    """Tokens of a prefill step: the last one's KV crosses when prefill is done."""
    sure: bool = False
    """Whether servers are counted at the pessimistic end of every constant, not at the likeliest."""
    delta: bool = False
    """Whether decode keeps what it has of a prompt's beginning, so that only the uncached part crosses."""
    points: tuple[Point, ...] = ()
    """Prefill rates of one prefill server, to which its efficiency is fitted."""
    kernels: Constants = DEFAULTS
    """What converting costs."""

    def __post_init__(self) -> None:
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            _check_pool(pool, name, self.catalogue)
        known(self.catalogue.switches, self.switch, "switch")
        slo = self.slo
        if not (0.0 < slo.ttft_s < inf and 0.0 < slo.tpot_s < inf):
            raise ConfigError(f"slo: TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s:g} s are positive and finite")
        if not 0.0 < slo.share < 1.0:
            raise ConfigError(f"slo.share {slo.share:g}: a share between 0 and 1, such as 0.9 for the 90th percentile")
        if not 1 <= self.chunk_tokens <= 1 << 24:
            raise ConfigError(f"chunk_tokens {self.chunk_tokens}: give 1 to {1 << 24}")
        _check_points(self)
        for what, billions in (("total_b", self.total_b), ("active_b", self.active_b)):
            if not 0.0 <= billions < 1e6:
                raise ConfigError(f"{what} {billions:g}: parameters in 10^9, positive")


T = TypeVar("T")


def _check_points(ask: Ask) -> None:
    """Rates fix one constant, the part of the peak rate: nothing may stand beside it or in its place."""
    if not ask.points:
        return
    card = known(ask.catalogue.accelerators, ask.prefill.device, "prefill.device")
    if card.prefill_csv:
        raise ConfigError(
            f"points: {card.name} has a measured prefill curve, which counts in their place: give one or the other"
        )
    if ask.prefill.overhead_s:
        raise ConfigError(
            "points: rates fix one constant, to which prefill.overhead would come on top: give one or the other"
        )


def known(
    table: Mapping[str, T],
    key: str,
    what: str,
    where: str = "the catalogue",
    own: str = "--catalogue FILE adds your own",
) -> T:
    """Return an entry. Raises ConfigError that names the nearest one, or all, and says how to add one."""
    if key in table:
        return table[key]
    near = difflib.get_close_matches(key, table, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(table))};"
    raise ConfigError(f"{what}: no {key!r} in {where}; {hint} {own}")


def _check_pool(pool: Pool, name: str, catalogue: Catalogue) -> None:
    card = known(catalogue.accelerators, pool.device, f"{name}.device")
    if pool.nic:
        known(catalogue.nics, pool.nic, f"{name}.nic")
    if not pool.cards and card.cards is None:
        raise ConfigError(
            f"{name}.cards: the catalogue does not say how many {card.name} a server has: give cards=N in --{name}"
        )
    if not pool.nic and not card.nic:
        raise ConfigError(
            f"{name}.nic: the catalogue does not say which NIC {card.name} has: give nic=NAME in --{name}"
        )
    if not pool.nics and card.nics is None:
        raise ConfigError(
            f"{name}.nics: the catalogue does not say how many NICs a server of {card.name} has: give nics=N in --{name}"
        )
    _check_counts(pool, name)
    if not 1.0 <= pool.weight_bits <= 32.0:
        raise ConfigError(f"{name}.weight_bits {pool.weight_bits:g}: give 1 to 32 bits a parameter")
    for what, part in (("compute", pool.compute), ("memory", pool.memory)):
        if not 0.0 < part.low <= part.high <= 1.0:
            raise ConfigError(f"{name}.{what}: an efficiency lies over 0 and is at most 1")
    if not (
        isfinite(pool.overhead_s)
        and isfinite(pool.step_overhead_s)
        and min(pool.overhead_s, pool.step_overhead_s) >= 0.0
    ):
        raise ConfigError(f"{name}: overheads are seconds, finite and not negative")
    if not 0.0 <= pool.reserve < 1.0:
        raise ConfigError(f"{name}.reserve {pool.reserve:g}: a share of the memory, from 0 to below 1")


def _check_counts(pool: Pool, name: str) -> None:
    for what, value, most in (
        ("servers", pool.servers, MAX_SERVERS), ("span", pool.span, MAX_SPAN), ("cards", pool.cards, 1024), ("nics", pool.nics, 1024),
    ):  # fmt: skip
        if not 0 <= value <= most:
            raise ConfigError(f"{name}.{what} {value}: give 1 to {most}, or 0 to have it found")
    if pool.servers and pool.span > pool.servers:
        raise ConfigError(
            f"{name}.span {pool.span}: an instance cannot span more servers than the {pool.servers} given"
        )
    for what, value in (("rails", pool.rails), ("copies", pool.copies)):
        if not 1 <= value <= 1024:
            raise ConfigError(f"{name}.{what} {value}: give 1 to 1024")

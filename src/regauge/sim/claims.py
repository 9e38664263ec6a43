"""Questions a published deployment: which model gives its rates at which efficiency, and do weights, KV and network fit?

A claim names servers and prefill rates; it seldom names the model or the cached share. For each candidate model:

| question | how |
|---|---|
| efficiency | the one constant that fits all rates best, at a cached share (`model.fit_efficiency`); over 1 is over the peak |
| cached share that the rates imply | those at which the fit lies within plausible limits and misses no rate by more than `tolerance` |
| weights | parameters x bytes against the memory of a server |
| KV per server | rate x bytes per token of the layout, cached tokens counted: decode needs all of a prompt's KV |
| decode ingress | that x prefill servers / (decode servers x NICs x line rate) |
| resident KV | requests per second x time at decode x bytes of a request, against decode's memory without weights |

All of it is arithmetic on public figures: modelled, not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf, isfinite

from regauge.errors import ConfigError, LayoutError
from regauge.layout.presets import load_named
from regauge.sim.ask import known
from regauge.sim.devices import Accelerator, Catalogue
from regauge.sim.model import Efficiency, Interval, Point, exactly, fit_efficiency, of
from regauge.sim.work import Work, kv_bytes, model_work

FORMS = (("FP8", ("engine:sglang,dtype=fp8_e4m3", "fp8_e4m3")), ("BF16", ("engine:sglang,dtype=bf16", "bf16")))
"""Layouts of the KV: the first form that the model has. SGLang's FP8 of sparse attention is packed records with scales."""
WEIGHTS = (("FP8", 1.0), ("4-bit", 0.5))
"""Bytes of a parameter, without scales."""
PLAUSIBLE = Interval(0.10, 0.30, 0.60)
"""Efficiency of prefill: 0.3 is the vendor's own DeepSeek-V3 figure of December 2025 on this card (over 4,000 tokens/s of 1 PFLOPS);
0.6 what it claims for training dense models on it (press, Feb 2026), 0.1 is assumed."""
TOLERANCE = 0.15
OUTPUT = exactly(440.0)
"""Mean output tokens of the agent sessions in the stored traces."""
TPOT = Interval(0.02, 0.03, 0.05)
"""Seconds of an output token: assumed."""
_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Claim:
    """What is claimed, and what has to be assumed to question it."""

    name: str
    prefill: str
    """Key of the accelerator."""
    prefill_servers: int
    decode: str
    decode_servers: int
    switch: str
    points: tuple[Point, ...]
    """Rates of one prefill server; their `hit` is not used."""
    hits: tuple[float, ...] = (0.0, 0.9)
    """Cached shares at which the rates are fitted."""
    output: Interval = OUTPUT
    """Output tokens of a request."""
    tpot_s: Interval = TPOT
    """Seconds of an output token."""
    nics: int = 8
    """Of a server, on either side."""

    def __post_init__(self) -> None:
        for what, count in (
            ("prefill_servers", self.prefill_servers),
            ("decode_servers", self.decode_servers),
            ("nics", self.nics),
        ):
            if not 1 <= count <= 100_000:
                raise ConfigError(f"{what} {count}: give 1 to 100000")
        if not self.points:
            raise ConfigError("points: give one or more prefill rates of a server")
        for point in self.points:
            if point.tokens < 1 or not 0.0 < point.tokens_per_s < inf:
                raise ConfigError(f"points: {point.tokens} tokens at {point.tokens_per_s:g}/s: both are positive")
        for hit in self.hits:
            if not (isfinite(hit) and 0.0 <= hit < 1.0):
                raise ConfigError(f"hits: {hit:g}: a cached share lies from 0 to below 1")
        for what, time in (("output", self.output), ("tpot_s", self.tpot_s)):
            if not time.low > 0.0:
                raise ConfigError(f"{what}: must be positive")


@dataclass(frozen=True, slots=True)
class Weights:
    """Whether a model's weights fit one server of each side."""

    dtype: str
    nbytes: float
    prefill_servers: int
    """Servers that one instance needs at least, nothing else in their memory."""
    decode_servers: int


@dataclass(frozen=True, slots=True)
class Fitted:
    """The one efficiency at a cached share."""

    hit: float
    efficiency: Efficiency


@dataclass(frozen=True, slots=True)
class Traffic:
    """KV at one of the claimed rates."""

    tokens: int
    request_bytes: float
    egress: float
    """Bytes per second of a prefill server."""
    ingress: float
    """Of a decode server."""
    line_load: float
    """Of a decode server's line rate."""
    payload_load: Interval
    """Of what payload reaches of it."""
    requests_per_s: float
    """Of all prefill servers together."""
    one_nic_s: float
    all_nics_s: float
    """Of a request's KV at line rate, nothing else on the way."""
    residents: Interval
    """Requests at decode at a time."""
    resident_bytes: Interval
    """Their KV, on each decode server."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """Traffic of one KV dtype."""

    dtype: str
    token_bytes: float
    """At the first point: what a request keeps, over its tokens."""
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model against the claim."""

    key: str
    name: str
    total_b: float
    active_b: float
    operations: tuple[float, ...]
    """Per prompt token, nothing cached, at each point."""
    weights: tuple[Weights, ...]
    fits: tuple[Fitted, ...]
    implied: tuple[float, float] | None
    """Lowest and highest cached share that the rates allow; None: none does."""
    layouts: tuple[Layouts, ...]
    room: tuple[tuple[str, float], ...]
    """By weight dtype: bytes that a decode server leaves for KV, nothing else in its memory; under 0: the weights do not fit."""
    statements: tuple[str, ...]
    """What is over a limit, in words."""


@dataclass(frozen=True, slots=True)
class Findings:
    """A claim, questioned."""

    claim: Claim
    peak: Interval
    """Operations per second of a prefill server."""
    prefill_memory: float
    decode_memory: float
    """Bytes of a server."""
    ports: int
    ports_of: int
    incast: float
    """Prefill NICs for each decode NIC."""
    candidates: tuple[Candidate, ...]


def question(claim: Claim, catalogue: Catalogue, models: Sequence[str]) -> Findings:
    """Return what a claim asks of each candidate model. Raises ConfigError naming what the catalogue lacks."""
    prefill = known(catalogue.accelerators, claim.prefill, "prefill")
    decode = known(catalogue.accelerators, claim.decode, "decode")
    switch = known(catalogue.switches, claim.switch, "switch")
    if prefill.fp8_tflops is None or switch.ports is None:
        raise ConfigError(f"{prefill.name}: no fp8_tflops in the catalogue; add it in a file of your own")
    peak = of(prefill.fp8_tflops, _cards(prefill) * 1e12)
    ports = (claim.prefill_servers + claim.decode_servers) * claim.nics
    return Findings(
        claim, peak, _memory(prefill), _memory(decode), ports, int(switch.ports.value),
        claim.prefill_servers / claim.decode_servers,
        tuple(_candidate(key, claim, catalogue, peak.value, prefill, decode) for key in models),
    )  # fmt: skip


def implied_hits(
    work: Work, points: Sequence[Point], rate: float, *, plausible: Interval = PLAUSIBLE, tolerance: float = TOLERANCE
) -> tuple[float, float] | None:
    """Return the lowest and highest cached share, to 1 in 1000, at which one plausible efficiency fits every point within `tolerance`."""
    found = []
    for step in range(_STEPS):
        hit = step / _STEPS
        fit = fit_efficiency(work, [Point(p.tokens, p.tokens_per_s, hit) for p in points], rate)
        if plausible.low <= fit.fitted.value <= plausible.high and max(abs(r) for r in fit.residuals) <= tolerance:
            found.append(hit)
    return (found[0], found[-1]) if found else None


def hit_at(work: Work, points: Sequence[Point], rate: float, efficiency: float) -> float | None:
    """Return the cached share at which the best fit is this efficiency; None: even with nothing cached less is enough.

    More cached tokens are less to compute, so the fitted efficiency falls with the share: bisection.
    """

    def over(hit: float) -> bool:
        fit = fit_efficiency(work, [Point(p.tokens, p.tokens_per_s, hit) for p in points], rate)
        return fit.fitted.value > efficiency

    if not 0.0 < efficiency < inf:
        raise ConfigError(f"efficiency {efficiency:g}: positive and finite")
    if not over(0.0):
        return None
    low, high = 0.0, 0.9999
    while high - low > 1e-4:
        low, high = ((low + high) / 2, high) if over((low + high) / 2) else (low, (low + high) / 2)
    return (low + high) / 2


def context_of(rate: float, points: tuple[Point, Point]) -> float:
    """Return the mean prompt at which a mixed rate lies between two points, a token's time being linear in the prompt's length."""
    one, other = points
    a, b = 1.0 / one.tokens_per_s, 1.0 / other.tokens_per_s
    if a == b or not 0.0 < rate < inf:
        raise ConfigError("mixed rate: two points of different rates, and a positive one between them")
    return one.tokens + (1.0 / rate - a) / (b - a) * (other.tokens - one.tokens)


# -- a candidate -------------------------------------------------------------------------------------------------------


def _candidate(
    key: str, claim: Claim, catalogue: Catalogue, peak: float, prefill: Accelerator, decode: Accelerator
) -> Candidate:
    size = known(catalogue.models, key, "model")
    if size.total_b is None or size.active_b is None:
        raise ConfigError(f"models.{key}: no total_b or active_b in the catalogue")
    work = model_work(key, size.active_b.value * 1e9)
    weights = tuple(
        Weights(dtype, size.total_b.value * 1e9 * each,
                ceil(size.total_b.value * 1e9 * each / _memory(prefill)), ceil(size.total_b.value * 1e9 * each / _memory(decode)))
        for dtype, each in WEIGHTS
    )  # fmt: skip
    fits = tuple(
        Fitted(h, fit_efficiency(work, [Point(p.tokens, p.tokens_per_s, h) for p in claim.points], peak))
        for h in claim.hits
    )
    layouts = tuple(_layouts(key, dtype, forms, claim, catalogue, decode) for dtype, forms in FORMS)
    room = tuple((w.dtype, _memory(decode) * w.decode_servers - w.nbytes) for w in weights)
    implied = implied_hits(work, claim.points, peak)
    found = Candidate(
        key, size.name, size.total_b.value, size.active_b.value,
        tuple(work.operations(0, p.tokens) / p.tokens for p in claim.points),
        weights, fits, implied, layouts, room, (),
    )  # fmt: skip
    return _stated(found, claim, prefill)


def _layouts(
    key: str, dtype: str, forms: Sequence[str], claim: Claim, catalogue: Catalogue, decode: Accelerator
) -> Layouts:
    nic = known(catalogue.nics, decode.nic or "400g", "decode.nic")
    if nic.gbit_per_s is None or nic.share is None:
        raise ConfigError(f"nics.{decode.nic}: needs gbit_per_s and share; add them in a file of your own")
    line = nic.gbit_per_s.value / 8 * 1e9
    share = of(nic.share)
    traffic = []
    for point in claim.points:
        nbytes = _bytes(key, tuple(forms), point.tokens)
        egress = point.tokens_per_s * nbytes / point.tokens
        ingress = egress * claim.prefill_servers / claim.decode_servers
        load = ingress / (line * claim.nics)
        requests = point.tokens_per_s / point.tokens * claim.prefill_servers
        crossing = Interval(nbytes / (line * share.high), nbytes / (line * share.value), nbytes / (line * share.low))
        residents = exactly(requests) * (claim.output * claim.tpot_s + crossing)
        traffic.append(
            Traffic(
                point.tokens, nbytes, egress, ingress, load, exactly(load) / share, requests,
                nbytes / line, nbytes / line / claim.nics, residents,
                residents * exactly(nbytes / claim.decode_servers),
            )
        )  # fmt: skip
    return Layouts(dtype, traffic[0].request_bytes / traffic[0].tokens, tuple(traffic))


@cache
def _bytes(key: str, forms: tuple[str, ...], tokens: int) -> float:
    for form in forms[:-1]:
        try:
            return kv_bytes(load_named(form, key), tokens)
        except LayoutError:
            continue
    return kv_bytes(load_named(forms[-1], key), tokens)


def _stated(found: Candidate, claim: Claim, prefill: Accelerator) -> Candidate:
    said = []
    for fit in found.fits:
        for k in fit.efficiency.impossible:
            point = claim.points[k]
            said.append(
                f"{point.tokens_per_s:,.1f} tokens/s at {point.tokens:,} tokens with {fit.hit:.0%} cached asks for "
                f"{fit.efficiency.at[k]:.0%} of the peak: impossible"
            )
    said += [
        f"{w.dtype} weights are {w.nbytes / 1e9:,.0f} GB, over the {_memory(prefill) / 1e9:,.0f} GB of a prefill server: an "
        f"instance spans {w.prefill_servers} or more"
        for w in found.weights
        if w.prefill_servers > 1
    ]
    said += [
        f"{layout.dtype} KV at {t.tokens:,} tokens asks for {t.line_load:.0%} of decode's line rate: impossible"
        for layout in found.layouts
        for t in layout.traffic
        if t.line_load > 1.0
    ]
    if found.implied is None:
        said.append(
            f"no cached share fits every rate within {TOLERANCE:.0%} at an efficiency of {PLAUSIBLE.low:g} to {PLAUSIBLE.high:g}"
        )
    return replace(found, statements=tuple(said))


def _cards(card: Accelerator) -> float:
    if card.cards is None:
        raise ConfigError(
            f"{card.name}: the catalogue does not say how many cards a server has; add it in a file of your own"
        )
    return card.cards.value


def _memory(card: Accelerator) -> float:
    if card.memory_gb is None:
        raise ConfigError(f"{card.name}: no memory_gb in the catalogue; add it in a file of your own")
    return _cards(card) * card.memory_gb.value * 1e9

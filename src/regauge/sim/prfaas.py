"""The equations of "Prefill-as-a-Service" (arXiv 2604.15039v2): how much a deployment with a remote prefill cluster serves.

A prompt of l uncached tokens goes to the remote cluster if l > t, else to the local one, whose instances are prefill or decode.

| symbol | here | is |
|---|---|---|
| Phi(l) | `kv_rate` | S(l) / T(l), the bytes per second that one prefilling instance puts out |
| Theta_prfaas | `Rates.remote` | min(N_f / T(l_long), B / S(l_long)), requests per second |
| Theta_pdp | `Rates.local` | N_p / T'(l_short) |
| Theta_pdd | `Rates.decode` | N_d x requests per second of one decode instance: BS_max / (T_dec x L_out) |
| Lambda | `Rates.served` | min(Theta_prfaas / p, Theta_pdp / (1 - p), Theta_pdd), p = P(l > t) |

`averaging` says what time stands for a class of prompts: "mean-length" is T(E[l]) as the paper writes it; "mean-time" is E[T(l)], which
is what a server that works one prompt after the other needs, and longer wherever T is convex.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import erf, exp, isfinite, log, sqrt
from typing import Literal

import numpy as np

from regauge.errors import ConfigError

Averaging = Literal["mean-length", "mean-time"]
Curve = Callable[[float], float]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt lengths: log-normal, cut to [low, high] tokens."""

    mu: float
    """Mean of ln(tokens) before the cut."""
    sigma: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (isfinite(self.mu) and 0.0 < self.sigma < float("inf") and 0.0 < self.low < self.high < float("inf")):
            raise ConfigError("lengths: sigma is positive, 0 < low < high, all finite")

    def between(self, a: float, b: float) -> float:
        """Return the share of prompts with a < tokens <= b."""
        return self._mass(a, b, 0.0) / self._mass(self.low, self.high, 0.0)

    def mean(self, a: float, b: float) -> float:
        """Return the mean length of prompts with a < tokens <= b, in closed form; b, or `high` if less, if there are none."""
        mass = self._mass(a, b, 0.0)
        # The mean of a log-normal between limits: the mass of one whose mu is sigma^2 higher, times exp(mu + sigma^2 / 2).
        return (
            exp(self.mu + self.sigma**2 / 2) * self._mass(a, b, self.sigma**2) / mass
            if mass > 0.0
            else min(b, self.high)
        )

    def expect(self, what: Curve, a: float, b: float) -> float:
        """Return the mean of `what(tokens)` over prompts with a < tokens <= b, by Gauss-Legendre in ln(tokens); what(b) if there are none."""
        a, b = max(a, self.low), min(b, self.high)
        if a >= b or self._mass(a, b, 0.0) <= 0.0:
            return what(b)
        logs = (log(b) - log(a)) / 2 * _NODES + (log(b) + log(a)) / 2
        density = _WEIGHTS * np.exp(-((logs - self.mu) ** 2) / (2 * self.sigma**2))
        values = np.array([what(x) for x in np.exp(logs)])
        return float(values @ density / density.sum())

    def _mass(self, a: float, b: float, shift: float) -> float:
        a, b = max(a, self.low), min(b, self.high)
        return max(self._below(b, shift) - self._below(a, shift), 0.0)

    def _below(self, tokens: float, shift: float) -> float:
        return 0.5 * (1.0 + erf((log(tokens) - self.mu - shift) / (self.sigma * sqrt(2.0))))


@dataclass(frozen=True, slots=True)
class Deployment:
    """Instances, and what one of each kind does."""

    lengths: Lengths
    remote: int
    """Instances of the remote prefill cluster (N_f); 0: there is none."""
    local: int
    """Local instances that prefill (N_p); 0: there is none."""
    decode: int
    """Local instances that decode (N_d)."""
    remote_seconds: Curve
    """T(l): seconds in which a remote instance prefills l tokens."""
    local_seconds: Curve
    """T'(l), of a local instance."""
    kv_bytes: Curve
    """S(l): bytes that cross for l tokens."""
    decode_rate: float
    """Requests per second of one decode instance: BS_max / (T_dec x L_out)."""
    egress: float
    """Bytes per second that leave the remote cluster (B)."""
    threshold: float = 0.0
    """Prompts of more tokens go to the remote cluster (t)."""
    averaging: Averaging = "mean-length"

    def __post_init__(self) -> None:
        if min(self.remote, self.local, self.decode) < 0 or self.remote + self.local < 1 or self.decode < 1:
            raise ConfigError("instances: none negative, one or more that prefill and one or more that decode")
        if not (0.0 < self.decode_rate < float("inf") and self.egress > 0.0 and self.threshold >= 0.0):
            raise ConfigError("deployment: decode_rate and egress are positive, threshold is not negative")


@dataclass(frozen=True, slots=True)
class Rates:
    """What a deployment serves; requests per second unless said."""

    remote: float
    local: float
    decode: float
    served: float
    share: float
    """Part of the prompts that go to the remote cluster (p)."""
    long: float
    """Mean tokens of those."""
    short: float
    """Mean tokens of the others."""
    egress: float
    """Bytes per second that leave the remote cluster at that rate."""
    binds: Literal["remote prefill", "egress", "local prefill", "decode"]


def kv_rate(seconds: float, nbytes: float) -> float:
    """Return Phi: the bytes per second that one prefilling instance puts out."""
    return nbytes / seconds


def rates(d: Deployment) -> Rates:
    """Return what the deployment serves, and what binds. Without local prefill all prompts are remote, and the other way round."""
    cut = d.lengths.high if not d.remote else d.lengths.low if not d.local else d.threshold
    cut = min(max(cut, d.lengths.low), d.lengths.high)
    share = d.lengths.between(cut, d.lengths.high)
    remote_s, kv = (_of(d, what, cut, d.lengths.high) for what in (d.remote_seconds, d.kv_bytes))
    local_s = _of(d, d.local_seconds, d.lengths.low, cut)
    compute, link, local, decode = d.remote / remote_s, d.egress / kv, d.local / local_s, d.decode * d.decode_rate
    remote = min(compute, link) if d.remote else 0.0
    limits = {"decode": decode}
    if share > 0.0:
        limits["remote prefill" if compute <= link else "egress"] = remote / share
    if share < 1.0:
        limits["local prefill"] = local / (1.0 - share)
    binds = min(limits, key=lambda k: limits[k])
    long, short = d.lengths.mean(cut, d.lengths.high), d.lengths.mean(d.lengths.low, cut)
    served = limits[binds]
    return Rates(remote, local, decode, served, share, long, short, served * share * kv, binds)  # type: ignore[arg-type]


def best(d: Deployment, *, thresholds: int = 200) -> tuple[Deployment, Rates]:
    """Search thresholds (evenly in ln tokens) and splits of the local instances for the most requests per second.

    Both limits of a split move one against the other in the threshold, so that the best lies where they meet: the grid is
    within (high / low)^(1 / thresholds) of it. Raises ConfigError for fewer than two thresholds or local instances.
    """
    instances = d.local + d.decode
    if thresholds < 2 or instances < 2:
        raise ConfigError("search: two or more thresholds, and two or more local instances")
    grid = np.geomspace(d.lengths.low, d.lengths.high, thresholds + 1)[1:-1] if d.remote else (d.threshold,)
    tried = [
        replace(d, local=n, decode=instances - n, threshold=float(t))
        for n in range(0 if d.remote else 1, instances)
        for t in grid
    ]
    found = [(x, rates(x)) for x in tried]
    return max(found, key=lambda pair: pair[1].served)


def _of(d: Deployment, what: Curve, a: float, b: float) -> float:
    return d.lengths.expect(what, a, b) if d.averaging == "mean-time" else what(d.lengths.mean(a, b))

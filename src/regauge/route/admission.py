"""Which requests are taken: those whose predicted first token comes in time. The rest is told when to come again.

What is predicted is what the queues hold now, so that it falls as they drain: nothing is remembered of an overload but the ratio of measured to
predicted times, which is bounded and forgotten with a half-life of `FORGET_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log
from typing import Final

from regauge.config_route import RouteConfig
from regauge.route.cluster import Refusal, Request
from regauge.route.model import Estimate

STEP: Final = 0.1
"""What a step of priority adds to the share of the limits that a request may use up."""
RATIO_STEP: Final = 0.05
SPREAD_STEP: Final = 0.125
SPREADS: Final = 3.0
"""Mean deviations of the ratio above its mean that a prediction has to leave room for: most are to be in time, and not half of them."""
RATIO_BOUNDS = (0.5, 2.0)  # not `Final`: mypyc loses a constant tuple of floats
FORGET_S: Final = 5.0
MOST_RETRY_S: Final = 600
DECAY: Final = -log(2) / FORGET_S
SLACK_S: Final = 0.05
"""Added to measured and predicted times before they are compared: a few ms are noise."""


@dataclass(slots=True)
class Correction:
    """By how much predictions are wrong of late."""

    ratio: float = 1.0
    spread: float = 0.0
    """Mean deviation of the measured ratios from it."""
    at: float = 0.0

    def factor(self, now: float) -> float:
        """Return what predictions are to be multiplied by."""
        return 1 + (self.ratio - 1) * self._kept(now)

    def careful(self, now: float) -> float:
        """Return what predictions are to be multiplied by for nearly all to come in time."""
        return min(self.factor(now) + SPREADS * self.spread * self._kept(now), RATIO_BOUNDS[1])

    def measured(self, predicted_s: float, measured_s: float, now: float) -> float:
        """Take a measurement against what the model alone had predicted; return the ratio of the two."""
        ratio = (measured_s + SLACK_S) / (predicted_s + SLACK_S)
        low, high = RATIO_BOUNDS
        kept = self._kept(now)
        current = 1 + (self.ratio - 1) * kept
        off = min(max(ratio, low), high) - current
        self.spread = self.spread * kept * (1 - SPREAD_STEP) + SPREAD_STEP * abs(off)
        self.ratio = current + RATIO_STEP * off
        self.at = now
        return ratio

    def _kept(self, now: float) -> float:
        return exp(DECAY * (now - self.at)) if now > self.at else 1.0


def deadline(request: Request, config: RouteConfig) -> float:
    """Return the seconds within which the first token must be predicted to come; infinite: no matter when."""
    limit = config.ttft_s if request.ttft_s is None else request.ttft_s
    if limit is None or request.admitted or request.resume:
        return inf
    return limit * min(1.0, max(STEP, config.admit_share + STEP * request.priority))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a placement is held to: seconds to the first token, and per output token; infinite: no matter how many."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, request: Request, config: RouteConfig) -> Limits:
        """Return those of one request. What was admitted once is held to none."""
        tpot = config.tpot_s if request.tpot_s is None else request.tpot_s
        if tpot is None and config.ttft_s is None and request.ttft_s is None:
            return NONE
        free = tpot is None or request.admitted or request.resume
        return cls(deadline(request, config), inf if free or tpot is None else tpot * share(request))


NONE: Final = Limits(inf, inf)


def choose(made: Sequence[Estimate], limits: Limits, ratio: float, now: float) -> Estimate | Refusal:
    """Return the first placement that keeps the limits, or why none does."""
    fits = [one for one in made if _tpot_fits(one, limits.tpot_s)]
    for one in fits:
        if _in_time(one, limits.ttft_s, ratio):
            return one
    for one in fits:
        if one.computer.wanted(now):
            return one
    if not fits:
        return _slow(made, limits.tpot_s)
    soonest = min(fits, key=lambda one: one.ttft_s)
    if soonest.computer.guessed:
        return Refusal(
            "deadline",
            f"how fast {soonest.computer.name} computes is not known before its first prompt is done: come again in 1 s",
            1,
        )
    return late(soonest.ttft_s * ratio, limits.ttft_s)


def _in_time(one: Estimate, limit_s: float, ratio: float) -> bool:
    return limit_s == inf or (one.ttft_s * ratio <= limit_s and not one.computer.guessed)


def _tpot_fits(one: Estimate, limit_s: float) -> bool:
    # Who decodes alone is let in whatever was measured: nothing faster can be had there, and nothing else is measured anew.
    return (one.tpot_s or 0.0) <= limit_s or not one.decode.taken


def _slow(made: Sequence[Estimate], limit_s: float) -> Refusal:
    best = min(made, key=lambda one: one.decode.tpot_wait_s(limit_s))
    retry = min(max(1, ceil(best.decode.tpot_wait_s(limit_s))), MOST_RETRY_S)
    message = (
        f"{best.tpot_s or 0.0:.4f} s per token are predicted, and {limit_s:.4f} s are allowed: come again in {retry} s"
    )
    return Refusal("tpot", message, retry, best.ttft_s)


def share(request: Request) -> float:
    """Return the share of a limit that requests of low priority may use up, 1 for the others."""
    return min(1.0, max(STEP, 1 + STEP * request.priority))


def late(predicted_s: float, limit_s: float) -> Refusal:
    """Refuse a request whose first token would come too late. Queues drain by a second each second."""
    retry = min(max(1, ceil(predicted_s - limit_s)), MOST_RETRY_S)
    message = f"the first token is predicted after {predicted_s:.2f} s, and {limit_s:.2f} s are allowed: come again in {retry} s"
    return Refusal("deadline", message, retry, predicted_s)


def allowed(request: Request, most: int | None) -> float:
    """Return how many requests may be in the house for this one to be taken: of lower priority, fewer; `most`: for the others."""
    if most is None or request.admitted or request.resume:
        return inf
    return max(1, int(most * share(request)))


def full(request: Request, allowed: float, drain_s: float) -> Refusal:
    """Refuse a request because of how many there are; `drain_s`: until the first queue is empty."""
    retry = min(max(1, ceil(drain_s)), MOST_RETRY_S)
    message = f"{allowed:.0f} requests are in the house, as many as priority {request.priority} allows: come again in {retry} s"
    return Refusal("overload", message, retry)

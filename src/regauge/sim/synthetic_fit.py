"""Fits what `synthetic.generate` needs to a trace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp
from statistics import NormalDist

import numpy as np

from regauge.errors import ConfigError
from regauge.sim.synthetic_model import LEVELS, Fitted, Lengths, Quantiles, Reuse, Sessions, Times
from regauge.sim.trace import Arrival, Trace
from regauge.sim.trace_shape import common, dequantised
from regauge.sim.trace_stats import dispersion, variation

PHASES = 9
LEAST = 30
"""Requests of a trace that is fitted."""


def fit(trace: Trace) -> Fitted:
    """Return a trace's likeness; its ticks are spread first. Raises ConfigError for fewer than 30 requests."""
    if len(trace.arrivals) < LEAST:
        raise ConfigError(f"{trace.name}: {len(trace.arrivals)} requests are too few to fit; give {LEAST} or more")
    trace = dequantised(trace, 0)
    arrivals = trace.arrivals
    if any(each.after >= 0 for each in arrivals):
        return Fitted(trace.name, trace.block, _times(trace), _lengths(arrivals), None, _sessions(trace))
    if not trace.block:
        return Fitted(trace.name, 0, _times(trace), _lengths(arrivals))
    first = common(arrivals)
    kept, gaps = _reused(trace)
    own = [sum(name in first for name in each.blocks) for each in arrivals]
    follows = [k for k, each in enumerate(kept) if each > own[k]]
    news = sorted(set(range(len(arrivals))) - set(follows))
    fresh = _lengths([arrivals[k] for k in news] or arrivals)
    begin = round(float(np.median([own[k] for k in news]))) if news else 0
    if len(follows) < LEAST:
        return Fitted(
            trace.name, trace.block, _times(trace), fresh, _reuse(trace, range(len(arrivals)), kept, gaps, begin, 0.0)
        )
    reuse = _reuse(trace, follows, kept, gaps, begin, len(follows) / len(arrivals))
    return Fitted(trace.name, trace.block, _times(trace), fresh, reuse)


def _reuse(
    trace: Trace, follows: Sequence[int], kept: Sequence[int], gaps: Sequence[float], begin: int, share: float
) -> Reuse:
    chosen = [trace.arrivals[k] for k in follows]
    shares = [kept[k] * trace.block / trace.arrivals[k].tokens for k in follows]
    return Reuse(
        begin,
        share,
        _lengths(chosen),
        _table(shares),
        _correlation([each.tokens for each in chosen], shares),
        _table([gaps[k] for k in follows]),
    )


def _reused(trace: Trace) -> tuple[list[int], list[float]]:
    """Return, for each request, how many blocks came before, and how long ago the last of them did."""
    last: dict[int, float] = {}
    kept, gaps = [], []
    for each in trace.arrivals:
        count = 0
        for name in each.blocks:
            if name not in last:
                break
            count += 1
        kept.append(count)
        gaps.append(each.at - last[each.blocks[count - 1]] if count else 0.0)
        last.update(dict.fromkeys(each.blocks, each.at))
    return kept, gaps


def _sessions(trace: Trace) -> Sessions:
    roots: dict[int, list[int]] = {}
    root: list[int] = []
    for k, each in enumerate(trace.arrivals):
        root.append(k if each.after < 0 else root[each.after])
        roots.setdefault(root[k], []).append(k)
    kept = _reused(trace)[0]
    arrivals = trace.arrivals
    pairs = [(a, b) for turns in roots.values() for a, b in pairwise(turns)]
    could = [min(len(arrivals[a].blocks), len(arrivals[b].blocks)) for a, b in pairs]
    shares = [min(1.0, kept[b] / most) for (_, b), most in zip(pairs, could, strict=True) if most]
    phases: list[list[int]] = [[] for _ in range(PHASES)]
    for turns in roots.values():
        for number, k in enumerate(turns):
            phases[round((PHASES - 1) * number / max(1, len(turns) - 1))].append(arrivals[k].tokens)
    tables = [_table(phase or [each.tokens for each in arrivals]) for phase in phases]
    return Sessions(
        _table([len(turns) for turns in roots.values()]),
        _table([arrivals[b].think_s for _, b in pairs]),
        tuple(tables),
        min(1.0, max(0.0, _drift(arrivals, list(roots.values()), phases))),
        _table(shares or [0.0]),
    )


def _drift(arrivals: Sequence[Arrival], sessions: Sequence[Sequence[int]], phases: Sequence[Sequence[int]]) -> float:
    """Return the correlation of a prompt's normal score, within its phase, and the next one's."""
    ordered = [np.sort(np.asarray(phase)) for phase in phases]
    before, after = [], []
    for turns in sessions:
        scores = []
        for number, k in enumerate(turns):
            phase = ordered[round((PHASES - 1) * number / max(1, len(turns) - 1))]
            scores.append(_score(np.searchsorted(phase, arrivals[k].tokens, "left") + 0.5, len(phase) + 1))
        for first, second in pairwise(scores):
            before.append(first)
            after.append(second)
    return float(np.corrcoef(before, after)[0, 1]) if len(before) > 2 and np.std(before) and np.std(after) else 0.0


def _score(rank: float, count: int) -> float:
    return NormalDist().inv_cdf(rank / count)


def _lengths(arrivals: Sequence[Arrival]) -> Lengths:
    prompts, outputs = [each.tokens for each in arrivals], [each.output for each in arrivals]
    return Lengths(_table(prompts), _table(outputs), _correlation(prompts, outputs))


def _table(values: Sequence[float]) -> Quantiles:
    return tuple(round(float(x), 6) for x in np.quantile(np.asarray(values, float), LEVELS))


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the correlation of normal scores that has the same rank correlation: 2 sin(pi r / 6) of Spearman's r."""
    ranks = [_ranks(np.asarray(each, float)) for each in (first, second)]
    if len(first) < 3 or not all(each.std() for each in ranks):
        return 0.0
    spearman = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    return float(2 * np.sin(np.pi * spearman / 6))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks, the mean of theirs for equal values."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2.0)[inverse], float)


def _times(trace: Trace) -> Times:
    """Fit the arrivals of those who wait for nobody.

    A process of rate r whose clock's speed has relative variance v and forgets it in t seconds has, in windows of w, the index of dispersion
    c + 2 r v t g(w / t), g(x) = 1 - (1 - e^-x) / x, where c is the gaps' variation squared: that of 10 and of 60 s give v and t, that of 1 s gives c.
    """
    times = [each.at for each in trace.arrivals if each.after < 0]
    cv = variation(times)
    if cv is None:
        return Times(0.0)
    rate = (len(times) - 1) / (times[-1] - times[0])
    one, ten, sixty = (dispersion(times, window) for window in (1.0, 10.0, 60.0))
    base = min(max(cv, 0.05), 3.0)
    if one is None or ten is None or sixty is None or sixty < 1.3 * base**2:
        return Times(rate, min(max(cv, 0.05), 10.0))
    c, spread, memory = min(1.0, base**2), 0.0, 1.0
    for _ in range(20):
        memory = _memory((sixty - c) / max(ten - c, 1e-3))
        spread = max(0.0, (sixty - c) / (2 * rate * memory * _g(60.0 / memory)))
        c = min(max(one - 2 * rate * spread * memory * _g(1.0 / memory), 0.05), max(1.0, one))
    return _speeds(rate, c**0.5, spread, memory)


def _g(x: float) -> float:
    return 1.0 - (1.0 - exp(-x)) / x


def _memory(ratio: float) -> float:
    """Return the seconds for which g(60 / t) / g(10 / t) is the ratio, within 1 and 2,000 s."""
    low, high = 1.0, 2_000.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        if _g(60.0 / middle) / _g(10.0 / middle) < ratio:
            low = middle
        else:
            high = middle
    return low


def _speeds(rate: float, cv: float, spread: float, memory: float) -> Times:
    """Return two speeds of mean 1 and this variance, forgotten in so many seconds: even around 1, or, where that is too little, on and off."""
    if spread <= 1.0:
        step = spread**0.5
        return Times(rate, cv, 1.0 + step, 1.0 - step, 2 * memory, 2 * memory)
    share = 1.0 / (1.0 + spread)
    return Times(rate, cv, 1.0 / share, 0.0, memory / (1.0 - share), memory / share)

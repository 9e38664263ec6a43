"""What a trace is like: lengths, arrivals, reuse. The figures by which traces are compared, and generated ones judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from regauge.sim.trace import Arrival, Trace

WINDOWS_S = (1.0, 10.0, 60.0)
"""In which arrivals are counted for the index of dispersion."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts, or of answers: tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: int


@dataclass(frozen=True, slots=True)
class Description:
    """A trace in figures. Times and windows are those of arrivals that wait for nobody."""

    requests: int
    sessions: int
    """Arrivals that wait for nobody."""
    span_s: float
    prompt: Lengths
    output: Lengths
    ratio: float
    """Prompt tokens over output tokens."""
    hit: float | None
    """Share of prompt tokens that a cache without end would have, None without blocks."""
    cv: float | None
    """Standard deviation over mean of the times between arrivals; None for fewer than 3, or all at one time."""
    dispersion: tuple[float | None, ...]
    """Variance over mean of the arrivals in windows of `WINDOWS_S`; 1 for Poisson, None for fewer than 10 windows."""
    think_p50: float | None
    think_p90: float | None


def describe(trace: Trace) -> Description:
    """Return the figures of a trace with one request or more."""
    arrivals = trace.arrivals
    prompts, outputs = (lengths([getattr(a, name) for a in arrivals]) for name in ("tokens", "output"))
    times = [a.at for a in arrivals if a.after < 0]
    thinks = np.array([a.think_s for a in arrivals if a.after >= 0])
    return Description(
        len(arrivals),
        len(times),
        times[-1] - times[0],
        prompts,
        outputs,
        prompts.mean / outputs.mean,
        hit(arrivals, trace.block) if trace.block else None,
        variation(times),
        tuple(dispersion(times, window) for window in WINDOWS_S),
        float(np.quantile(thinks, 0.5)) if len(thinks) else None,
        float(np.quantile(thinks, 0.9)) if len(thinks) else None,
    )


def lengths(values: Sequence[int]) -> Lengths:
    """Return mean, quantiles and maximum."""
    found = np.asarray(values)
    p50, p90, p99 = (float(x) for x in np.quantile(found, (0.5, 0.9, 0.99)))
    return Lengths(float(found.mean()), p50, p90, p99, int(found.max()))


def hit(arrivals: Iterable[Arrival], block: int) -> float:
    """Return the share of prompt tokens that a prefix cache without end has, requests taken in order."""
    seen: set[int] = set()
    cached = prompt = 0
    for each in arrivals:
        prompt += each.tokens
        for name in each.blocks:
            if name not in seen:
                break
            cached += block
        seen.update(each.blocks)
    return cached / max(1, prompt)


def variation(times: Sequence[float]) -> float | None:
    """Return the coefficient of variation of the times between arrivals, in order of time."""
    if len(times) < 3 or times[-1] <= times[0]:
        return None
    gaps = np.diff(np.asarray(times))
    return float(gaps.std() / gaps.mean())


def dispersion(times: Sequence[float], window_s: float) -> float | None:
    """Return the index of dispersion: variance over mean of the numbers of arrivals in whole windows from the first on."""
    since = np.asarray(times) - times[0]
    windows = int(since[-1] / window_s)
    if windows < 10:
        return None
    counts = np.bincount((since / window_s).astype(np.int64), minlength=windows)[:windows]
    return float(counts.var() / counts.mean())


def tick(times: Sequence[float]) -> float:
    """Return the seconds to which times in order are rounded, 0 if they are not, or to less than 50 ms.

    Nineteen in twenty of the gaps between different times must be whole numbers of ticks, to 2 in 1,000 or 1.5 ms: one may be of 2.999 s now and then.
    """
    gaps = np.diff(np.unique(np.asarray(times, float)))
    if len(gaps) < 20:
        return 0.0
    median = float(np.median(gaps))
    low = float(np.quantile(gaps, 0.02))
    for candidate in sorted({median, low, 1.0}, reverse=True):
        if candidate < 0.05:
            continue
        few = gaps[gaps < 4.5 * candidate]
        candidate = float(few.sum() / np.maximum(1, np.rint(few / candidate)).sum())
        ticks = gaps / candidate
        whole = np.maximum(1, np.rint(ticks))
        if np.mean((np.abs(ticks - whole) < np.maximum(0.002 * whole, 0.0015 / candidate)) & (whole <= 100)) >= 0.95:
            return round(candidate, 3)
    return 0.0

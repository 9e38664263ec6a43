"""How a run went over time, from its log: requests waiting, KV resident, bytes on their way. Simulated, as the log is.

Everything is exact at the points asked for, but for inflow: a transfer's bytes are taken to cross evenly between the start of the prompt's computing and
the landing of its last byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from regauge.sim.log import Log

Array = NDArray[np.float64]


def span(log: Log, points: int = 400, *, share: float = 1.0) -> Array:
    """Return so many points from the first arrival to the end of this share of the requests, seconds, evenly."""
    if not len(log):
        return np.zeros(0)
    last = float(np.quantile(np.fmax(log.at, log.ended), share))
    return np.linspace(float(log.at.min()), max(last, float(log.at.min()) + 1e-9), points)


def present(begin: Array, end: Array, at: Array, weight: Array | None = None) -> Array:
    """Return how many intervals [begin, end) hold each point, or their weight together.

    An interval without a begin counts nowhere, one without an end until the last point.
    """
    held = ~np.isnan(begin)
    begin, end = begin[held], end[held]
    end = np.where(np.isnan(end), np.inf, end)
    weight = np.ones(len(begin)) if weight is None else weight[held]
    return _upto(begin, weight, at) - _upto(end, weight, at)


def waiting(log: Log, at: Array) -> Array:
    """Return the requests that have come and whose prompt is not being computed yet."""
    over = np.where(np.isnan(log.began), log.ended, log.began)
    return present(log.at, over, at)


def computing(log: Log, at: Array) -> Array:
    """Return the prompts that are being computed."""
    return present(log.began, np.where(np.isnan(log.computed), log.ended, log.computed), at)


def resident(log: Log, at: Array, decode: int | None = None) -> Array:
    """Return the tokens whose KV decode holds or has set room aside for: prompt and output of each seated request."""
    mine = np.ones(len(log), bool) if decode is None else log.decode == decode
    tokens = (log.prompt + log.output)[mine].astype(np.float64)
    return present(log.seated[mine], log.ended[mine], at, tokens)


def inflow(log: Log, edges: Array, decode: int | None = None) -> Array:
    """Return the bytes per second that decode receives between each two edges, mean of the time between."""
    mine = ~np.isnan(log.landed) & (log.nbytes > 0)
    if decode is not None:
        mine &= log.decode == decode
    begin, end, nbytes = log.began[mine], log.landed[mine], log.nbytes[mine]
    begin = np.where(np.isnan(begin), end, begin)
    end = np.maximum(end, begin + 1e-9)
    return np.diff(_crossed(begin, end, nbytes, edges)) / np.diff(edges)


def _upto(when: Array, weight: Array, at: Array) -> Array:
    order = np.argsort(when, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(weight[order])])
    return total[np.searchsorted(when[order], at, side="right")]


def _crossed(begin: Array, end: Array, nbytes: Array, at: Array) -> Array:
    """Bytes that have crossed at each point: a sum of ramps, each 0 before its begin and whole after its end."""
    rate = nbytes / (end - begin)
    # Ramps that have begun give rate * (t - begin); from their end on, rate * (t - end) is taken off again.
    begun, begun_at = _upto(begin, rate, at), _upto(begin, rate * begin, at)
    over, over_at = _upto(end, rate, at), _upto(end, rate * end, at)
    return (begun - over) * at - begun_at + over_at

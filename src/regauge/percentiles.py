"""Percentiles of what a histogram has grown by between two looks at it. Pure; as PromQL's `histogram_quantile` has them, and the live page (`page/series.js`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise


def percentile(q: float, before: Mapping[float, float], after: Mapping[float, float]) -> float | None:
    """Return the value that a share `q` of all does not exceed, linear within a bucket; None: nothing came, or a count went back.

    Counts are cumulative, by their buckets' upper bounds, of which one is infinite: what lies there is said to be at the highest bound below it.
    """
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    if (
        not counts
        or counts[0][1] < 0
        or any(more < less for (_, less), (_, more) in pairwise(counts))
        or counts[-1][1] <= 0
    ):
        return None
    rank = q * counts[-1][1]
    at = next(number for number, (_, count) in enumerate(counts) if count >= rank)
    upper, count = counts[at]
    lower, below = counts[at - 1] if at else (0.0, 0.0)
    if math.isinf(upper):
        return lower
    return upper if count == below else lower + (upper - lower) * (rank - below) / (count - below)

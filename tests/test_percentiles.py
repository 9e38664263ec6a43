"""Percentiles of a histogram's growth, against the values that went into it."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from regauge.percentiles import percentile

BOUNDS = (0.1, 0.5, 1.0, 5.0)
VALUES = st.lists(st.floats(0.001, 9.0), max_size=30)


def counted(histogram: Histogram) -> dict[float, float]:
    [family] = histogram.collect()
    return {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}


@settings(deadline=None, derandomize=True)
@given(VALUES, VALUES.filter(bool), st.sampled_from([0.5, 0.9, 0.99]))
def test_it_lies_in_the_bucket_of_the_true_one_of_what_came_between(
    old: list[float], new: list[float], q: float
) -> None:
    histogram = Histogram("seconds", "Of a test.", buckets=BOUNDS, registry=CollectorRegistry())
    for value in old:
        histogram.observe(value)
    before = counted(histogram)
    for value in new:
        histogram.observe(value)
    found = percentile(q, before, counted(histogram))
    true = sorted(new)[max(0, math.ceil(q * len(new)) - 1)]
    edges = [0.0, *BOUNDS]
    lower = max(edge for edge in edges if edge < true)
    assert found is not None
    assert lower <= found <= next((edge for edge in edges if edge >= true), BOUNDS[-1])


def test_it_is_linear_within_a_bucket() -> None:
    after = {1.0: 0.0, 2.0: 10.0, math.inf: 10.0}
    assert percentile(0.5, {}, after) == 1.5
    assert percentile(0.5, {1.0: 0.0, 2.0: 5.0, math.inf: 5.0}, after) == 1.5
    assert percentile(0.9, {}, {1.0: 1.0, math.inf: 10.0}) == 1.0, "above all bounds"


def test_what_says_nothing_gives_none() -> None:
    same = {1.0: 3.0, math.inf: 4.0}
    assert percentile(0.5, {}, {}) is None
    assert percentile(0.5, same, same) is None
    assert percentile(0.5, same, {1.0: 1.0, math.inf: 9.0}) is None, "a count that went back"

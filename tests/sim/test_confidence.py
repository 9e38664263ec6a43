"""Confidence: quantiles as the printed tables have them, intervals that hold the truth as often as they say."""

from __future__ import annotations

import random
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.sim.confidence import estimate, paired, quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "t"),
    # Any printed table of Student's t.
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 4, 2.7764), (0.975, 9, 2.2622), (0.95, 5, 2.0150),
     (0.995, 3, 5.8409), (0.975, 30, 2.0423), (0.975, 1000, 1.9623), (0.5, 7, 0.0)],
)  # fmt: skip
def test_quantiles_of_the_tables(probability: float, freedom: int, t: float) -> None:
    assert quantile(probability, freedom) == pytest.approx(t, abs=6e-5)


@given(st.floats(0.001, 0.499), st.integers(1, 200))
def test_quantiles_are_symmetric_and_ascend(probability: float, freedom: int) -> None:
    assert quantile(probability, freedom) == -quantile(1 - probability, freedom)
    assert quantile(probability, freedom) < quantile(probability + 0.001, freedom)


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    rng = random.Random(1)
    held = sum(abs(found.mean) <= found.half for found in (
        estimate([rng.gauss(0, 3) for _ in range(4)], 0.9) for _ in range(3_000)))  # fmt: skip
    assert held / 3_000 == pytest.approx(0.9, abs=0.02)  # three standard errors: 0.016


def test_pairs_leave_out_what_their_seed_did_to_both() -> None:
    seeds = [10.0, 50.0, 90.0]
    found = paired([x + 1.0 + d for x, d in zip(seeds, (0.1, 0.0, -0.1), strict=True)], seeds)
    assert found.mean == pytest.approx(1.0)
    assert found.half == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert found.certain
    assert not paired([1.0, 2.0], [2.0, 1.0]).certain


def test_one_seed_tells_nothing_of_the_spread() -> None:
    only = estimate([3.0])
    assert (only.mean, only.low, only.high, only.certain) == (3.0, -inf, inf, False)


def test_nonsense_is_refused() -> None:
    for values in ([], [nan], [1.0, inf]):
        with pytest.raises(ConfigError, match="give one finite value or more"):
            estimate(values)
    with pytest.raises(ConfigError, match="2 and 1 runs are no pairs; run the same seeds"):
        paired([1.0, 2.0], [1.0])
    with pytest.raises(ConfigError, match="one degree of freedom or more"):
        quantile(0.9, 0)

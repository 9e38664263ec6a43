"""What comes: means and percentiles kept, caches counted by hand, nonsense refused."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.sim.trace import Arrival, Trace
from regauge.sim.workload import Lengths, cached_tokens, of_lengths, of_trace


@given(mean=st.floats(10, 1e5), wide=st.floats(1.01, 14.0))
def test_a_log_normal_has_the_mean_and_percentile_that_were_asked_for(mean: float, wide: float) -> None:
    values, weights = Lengths(mean, mean * wide).bins(400)
    assert weights.sum() == pytest.approx(1.0)
    assert values @ weights == pytest.approx(mean)
    reached = np.cumsum(weights)
    assert np.interp(0.99, reached, values) == pytest.approx(mean * wide, rel=0.04)


def test_lengths_are_independent_and_the_hit_is_of_each() -> None:
    load = of_lengths(Lengths(1000, 5000), Lengths(100, 400), 2.0, hit=0.25)
    assert load.mean(load.prompt * load.output) == pytest.approx(1000 * 100)
    assert load.hit == pytest.approx(0.25)
    assert load.mean(load.prompt - load.cached) == pytest.approx(750)


@pytest.mark.parametrize(
    ("mean", "p99", "message"),
    [(0.0, 0.0, "mean from 1"), (nan, 0.0, "mean from 1"), (-5.0, 0.0, "mean from 1"), (100.0, 90.0, "over its mean"),
     (100.0, 1e6, "heavier tail"), (1e9, 0.0, "mean from 1")],
)  # fmt: skip
def test_lengths_that_cannot_be(mean: float, p99: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lengths(mean, p99)


@pytest.mark.parametrize(
    ("rate", "hit"), [(-1.0, 0.0), (0.0, 0.0), (nan, 0.0), (inf, 0.0), (1.0, 1.0), (1.0, -0.1), (1.0, nan)]
)
def test_rates_and_shares_that_cannot_be(rate: float, hit: float) -> None:
    with pytest.raises(ConfigError, match=r"rate|hit"):
        of_lengths(Lengths(10), Lengths(10), rate, hit=hit)


def arrivals(*blocks: tuple[int, ...]) -> tuple[Arrival, ...]:
    return tuple(Arrival(float(i), 10 * len(b) + 3, 7, b) for i, b in enumerate(blocks))


def test_a_cache_holds_what_came_before() -> None:
    asked = arrivals((1, 2, 3), (1, 2, 4), (9,), (1, 2, 3), (2,))
    assert cached_tokens(asked, 10) == [0, 20, 0, 30, 10]
    # Three blocks fit: after (1, 2, 4) and (9,) block 4, the least recently used, is gone; so is 3 from before.
    assert cached_tokens(asked, 10, 30) == [0, 20, 0, 20, 10]
    assert cached_tokens(asked, 10, 9.0) == [0] * 5


def test_a_trace_says_rate_and_reuse() -> None:
    load = of_trace(Trace("t", 10, arrivals((1, 2), (1, 2), (1, 3))))
    assert (load.rate, load.arrival_cv2) == (1.0, 0.0)
    assert list(load.cached) == [0, 20, 10]
    assert load.name == "t, cached as by one endless cache"
    assert of_trace(Trace("t", 10, arrivals((1,), (1,))), rate=8.0).rate == 8.0
    assert of_trace(Trace("t", 0, arrivals((), ())), hit=0.5).hit == pytest.approx(0.5)


def test_what_a_trace_does_not_say_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--hit"):
        of_trace(Trace("t", 0, arrivals((), ())))
    with pytest.raises(ConfigError, match="--rate"):
        of_trace(Trace("t", 10, (Arrival(0.0, 5, 5, ()), Arrival(0.0, 5, 5, (), after=0, think_s=1.0))))
    with pytest.raises(ConfigError, match="no requests"):
        of_trace(Trace("t", 10, ()))
    with pytest.raises(ConfigError, match="positive number"):
        of_trace(Trace("t", 10, arrivals((1,), (1,))), cache_tokens=-1.0)
    with pytest.raises(ConfigError, match="positive number"):
        of_trace(Trace("t", 10, arrivals((1,), (1,))), cache_tokens=nan)


def test_many_requests_become_fewer_with_the_same_means() -> None:
    rng = np.random.default_rng(1)
    asked = tuple(
        Arrival(float(i), 1 + int(rng.lognormal(9, 1)), 1 + int(rng.lognormal(5, 1)), (int(rng.integers(50)),)) for i in range(10_000)
    )  # fmt: skip
    load = of_trace(Trace("t", 512, asked))
    assert len(load.prompt) < 2100
    assert load.mean(load.prompt) == pytest.approx(np.mean([a.tokens for a in asked]))
    assert load.prompt_p99 == np.quantile([a.tokens for a in asked], 0.99)
    assert load.mean(load.output) == pytest.approx(np.mean([a.output for a in asked]))
    fresh = load.prompt - load.cached
    whole = np.array([a.tokens for a in asked], float) - np.minimum(
        cached_tokens(asked, 512), [a.tokens - 1 for a in asked]
    )
    assert load.mean(fresh**2) == pytest.approx(np.mean(whole**2), rel=0.01)
    assert load.mean(load.prompt**2 * load.output) == pytest.approx(
        np.mean([a.tokens**2 * a.output for a in asked]), rel=0.1
    )
    assert (load.prompt + load.output).max() == pytest.approx(max(a.tokens + a.output for a in asked))

"""Waiting and sharing: textbook cases exactly, and queues that are simulated beside them."""

from __future__ import annotations

import heapq
from math import exp, inf, log

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.sim.queueing import (
    Moments,
    Wait,
    condensed,
    erlang_b,
    erlang_c,
    moments,
    percentile,
    poisson_below,
    poisson_percentile,
    share_within,
    sharing,
    sharing_tail,
    wait,
)

EXPONENTIAL = Moments(1.0, 2.0, 6.0)
"""Of a mean of 1 s."""
ONE = (np.array([0.0]), np.array([1.0]))


def test_erlang_c_is_the_textbook_s() -> None:
    assert erlang_c(0.7, 1) == pytest.approx(0.7)  # M/M/1: the server's load
    assert erlang_c(1.0, 2) == pytest.approx(1 / 3)
    assert erlang_c(2.0, 3) == pytest.approx(4 / 9)
    assert erlang_b(2.0, 3) == pytest.approx(4 / 19)
    assert erlang_c(3.0, 3) == erlang_c(5.0, 3) == 1.0
    assert erlang_c(800.0, 1000) < 1e-9
    with pytest.raises(ConfigError, match="load is finite"):
        erlang_b(inf, 3)


def test_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    m_m_1 = wait(0.8, 1, EXPONENTIAL)
    assert m_m_1.mean == pytest.approx(4.0)
    assert percentile(0.9, *ONE, m_m_1) == pytest.approx(log(0.8 / 0.1) / 0.2)
    m_d_1 = wait(0.8, 1, Moments(1.0, 1.0, 1.0))
    assert m_d_1.mean == pytest.approx(2.0)
    assert wait(1.0, 1, EXPONENTIAL).endless
    assert wait(0.0, 1, EXPONENTIAL).mean == 0.0


def test_several_exponential_servers_wait_exactly() -> None:
    found = wait(2.0, 3, EXPONENTIAL)
    assert found.mean == pytest.approx(4 / 9)
    assert found.later(np.array([0.0, 1.0])) == pytest.approx([4 / 9, 4 / 9 * exp(-1.0)])


def queue(rate: float, servers: int, service: np.ndarray, seed: int) -> np.ndarray:
    """Seconds from arrival to end of one queue in order of arrival before several servers."""
    rng = np.random.default_rng(seed)
    free, took = [0.0] * servers, np.empty(len(service))
    for i, (at, needs) in enumerate(
        zip(np.cumsum(rng.exponential(1 / rate, len(service))).tolist(), service.tolist(), strict=True)
    ):
        ends = max(at, heapq.heappop(free)) + needs
        heapq.heappush(free, ends)
        took[i] = ends - at
    return took


@pytest.mark.parametrize(
    ("servers", "load", "sigma", "within"),
    [(1, 0.7, 0.01, 0.12), (1, 0.7, 1.0, 0.12), (4, 0.7, 1.0, 0.12), (12, 0.8, 1.0, 0.12), (1, 0.7, 1.3, 0.25), (4, 0.7, 1.3, 0.35),
     (12, 0.8, 1.3, 0.2)],
)  # fmt: skip
def test_percentiles_are_those_of_a_simulated_queue(servers: int, load: float, sigma: float, within: float) -> None:
    service = np.random.default_rng(5).lognormal(0.0, sigma, 150_000)
    weight = np.full(len(service), 1 / len(service))
    rate = load * servers / float(service.mean())
    took = queue(rate, servers, service, seed=6)
    found = wait(rate, servers, moments(service, weight))
    for share in (0.5, 0.9, 0.99):
        modelled = percentile(share, *condensed(service, weight), found)
        assert modelled == pytest.approx(np.quantile(took, share), rel=within), share


def test_a_percentile_is_where_the_share_is_reached() -> None:
    base, weight, waited = np.array([1.0, 2.0, 5.0]), np.array([0.5, 0.3, 0.2]), Wait(0.4, ((0.7, 1.0), (0.3, 4.0)))
    for share in (0.35, 0.6, 0.95):
        assert share_within(percentile(share, base, weight, waited), base, weight, waited) == pytest.approx(share)
    assert percentile(0.8, base, weight, Wait(0.0, ())) == 2.0
    assert percentile(0.9, base, weight, Wait(1.0, ((1.0, inf),))) == inf


def test_condensed_values_stand_for_all() -> None:
    values = np.random.default_rng(2).lognormal(0, 1.5, 50_000)
    weight = np.full(len(values), 1 / len(values))
    few, weights = condensed(values, weight)
    assert len(few) <= 520
    assert few @ weights == pytest.approx(values.mean())
    for share in (0.5, 0.9, 0.99):
        assert percentile(share, few, weights, Wait(0.0, ())) == pytest.approx(np.quantile(values, share), rel=0.02)


def test_sharing_a_link() -> None:
    assert sharing(0.5) == 2.0
    assert sharing(1.0) == sharing_tail(1.2) == inf
    assert sharing_tail(0.0) == 1.0
    assert 0.5 ** (sharing_tail(0.5) - 1) == pytest.approx(0.01)


@given(mean=st.floats(0.01, 3000), share=st.floats(0.01, 0.999))
@example(mean=742.0, share=0.5)
def test_a_poisson_percentile_is_the_least_that_reaches_the_share(mean: float, share: float) -> None:
    n = poisson_percentile(mean, share)
    assert poisson_below(mean, n) >= share - 1e-9
    assert poisson_below(mean, n - 1) < share + 1e-9

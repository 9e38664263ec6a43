"""The paper's equations against its tables, against draws of its lengths, and where one limit alone binds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from regauge.errors import ConfigError
from regauge.sim.curves import Polynomial
from regauge.sim.prfaas import Averaging, Deployment, Lengths, best, rates

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import published  # the bench holds the published figures; it is no package

LENGTHS = Lengths(9.90, 1.00, 128, 128_000)


@pytest.mark.parametrize("averaging", ["mean-length", "mean-time"])
def test_published_figures(averaging: Averaging) -> None:
    for figure in published.figures(averaging) + published.optimum(averaging):
        assert abs(figure.off) <= figure.within, figure


def test_limits_are_those_asked_for() -> None:
    for figure in published.figures("mean-length"):
        assert figure.within == (0.07 if "egress" in figure.what else 0.03)


def test_lengths_agree_with_draws() -> None:
    drawn = np.random.default_rng(7).lognormal(9.90, 1.00, 1_000_000)
    drawn = drawn[(drawn >= 128) & (drawn <= 128_000)]
    long = drawn[drawn > 19_400]
    assert LENGTHS.between(19_400, 128_000) == pytest.approx(len(long) / len(drawn), rel=6e-3)
    assert LENGTHS.mean(19_400, 128_000) == pytest.approx(long.mean(), rel=6e-3)
    assert LENGTHS.mean(128, 128_000) == pytest.approx(drawn.mean(), rel=6e-3)
    assert LENGTHS.expect(lambda x: x * x, 128, 19_400) == pytest.approx((drawn[drawn <= 19_400] ** 2).mean(), rel=6e-3)


def test_expected_length_is_the_closed_form() -> None:
    for a, b in ((128, 128_000), (128, 900), (60_000, 128_000)):
        assert LENGTHS.expect(lambda x: x, a, b) == pytest.approx(LENGTHS.mean(a, b), rel=1e-6)
    assert LENGTHS.between(200_000, 300_000) == 0.0
    assert LENGTHS.mean(200_000, 300_000) == 128_000


def test_each_limit_binds_alone() -> None:
    case = published.CASE
    assert rates(replace(case, remote=3)).binds == "remote prefill"
    assert rates(case).binds == "local prefill"
    assert rates(replace(case, local=1)).binds == "local prefill"
    assert rates(replace(case, decode=1)).binds == "decode"
    assert rates(replace(case, egress=5e9 / 8)).binds == "egress"


def test_a_thin_link_binds_the_optimum() -> None:
    ten, five = (best(replace(published.CASE, egress=g * 1e9 / 8))[1] for g in (10, 5))
    assert ten.egress <= 10e9 / 8 * (1 + 1e-9)
    assert ten.served == pytest.approx(2.9, rel=0.05)
    assert five.served == pytest.approx(2.2, rel=0.05)


def test_convex_times_take_longer_than_the_time_of_the_mean() -> None:
    case = replace(published.CASE, averaging="mean-time")
    assert rates(case).remote < rates(published.CASE).remote


def test_search_beats_every_other_choice() -> None:
    chosen, found = best(published.CASE)
    for local in range(8):
        for t in (500.0, 5_000.0, 15_000.0, 25_000.0, 60_000.0):
            assert rates(replace(chosen, local=local, decode=8 - local, threshold=t)).served <= found.served * 1.001


@pytest.mark.parametrize("change", [{"decode": 0}, {"remote": 0, "local": 0}, {"egress": -1.0}, {"threshold": -1.0}])
def test_nonsense_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(published.CASE, **change)  # type: ignore[arg-type]


def test_nonsense_lengths_are_refused() -> None:
    for bad in ((9.9, 0.0, 128, 1000), (9.9, 1.0, 1000, 128), (float("nan"), 1.0, 1, 2)):
        with pytest.raises(ConfigError):
            Lengths(*bad)
    with pytest.raises(ConfigError, match="two or more local instances"):
        best(Deployment(LENGTHS, 1, 0, 1, Polynomial(1), Polynomial(1), Polynomial(1), 1.0, 1.0))

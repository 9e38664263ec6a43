"""The figures of a run: each by hand."""

from __future__ import annotations

from math import inf, isnan

import pytest
from sim_logs import DONE, LATE, NO_ROOM, TOO_MANY, log, result

from regauge.errors import ConfigError
from regauge.sim.summary import flat, pooled, summarize

ALL = log(DONE, LATE, TOO_MANY, NO_ROOM)


def test_a_summary_counts_what_a_person_would() -> None:
    found = summarize(result(ALL), ttft_s=5.0, tpot_s=0.11)
    assert found.requests == 4
    assert found.outcomes == {"complete": 2, "limited": 1, "refused": 1, "failed": 0}
    assert (found.ttft.mean, found.ttft.p50) == ((2.5 + 10.0) / 2, 6.25)
    assert found.tpot.mean == pytest.approx(0.1)
    assert found.goodput == 0.25  # LATE's first token is late, and two were refused
    assert found.goodput_per_s == pytest.approx(1 / 21)
    assert found.requests_per_s == pytest.approx(2 / 21)
    assert found.output_tokens_per_s == pytest.approx(112 / 21)
    assert found.hit == 400 / 4000
    assert found.nbytes == 3.6e9
    assert found.busy == {"p0": 0.25, "p1": 0.5, "d0": 1.0, "d1": 0.0}
    assert found.ports == pytest.approx({"p0": 0.03, "p1": 0.15, "d0": 0.03, "d1": 0.075})
    assert found.busiest == ("d0", 1.0)


@pytest.mark.parametrize(("ttft_s", "tpot_s", "good"), [(10.0, 0.1, 2), (9.9, 0.1, 1), (10.0, 0.099, 0), (2.4, 1.0, 0)])
def test_goodput_asks_for_both_limits(ttft_s: float, tpot_s: float, good: int) -> None:
    assert summarize(result(ALL), ttft_s, tpot_s + 1e-9).goodput == good / 4


def test_one_token_breaks_no_limit_of_the_time_per_token() -> None:
    only = (*DONE[:3], 1, *DONE[4:])
    found = summarize(result(log(only)), 5.0, 1e-6)
    assert found.goodput == 1.0
    assert isnan(found.tpot.mean)


def test_warm_requests_are_not_counted() -> None:
    assert summarize(result(ALL), 20.0, 1.0, warm=1).ttft.mean == 10.0
    assert summarize(result(ALL), 20.0, 1.0, warm=3).outcomes["refused"] == 1


def test_nothing_served_is_no_crash() -> None:
    found = summarize(result(log(NO_ROOM)), 1.0, 1.0)
    assert found.goodput == found.hit == found.requests_per_s == 0.0
    assert "ttft_mean" not in pooled("none", [found]).figures
    assert summarize(result(log()), 1.0, 1.0).requests == 0


def test_several_seeds_are_a_mean_with_an_interval() -> None:
    one, two = (summarize(result(log(row)), 20.0, 1.0) for row in (DONE, LATE))
    found = pooled("case", [one, two]).figures
    assert found["ttft_mean"].mean == pytest.approx(6.25)
    assert found["ttft_mean"].half == pytest.approx(12.7062 * 7.5 / 2, rel=1e-5)  # t(0.975, 1) x s / sqrt(2)
    assert found["prefill_busy"].mean == 0.375
    assert found["decode_busy"].mean == 0.5
    assert found["decode_nics"].mean == pytest.approx(0.0525)
    assert pooled("case", [one]).figures["hit"].high == inf
    assert set(flat(one)) >= set(found)
    with pytest.raises(ConfigError, match="case: no runs"):
        pooled("case", [])

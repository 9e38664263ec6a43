"""Measured rates and delays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.move.flow_meter import DelayMeter, RateMeter, Shares


def drive(meter: RateMeter, rate: float, start: float, seconds: float, chunk: int = 100) -> float:
    now = start
    while now < start + seconds:
        now += chunk / rate
        meter.landed(chunk, now)
    return now


def test_a_rate_follows_what_lands_down_slowly_and_up_at_once() -> None:
    meter = RateMeter(1e6, 0.001)
    assert meter.rate == 1e6
    meter.busy(0.0)
    now = drive(meter, 2e5, 0.0, 0.004)
    assert 2e5 < meter.rate < 9e5, "one bad sample is no verdict"
    now = drive(meter, 2e5, now, 0.1)
    assert meter.rate == pytest.approx(2e5, rel=0.05)
    drive(meter, 8e5, now, 0.01)
    assert meter.rate == pytest.approx(8e5, rel=0.05)


def test_a_rate_stays_between_a_64th_and_the_line() -> None:
    meter = RateMeter(1e6, 0.001)
    meter.busy(0.0)
    now = drive(meter, 1.0, 0.0, 100_000.0)
    assert meter.rate == 1e6 / 64
    drive(meter, 1e9, now, 0.1)
    assert meter.rate == 1e6


def test_idle_time_is_not_measured_and_a_long_one_forgets() -> None:
    meter = RateMeter(1e6, 0.001)
    meter.busy(0.0)
    now = drive(meter, 2e5, 0.0, 0.1)
    slow = meter.rate
    meter.idle(now)
    meter.landed(100, now + 0.5)
    meter.busy(now + 0.9)
    assert meter.rate == slow
    meter.idle(now + 0.9)
    meter.busy(now + 2.0)
    assert meter.rate == 1e6


def test_a_delay_is_the_least_of_the_last_sixteen() -> None:
    meter = DelayMeter(0.5)
    assert meter.delay == 0.5
    meter.sample(2.0)
    assert meter.delay == 2.0, "what was configured is only where it starts"
    meter.sample(1.0)
    for _ in range(15):
        meter.sample(3.0)
    assert meter.delay == 1.0
    meter.sample(3.0)
    assert meter.delay == 3.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=80))
def test_lags_add_up_to_nothing_until_one_is_forgiven(grants: list[tuple[str, int]]) -> None:
    shares = Shares({"a": 2.0})
    shares.active({"a", "b", "c"})
    for tenant, nbytes in grants:
        shares.grant(tenant, nbytes, 1e9)
    total = sum(n for _, n in grants)
    for tenant, weight in (("a", 2), ("b", 1), ("c", 1)):
        got = sum(n for name, n in grants if name == tenant)
        assert shares.lag[tenant] == pytest.approx(total * weight / 4 - got, abs=1e-6)


def test_who_lags_most_is_served_if_the_bound_is_reached() -> None:
    shares = Shares({})
    shares.active({"a", "b", "c"})
    shares.grant("a", 90, 1e9)
    assert shares.behind(31.0) is None
    assert shares.behind(30.0) == "b"
    shares.active({"b", "c"})
    assert shares.lag == {"b": 30.0, "c": 30.0}
    shares.active({"b"})
    assert shares.behind(0.0) is None, "alone, a tenant is behind nobody"


def test_too_much_is_held_against_a_tenant_up_to_the_bound_only() -> None:
    shares = Shares({})
    shares.active({"a", "b"})
    for _ in range(100):
        shares.grant("a", 10, 25.0)
    assert shares.lag["a"] == -25.0

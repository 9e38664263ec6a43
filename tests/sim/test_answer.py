"""The balance between the pools is that of the published model, and what is said of a plan is what it is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.sim import workload
from regauge.sim.answer import balance
from regauge.sim.ask import Ask, Pool, Slo
from regauge.sim.curves import Measured, Polynomial
from regauge.sim.devices import Curves
from regauge.sim.model import Machine, exactly, prefill_seconds
from regauge.sim.pools import facts, prefill_times
from regauge.sim.prfaas import Deployment, Lengths, rates
from regauge.sim.sizing import Shape, State
from regauge.sim.work import Term, Work
from regauge.sim.workload import of_lengths


def test_the_balance_is_that_of_prefill_as_a_service() -> None:
    """At its threshold Theta_prfaas / p = Theta_pdp / (1 - p), where times are means over a class."""
    published = Lengths(9.9, 1.0, 128.0, 128_000.0)
    remote, local = Polynomial(0.39, 3.4e-5, 1.6e-10), Polynomial(0.372, 1.426e-4)
    edges = np.geomspace(128.0, 128_000.0, 4001)
    tokens = np.sqrt(edges[:-1] * edges[1:])
    weight = np.array([published.between(a, b) for a, b in itertools.pairwise(edges)])
    here, there = (np.array([curve(x) for x in tokens]) for curve in (remote, local))
    count, load = balance(here * weight / 4, there * weight / 3, 0.0)
    threshold = float(tokens[count - 1])
    found = rates(
        Deployment(published, 4, 3, 5, remote, local, lambda _: 1.0, 1.0, 1e12, threshold, averaging="mean-time")
    )
    assert found.remote / found.share == pytest.approx(found.local / (1.0 - found.share), rel=0.01)
    assert load == pytest.approx(1.0 / (found.remote / found.share), rel=0.01)


@given(own=st.floats(0.0, 2.0), seed=st.integers(0, 100))
def test_decode_is_never_busier_than_prefill(own: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = rng.exponential(0.01, 200), rng.exponential(0.02, 200)
    count, load = balance(here, there, own)
    if count:
        assert own + there[:count].sum() <= load + 1e-12
    if count < 200:
        assert not count or own + there[: count + 1].sum() > here[count + 1 :].sum()


@given(cached=st.lists(st.integers(0, 5000), min_size=3, max_size=3), more=st.integers(1, 5000))
def test_many_prefills_take_what_each_does(cached: list[int], more: int) -> None:
    work = Work(2e9, (Term("attention", 1e4), Term("window", 3e4, 1024)))
    curve = Measured(((100.0, 0.3), (2000.0, 0.9), (6000.0, 4.0)))
    for measured in (Curves(None, None), Curves(curve, None)):
        on = Machine(exactly(1e15), exactly(1e12), exactly(0.4), exactly(0.5), overhead=0.1, measured=measured)
        prompts = [c + more for c in cached]
        many = prefill_times(work, np.array(cached, float), np.array(prompts, float), on)
        one_by_one = [prefill_seconds(work, c, p, on).value for c, p in zip(cached, prompts, strict=True)]
        assert list(many) == pytest.approx(one_by_one)


def question(rate: float) -> Ask:
    load = of_lengths(workload.Lengths(4000, 20_000), workload.Lengths(200), rate)
    return Ask("llama-3.1-8b", Pool("h200"), Pool("h200"), load, Slo(1.0, 0.03))


@given(rates_=st.tuples(st.floats(1.0, 60.0), st.floats(1.0, 60.0)))
def test_more_requests_never_come_sooner(rates_: tuple[float, float]) -> None:
    found = facts(question(10.0))
    slow, fast = (State(found, Shape(2, 1, 1, 1), rate, "value") for rate in sorted(rates_))
    for share in (0.5, 0.9):
        assert slow.ttft(share) <= fast.ttft(share) * (1 + 1e-9)
        assert slow.tpot(share) <= fast.tpot(share)
    assert slow.kv.mean <= fast.kv.mean
    assert slow.ttft_met() >= fast.ttft_met() - 1e-9


def test_the_pessimistic_world_is_never_quicker() -> None:
    found = facts(question(10.0))
    low, value, high = (State(found, Shape(2, 1, 1, 1), 10.0, which) for which in ("low", "value", "high"))  # type: ignore[arg-type]
    for share in (0.5, 0.99):
        assert low.ttft(share) >= value.ttft(share) >= high.ttft(share)
        assert low.tpot(share) >= value.tpot(share) >= high.tpot(share)
    assert low.load(found.decode) >= value.load(found.decode) >= high.load(found.decode)

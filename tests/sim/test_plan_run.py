"""A plan's servers in the simulator: close to the closed forms where those hold, and seen to differ where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regauge.errors import ConfigError
from regauge.sim.answer import answer
from regauge.sim.ask import Ask, Pool, Slo
from regauge.sim.plan_run import simulate
from regauge.sim.trace import Arrival, Trace, generate
from regauge.sim.workload import Lengths, of_lengths, of_trace

PREFILL, DECODE = Pool("h20", 6, nic="400g", nics=8, kv="bf16"), Pool("h200", 1, kv="bf16", weight_bits=16)


def ask(**more: object) -> Ask:
    load = of_lengths(Lengths(6000, 20_000), Lengths(200, 600), 7.0, hit=0.5)
    return Ask(
        **{"model": "llama-3.1-70b", "prefill": PREFILL, "decode": DECODE, "workload": load, "slo": Slo(4.0, 0.2)}
        | more
    )  # type: ignore[arg-type]


def test_the_simulator_agrees_with_the_closed_forms() -> None:
    plan = answer(ask(), changes=False)
    run = simulate(plan, 4000, seed=3)
    assert 0.5 < plan.prefill.busy.value < 0.95
    assert run.complete == 1.0
    assert run.prefill_busy == pytest.approx(plan.prefill.busy.value, rel=0.05)
    for share in ("mean", "p50", "p90"):
        assert getattr(plan.ttft, share).value == pytest.approx(getattr(run.ttft, share), rel=0.15), share
        assert getattr(plan.tpot, share).value == pytest.approx(getattr(run.tpot, share), rel=0.15), share
    assert plan.ttft.met.value == pytest.approx(run.ttft.met, abs=0.03)


def test_a_trace_s_prefixes_lie_in_caches_apart() -> None:
    trace = Trace("made", 512, tuple(generate(5, 1500, 10.0)))
    plan = answer(ask(workload=of_trace(trace, rate=2.0)), changes=False)
    run = simulate(plan, 1500, trace=trace)
    assert run.requests == 1350
    assert 0.0 < run.hit <= plan.mix.hit + 0.02


def test_what_cannot_be_simulated() -> None:
    plan = answer(ask(), changes=False)
    with pytest.raises(ConfigError, match="give 100 to"):
        simulate(plan, 3)
    many = answer(ask(prefill=replace(PREFILL, servers=1000), decode=replace(DECODE, servers=101)), changes=False)
    with pytest.raises(ConfigError, match="101,000 pairs of instances"):
        simulate(many, 100)
    loops = Trace("loops", 512, (Arrival(0.0, 5000, 5, ()), Arrival(0.0, 5000, 5, (), after=0, think_s=1.0)))
    with pytest.raises(ConfigError, match="wait for one another"):
        simulate(plan, 100, trace=loops)


def test_sending_less_carries_less() -> None:
    whole, less = (simulate(answer(replace(ask(), delta=d), changes=False), 400) for d in (False, True))
    assert less.ttft.mean <= whole.ttft.mean


@pytest.mark.parametrize("output", [Lengths(1), Lengths(2, 9)])
def test_an_answer_of_one_token_keeps_to_any_time_per_token(output: Lengths) -> None:
    load = of_lengths(Lengths(6000), output, 3.0)
    run = simulate(answer(ask(workload=load), changes=False), 300)
    assert run.complete == 1.0
    assert run.tpot.met == 1.0

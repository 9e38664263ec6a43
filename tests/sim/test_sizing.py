"""Plans: one by hand, monotone in what they are asked, and refusals that say what would fit."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log, sqrt

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regauge.errors import ConfigError, Refused
from regauge.layout.presets import load_named
from regauge.sim.answer import answer, plan
from regauge.sim.ask import Ask, Pool, Slo
from regauge.sim.devices import Accelerator, Catalogue, Figure, Nic, shipped
from regauge.sim.memory import kept
from regauge.sim.model import Interval, Point, exactly
from regauge.sim.plan_result import ENDLESS, Plan
from regauge.sim.pools import facts
from regauge.sim.queueing import poisson_percentile
from regauge.sim.sizing import Shape, State, shape
from regauge.sim.whatif import with_hit
from regauge.sim.workload import Lengths, Workload, of_lengths


def figure(value: float) -> Figure:
    return Figure(value, "made up", "2026")


def catalogue(memory_gb: float = 50.0) -> Catalogue:
    """One card of 100 TFLOPS and 1 TB/s, one NIC of 10 GB/s payload."""
    card = Accelerator(
        "Card", "Us", bf16_tflops=figure(100), fp8_tflops=figure(200), memory_gb=figure(memory_gb), memory_gb_per_s=figure(1000),
        cards=figure(2), nics=figure(2), nic="slow",
    )  # fmt: skip
    return msgspec.structs.replace(
        shipped(), accelerators={**shipped().accelerators, "card": card},
        nics={**shipped().nics, "slow": Nic("slow", figure(100), figure(0.8))},
    )  # fmt: skip


def pool(**more: object) -> Pool:
    given_ = {"kv": "bf16,page=64", "weight_bits": 16.0, "compute": exactly(0.5), "memory": exactly(0.8)} | more
    return Pool("card", **given_)  # type: ignore[arg-type]


def ask(rate: float = 20.0, hit: float = 0.0, memory_gb: float = 50.0, **more: object) -> Ask:
    load = of_lengths(Lengths(1000), Lengths(100), rate, hit=hit)
    given_ = {
        "model": "llama-3.1-8b",
        "prefill": pool(),
        "decode": pool(),
        "workload": load,
        "slo": Slo(0.6, 0.03),
    } | more
    return Ask(catalogue=catalogue(memory_gb), **given_)  # type: ignore[arg-type]


def test_a_plan_by_hand() -> None:
    """Llama 3.1 8B in BF16: 8.03 x 10^9 parameters, 7.5 active; 32 layers, 32 heads, 8 KV heads of 128."""
    plan = answer(ask(), changes=False)
    # A prompt: linear layers, and attention over 1000 x 999 / 2 pairs; two cards of 100 TFLOPS at a half.
    operations = 2 * 7.5e9 * 1000 + 32 * 2 * 32 * 256 * 1000 * 999 / 2
    seconds = operations / (2 * 100e12 * 0.5)
    token = 32 * 8 * 128 * 2 * 2  # bytes of KV
    assert plan.network.wire_token_bytes == token == 131_072
    assert plan.prefill.needs[0].what == "TTFT"
    compute = next(n for n in plan.prefill.needs if n.what == "compute")
    assert compute.exact == pytest.approx(20 * seconds)  # 3.05
    assert compute.servers.value == 4
    # Decode: a step reads all weights (nearly: 8.03e9 x 2 B x (1 - (1 - 7.5 / 8.03)^b)) and 1050 tokens of each request.
    batch = 25  # the least that makes 2000 tokens/s: 25 / 12.19 ms
    read = 8.03e9 * 2 * (1 - (1 - 7.5 / 8.03) ** batch) + batch * 1050 * token
    step = read / (2 * 1e12 * 0.8)
    generating = 20 * 100 * step / plan.decode.servers
    assert plan.decode.servers == 1
    assert plan.tpot.asked.value == pytest.approx(
        step * (1 + 1050 * token * (poisson_percentile(generating, 0.9) + 1 - batch) / read), rel=0.01
    )
    # Room for KV: 2 x 50 GB, a tenth kept back, 16.06 GB of weights.
    assert plan.decode.memory.room == pytest.approx(2 * 50e9 * 0.9 - 16.06e9)
    hold = plan.ttft.mean.value - step
    kv = 1100 * token * 20 * (100 * step + hold)
    assert plan.decode.memory.resident.value == pytest.approx(kv, rel=0.02)
    peak = kv + 2.326 * sqrt(1100 * token * kv)
    assert plan.decode.memory.peak.value == pytest.approx(peak, rel=0.02)
    # Network: 131 MB a request, 20 a second, over 2 NICs of 10 GB/s.
    assert plan.network.ingress.value == pytest.approx(20 * 1000 * token)
    assert plan.network.ingress_load.value == pytest.approx(20 * 1000 * token / 20e9)
    assert plan.network.alone_s.value == pytest.approx(1000 * token / 10e9)
    assert plan.network.p99_s.value == pytest.approx(0.013107 * (1 + log(0.01) / log(0.13107)), rel=1e-3)
    assert plan.network.incast == plan.prefill.servers
    assert plan.network.ports == 2 * plan.prefill.servers + 2
    assert plan.ratio == pytest.approx(plan.prefill.needs[0].exact / plan.decode.needs[0].exact)


def test_the_servers_that_are_found_suffice_and_one_less_does_not() -> None:
    plan = answer(ask(rate=150.0), changes=False)
    assert plan.fits
    assert plan.most.value >= 150.0
    fewer = answer(ask(rate=150.0, prefill=pool(servers=plan.prefill.servers - 1)), changes=False)
    assert not fewer.fits
    assert (
        f"prefill: TTFT asks for {plan.prefill.servers} servers of Card in instances of 1, {plan.prefill.servers - 1} are there"
        in fewer.problems
    )
    assert fewer.remedies[0].startswith(
        f"{plan.prefill.servers} prefill and {plan.decode.servers} decode servers, in instances of 1 and "
    )
    assert fewer.enough == plan.enough == (plan.prefill.servers, plan.decode.servers)
    one = answer(ask(rate=150.0, decode=pool(servers=1)), changes=False)
    assert any(p.startswith("decode: ") for p in one.problems)
    assert one.most.value < 150.0
    assert one.prefill.servers == plan.prefill.servers


def test_the_highest_rate_is_one_that_is_met() -> None:
    found = facts(ask(rate=40.0, prefill=pool(servers=8), decode=pool(servers=3)))
    plan = answer(found.ask, changes=False)
    most = plan.most.value
    assert State(found, Shape(8, 1, 3, 1), most * 0.999, "value").holds()
    assert not State(found, Shape(8, 1, 3, 1), most * 1.001, "value").holds()


def no_more(few: Ask, many: Ask) -> None:
    """A first token waits for a decode step, which other decode instances make longer or shorter: prefill's servers compare where those are the same."""
    one, other = shape(facts(few)), shape(facts(many))
    assert one.decode_servers <= other.decode_servers
    if (one.decode, one.decode_span) == (other.decode, other.decode_span):
        assert one.prefill_servers <= other.prefill_servers


RATES = st.floats(0.5, 400.0)
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(rate=RATES, more=st.floats(1.0, 3.0), hit=st.floats(0.0, 0.9))
def test_a_higher_rate_takes_no_fewer_servers(rate: float, more: float, hit: float) -> None:
    no_more(ask(rate, hit), ask(rate * more, hit))


@QUICK
@given(rate=RATES, hits=st.tuples(st.floats(0.0, 0.95), st.floats(0.0, 0.95)))
def test_a_higher_hit_rate_takes_no_more_prefill_servers(rate: float, hits: tuple[float, float]) -> None:
    low, high = sorted(hits)
    no_more(ask(rate, high), ask(rate, low))


@QUICK
@given(rate=RATES, memories=st.tuples(st.floats(10.0, 100.0), st.floats(10.0, 100.0)))
def test_more_memory_takes_no_more_servers(rate: float, memories: tuple[float, float]) -> None:
    less, more = sorted(memories)
    no_more(ask(rate, memory_gb=more), ask(rate, memory_gb=less))


@QUICK
@given(ttft=st.floats(0.2, 5.0), tpot=st.floats(0.012, 0.1), looser=st.floats(1.0, 3.0))
def test_looser_times_take_no_more_servers(ttft: float, tpot: float, looser: float) -> None:
    tight, loose = (shape(facts(ask(100.0, slo=Slo(ttft * k, tpot * k)))) for k in (1.0, looser))
    assert loose.decode_servers <= tight.decode_servers


def test_every_figure_lies_in_its_interval_and_intervals_are_of_the_constants() -> None:
    sure = answer(ask(), changes=False)
    assert sure.ttft.p90.low == sure.ttft.p90.high
    vague = answer(ask(prefill=pool(compute=Interval(0.3, 0.5, 0.7))), changes=False)
    assert vague.ttft.p90.value == pytest.approx(sure.ttft.p90.value)
    assert vague.ttft.p90.low < vague.ttft.p90.value < vague.ttft.p90.high
    needs = {n.what: n.servers for n in vague.prefill.needs}
    assert (needs["compute"].low, needs["compute"].value, needs["compute"].high) == (3, 4, 6)
    pessimistic = answer(ask(prefill=pool(compute=Interval(0.3, 0.5, 0.7)), sure=True), changes=False)
    assert pessimistic.prefill.servers > vague.prefill.servers
    assert pessimistic.fits
    assert pessimistic.ttft.asked.high <= 0.6


def test_a_model_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(Refused) as refused:
        answer(ask(prefill=pool(servers=1), memory_gb=8.0))
    (reason,) = refused.value.reasons
    assert reason.startswith(
        "prefill: llama-3.1-8b does not fit 1 x 2 x Card: 16 GB of weights at 16 bits and 0.1 GB of KV"
    )
    assert "What would fit: 2 servers for an instance; weights of 8 bits; servers of " in reason
    assert "h200" in reason
    assert answer(ask(memory_gb=8.0, decode=pool(span=2)), changes=False).prefill.span == 2


def test_times_that_no_number_of_servers_meets() -> None:
    plan = answer(ask(slo=Slo(0.02, 0.0005)), changes=False)
    assert not plan.fits
    assert any(
        "no number of servers meets TTFT: with nothing waiting the slowest prompt takes" in p for p in plan.problems
    )
    assert any("a step of one request takes" in p for p in plan.problems)
    assert plan.goodput.high == 0.0
    assert plan.enough == (0, 0)


def test_a_narrow_network_binds_and_delta_sends_less() -> None:
    narrow = pool(nics=1, servers=40)
    wide = answer(ask(rate=100.0, hit=0.9, decode=narrow), changes=False)
    delta = answer(ask(rate=100.0, hit=0.9, decode=narrow, delta=True), changes=False)
    assert delta.network.ingress.value == pytest.approx(wide.network.ingress.value / 10)
    one = answer(ask(rate=100.0, hit=0.9, decode=pool(nics=1, servers=1, reserve=0.0), memory_gb=2000.0), changes=False)
    assert one.network.ingress_load.value == pytest.approx(100 * 1000 * 131_072 / 10e9)
    assert next(n for n in one.decode.needs if n.what == "network").servers.value == ceil(1.31072 / 0.8)
    assert one.ttft.p90.value == ENDLESS


def test_a_switch_that_is_too_small_says_which_fabric_would_do() -> None:
    plan = answer(ask(prefill=pool(servers=80), decode=pool(servers=20)), changes=False)
    assert plan.problems == ("network: 200 NICs need a port each, 128 ports of 400G has 128",)
    assert plan.remedies[-1].startswith(
        "network: 2 such switches, one for each rail, KV crossing from NIC i to NIC i: 200 ports of 256"
    )
    wide = answer(ask(prefill=pool(servers=160), decode=pool(servers=20)), changes=False)
    assert wide.remedies[-1].startswith("network: a fat tree of ")


def test_ports_are_no_slower_than_the_nics() -> None:
    slow = msgspec.structs.replace(shipped().switches["64x400g"], gbit_per_s=figure(25))
    mine = msgspec.structs.replace(catalogue(), switches={"slow": slow})
    load = of_lengths(Lengths(1000), Lengths(100), 20.0)
    plan = answer(Ask("llama-3.1-8b", pool(), pool(), load, Slo(0.6, 0.03), "slow", mine), changes=False)
    assert "network: NICs of prefill are of 100 Gbit/s, ports of 64 ports of 400G of 25" in plan.problems[0]


def test_conversion_is_decided_by_the_planner_of_layouts() -> None:
    narrow = answer(ask(decode=pool(kv="fp8_e4m3,page=64")), changes=False)
    assert narrow.network.path == "CONVERT"
    assert narrow.network.wire_token_bytes == 65_536
    assert (narrow.network.prefill_token_bytes, narrow.network.decode_token_bytes) == (131_072, 65_536)
    assert narrow.network.conversion_s.value > 0.0
    assert "CPU" in narrow.network.conversion_source or "cores" in narrow.network.conversion_source
    blocks = [pool(kv=f"fp8_e4m3,page=64,scale=block,block={n}") for n in (64, 128)]
    with pytest.raises(Refused, match="must not span several of prefill's"):
        answer(ask(prefill=blocks[0], decode=blocks[1]))


def test_given_rates_fit_the_efficiency() -> None:
    plan = answer(ask(points=(Point(1000, 9000.0), Point(8000, 8000.0))), changes=False)
    assert plan.fit is not None
    assert plan.ask.prefill.compute == plan.fit.fitted
    with pytest.raises(Refused, match=r"ask for \d+% of the peak rate of 2 x Card: give the part"):
        answer(ask(points=(Point(1000, 90_000.0),)))


def test_decode_takes_short_prompts_where_it_has_time() -> None:
    long_tail = of_lengths(Lengths(1000, 6000), Lengths(100), 100.0)
    spare = answer(ask(workload=long_tail, prefill=pool(servers=18), decode=pool(servers=30)), changes=False)
    assert spare.offload.tokens > 0
    assert 0.0 < spare.offload.share < 1.0
    none = answer(ask(rate=100.0, prefill=pool(servers=200), decode=pool(servers=4)), changes=False)
    assert none.offload.tokens == 0.0
    assert "nothing to spare" in none.offload.why


def test_sparse_attention_reads_what_it_picks() -> None:
    held = kept(load_named("fp8_e4m3,page=64", "glm-5.2"), "glm-5.2", 1)
    latent, keys = 78 * 576, 21 * 128
    assert held.token == latent + keys == 47_616
    assert list(held.read(np.array([1000.0, 100_000.0]))) == [1000 * 47_616, 2048 * latent + 100_000 * keys]
    dense = kept(load_named("bf16", "llama-3.1-8b"), "llama-3.1-8b", 2)
    assert list(dense.read(np.array([10.0]))) == list(dense.bytes(np.array([10.0]))) == [10 * 131_072 * 2]
    mixed = kept(load_named("bf16", "gemma-3-4b"), "gemma-3-4b", 1)
    assert mixed.read(np.array([1e6]))[0] < 0.3 * mixed.bytes(np.array([1e6]))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": Pool("mtt-s500")}, "prefill.device: no 'mtt-s500' in the catalogue; did you mean 'mtt-s5000'"),
        ({"decode": pool(nic="4g")}, "decode.nic: no '4g' in the catalogue; "),
        ({"prefill": pool(servers=-1)}, "prefill.servers -1: give 1 to"),
        ({"prefill": pool(weight_bits=float("nan"))}, "prefill.weight_bits nan"),
        ({"decode": pool(compute=exactly(1.5))}, "decode.compute: an efficiency"),
        ({"decode": pool(reserve=1.0)}, "decode.reserve 1"),
        ({"decode": pool(overhead_s=-1.0)}, "decode: overheads are seconds"),
        ({"slo": Slo(0.0, 0.1)}, "TTFT 0 s"),
        ({"slo": Slo(1.0, 0.1, 1.0)}, r"slo.share 1"),
        ({"switch": "1x1"}, "switch: no '1x1'"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
        ({"total_b": -1.0}, "total_b -1"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_its_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(**change)


def test_a_model_of_unknown_size_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"no size of 'kimi-k2'.*--parameters TOTAL:ACTIVE"):
        answer(ask(model="kimi-k2"))
    own = answer(ask(model="qwen3-8b", total_b=8.2, active_b=7.6), changes=False)
    assert own.prefill.memory.weights == pytest.approx(16.4e9)


def test_what_if_changes_one_thing() -> None:
    plan = answer(ask(prefill=pool(servers=6), decode=pool(servers=2)))
    rows = {row.change: row for row in plan.what_if}
    assert {
        "half the rate",
        "twice the rate",
        "hit rate 10%",
        "KV in FP8 on both sides",
        "one prefill server less",
        "one decode server more",
    } <= set(rows)
    assert rows["one prefill server less"].prefill == 5
    assert rows["twice the rate"].note.startswith("asks for 7 + ")
    assert rows["hit rate 10%"].most > plan.most.value


def test_another_hit_rate_scales_what_is_computed() -> None:
    load = Workload("t", np.array([100.0, 200.0]), np.array([80.0, 0.0]), np.ones(2), np.array([0.5, 0.5]), 1.0)
    assert with_hit(load, 0.5).hit == pytest.approx(0.5)
    assert list(with_hit(load, 0.0).cached) == [0.0, 0.0]


def spread(plan: Plan) -> float:
    return plan.ttft.p99.value - plan.ttft.p50.value


def test_unlike_prompts_and_bursts_wait_longer() -> None:
    even = answer(ask(rate=30.0, prefill=pool(servers=6)), changes=False)
    uneven = answer(
        ask(workload=of_lengths(Lengths(1000, 8000), Lengths(100), 30.0), prefill=pool(servers=6)), changes=False
    )
    bursts = answer(ask(workload=replace(ask(30.0).workload, arrival_cv2=8.0), prefill=pool(servers=6)), changes=False)
    assert spread(even) < spread(uneven)
    assert even.ttft.mean.value < bursts.ttft.mean.value


@QUICK
@given(
    rate=st.sampled_from([0.5, 20.0, 400.0]), hit=st.sampled_from([0.0, 0.9]), given_=st.tuples(st.integers(0, 30), st.integers(0, 8)),
    slo=st.builds(Slo, st.sampled_from([0.1, 1.0, 30.0]), st.sampled_from([0.011, 0.03, 0.1]), st.sampled_from([0.5, 0.99])),
    memory_gb=st.sampled_from([12.0, 50.0]), wide=st.booleans(),
)  # fmt: skip
def test_a_plan_fits_where_its_servers_hold(
    rate: float, hit: float, given_: tuple[int, int], slo: Slo, memory_gb: float, *, wide: bool
) -> None:
    load = of_lengths(Lengths(4000, 30_000 if wide else 0), Lengths(200), rate, hit=hit)
    question = ask(
        memory_gb=memory_gb, workload=load, slo=slo, prefill=pool(servers=given_[0]), decode=pool(servers=given_[1])
    )
    try:
        found = facts(question)
    except Refused:
        return
    with_ = shape(found)
    answered = plan(found, with_)
    assert State(found, with_, rate, "value").holds() == (
        not [p for p in answered.problems if not p.startswith("network: ")]
    )
    assert not answered.fits or answered.most.value >= rate * 0.999

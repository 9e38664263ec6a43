"""The article's deployment, questioned: figures worked out apart, by hand, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.sim.claims import Claim, context_of, hit_at, implied_hits, question
from regauge.sim.devices import shipped
from regauge.sim.model import Interval, Point, exactly, fit_efficiency
from regauge.sim.work import Term, Work, model_work

POINTS = (Point(65_536, 95_920.5), Point(300_000, 58_412.0))
CLAIM = Claim("the article", "mtt-s5000", 12, "h200", 1, "128x400g", POINTS)
GLM = model_work("glm-5.2", 39.3e9)

EXPECTED = {
    # model: efficiency at 64K and 300K without hits, at 90 %; FP8 bytes of a token; worked out apart, from the models' configs
    "glm-5": (1.47, 1.44, 0.170, 0.207, 61_464),
    "glm-5.2": (1.28, 0.93, 0.134, 0.109, 53_940),
    "deepseek-v3.2": (1.69, 1.88, 0.20, 0.29, 48_068),
    "deepseek-v3": (2.8, 6.0, 0.46, 1.09, 35_136),
    "glm-4.5": (2.5, 5.4, 0.41, 0.99, 188_416),
    "glm-4.5-air": (1.2, 2.7, 0.20, 0.49, 94_208),
    "minimax-m2": (0.83, 1.81, 0.14, 0.33, 126_976),
}


@pytest.mark.parametrize("key", EXPECTED)
def test_efficiencies_and_bytes_worked_out_apart(key: str) -> None:
    found = question(CLAIM, shipped(), [key]).candidates[0]
    none, most = (f.efficiency.at for f in found.fits)
    *etas, nbytes = EXPECTED[key]
    assert (*none, *most) == pytest.approx(etas, rel=0.03)
    assert found.layouts[0].token_bytes == nbytes


def test_the_network_and_the_memory_by_hand() -> None:
    found = question(CLAIM, shipped(), ["glm-5.2"])
    assert (found.ports, found.ports_of, found.incast) == (104, 128, 12.0)
    candidate = found.candidates[0]
    traffic = candidate.layouts[0].traffic[0]
    egress = 95_920.5 * 53_940
    assert traffic.egress == pytest.approx(egress)
    assert traffic.line_load == pytest.approx(12 * egress / 400e9)
    assert traffic.line_load == pytest.approx(0.155, abs=5e-4)
    assert traffic.requests_per_s == pytest.approx(12 * 95_920.5 / 65_536)
    crossing = 65_536 * 53_940 / (50e9 * 0.82)
    assert traffic.residents.value == pytest.approx(traffic.requests_per_s * (440 * 0.03 + crossing))
    assert traffic.resident_bytes.value == pytest.approx(traffic.residents.value * 65_536 * 53_940)
    assert dict(candidate.room)["FP8"] == pytest.approx(8 * 141e9 - 744e9)
    assert traffic.resident_bytes.value > dict(candidate.room)["FP8"]  # decode's memory binds before the network


def test_16_bit_grouped_query_kv_overloads_decode() -> None:
    found = question(CLAIM, shipped(), ["glm-4.5"]).candidates[0]
    loads = {layout.dtype: layout.traffic[0].line_load for layout in found.layouts}
    assert loads["BF16"] == pytest.approx(1.08, abs=0.01)
    assert loads["FP8"] == pytest.approx(0.54, abs=0.01)
    assert any(
        "BF16 KV at 65,536 tokens asks for 108% of decode's line rate: impossible" in s for s in found.statements
    )


def test_what_is_over_a_limit_is_said() -> None:
    found = question(CLAIM, shipped(), ["glm-5.2", "deepseek-v3"])
    said = found.candidates[0].statements
    assert said[0].startswith("95,920.5 tokens/s at 65,536 tokens with 0% cached asks for 127% of the peak: impossible")
    assert "FP8 weights are 744 GB, over the 640 GB of a prefill server: an instance spans 2 or more" in said
    assert found.candidates[0].weights[1].prefill_servers == 1  # 4-bit
    assert found.candidates[1].implied is None
    assert "no cached share fits every rate within 15% at an efficiency of 0.1 to 0.6" in found.candidates[1].statements


def test_the_implied_hit_share_fits_and_its_neighbours_do_not() -> None:
    low, high = implied_hits(GLM, POINTS, 8e15) or (0.0, 0.0)
    assert low < 0.9 < high  # what the published revenue implies

    def fits(hit: float) -> bool:
        fit = fit_efficiency(GLM, [Point(p.tokens, p.tokens_per_s, hit) for p in POINTS], 8e15)
        return 0.1 <= fit.fitted.value <= 0.6 and max(abs(r) for r in fit.residuals) <= 0.15

    assert fits(low)
    assert fits(high)
    assert not fits(low - 0.001)
    assert not fits(high + 0.001)


@given(st.floats(0.05, 0.9), st.floats(0.05, 0.95))
@settings(max_examples=30)
def test_a_hit_share_is_found_again(efficiency: float, hit: float) -> None:
    work = Work(2e10, (Term("attention", 1e4),))
    points = [Point(n, n / (work.operations(round(n * hit), n) / (8e15 * efficiency))) for n in (65_536, 300_000)]
    assert hit_at(work, points, 8e15, efficiency) == pytest.approx(hit, abs=2e-4)


def test_a_rate_that_needs_no_hits_has_no_hit_share() -> None:
    assert hit_at(GLM, [Point(65_536, 100.0)], 8e15, 0.3) is None


def test_a_mixed_rate_lies_at_a_mean_context() -> None:
    found = context_of(83_670.0, POINTS)
    assert found == pytest.approx(119_000, rel=0.01)
    assert context_of(95_920.5, POINTS) == 65_536
    assert context_of(58_412.0, POINTS) == pytest.approx(300_000)


def test_more_decode_servers_share_the_load() -> None:
    one, two = (
        question(replace(CLAIM, decode_servers=n), shipped(), ["glm-5.2"]).candidates[0].layouts[0].traffic[0]
        for n in (1, 2)
    )
    assert two.line_load == pytest.approx(one.line_load / 2)
    assert two.resident_bytes.value == pytest.approx(one.resident_bytes.value / 2)


def test_a_range_of_output_is_carried() -> None:
    claim = replace(CLAIM, output=Interval(100.0, 440.0, 1000.0))
    found = question(claim, shipped(), ["glm-5.2"]).candidates[0].layouts[0].traffic[0]
    assert found.residents.low < found.residents.value < found.residents.high


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefill: no 'mtt-s500'.*did you mean 'mtt-s5000'"):
        question(replace(CLAIM, prefill="mtt-s500"), shipped(), ["glm-5.2"])
    with pytest.raises(ConfigError, match=r"model: no 'glm-5\.9' in the catalogue; did you mean"):
        question(CLAIM, shipped(), ["glm-5.9"])
    with pytest.raises(ConfigError, match="no fp8_tflops"):
        question(replace(CLAIM, prefill="ascend-910b"), shipped(), ["glm-5.2"])
    with pytest.raises(ConfigError, match="hits: 1"):
        replace(CLAIM, hits=(1.0,))
    with pytest.raises(ConfigError, match="points: 65536 tokens at -5/s"):
        replace(CLAIM, points=(Point(65_536, -5.0),))
    with pytest.raises(ConfigError, match="points: give one"):
        replace(CLAIM, points=())
    with pytest.raises(ConfigError, match="decode_servers 0"):
        replace(CLAIM, decode_servers=0)
    with pytest.raises(ConfigError, match="output: must be positive"):
        replace(CLAIM, output=exactly(0.0))
    with pytest.raises(ConfigError, match="efficiency 0"):
        hit_at(GLM, POINTS, 8e15, 0.0)
    with pytest.raises(ConfigError, match="mixed rate"):
        context_of(1.0, (POINTS[0], POINTS[0]))

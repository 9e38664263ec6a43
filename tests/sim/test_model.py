"""Times in closed form, fits of points that the model made, and the article's figures."""

from __future__ import annotations

import numpy as np
import pytest

from regauge.errors import ConfigError
from regauge.sim.curves import Measured
from regauge.sim.devices import Curves, Figure, load
from regauge.sim.model import (
    Interval,
    Machine,
    Point,
    Weights,
    decode_seconds,
    exactly,
    fit_efficiency,
    machine,
    of,
    prefill_seconds,
)
from regauge.sim.work import Term, Work, model_work

WORK = Work(2e9, (Term("attention", 1e3),))


def test_interval_arithmetic_bounds_every_choice() -> None:
    a, b = Interval(1, 2, 3), Interval(4, 5, 8)
    rng = np.random.default_rng(3)
    x, y = rng.uniform(1, 3, 1000), rng.uniform(4, 8, 1000)
    for found, drawn in ((a + b, x + y), (a * b, x * y), (a / b, x / y)):
        assert found.low <= drawn.min()
        assert drawn.max() <= found.high
    assert (a / b).value == 0.4
    with pytest.raises(ConfigError, match="low <= value"):
        Interval(2, 1, 3)


def test_a_figure_s_range_is_carried() -> None:
    figure = Figure(1000, "press", "2026", low=920)
    assert of(figure, 1e12) == Interval(920e12, 1000e12, 1000e12)
    half = Machine(of(figure, 1e9), exactly(1e12), exactly(0.5), exactly(0.5), overhead=0.25)
    seconds = prefill_seconds(WORK, 0, 1000, half)
    operations = 2e9 * 1000 + 1e3 * 1000 * 999 / 2
    assert seconds.value == pytest.approx(0.25 + operations / 500e9)
    assert seconds.high == pytest.approx(0.25 + operations / 460e9)


def test_an_efficiency_is_found_again() -> None:
    points = [
        Point(n, n / (WORK.operations(round(h * n), n) / (1e15 * 0.31)), h) for n, h in ((1000, 0.0), (64_000, 0.9))
    ]
    found = fit_efficiency(WORK, points, 1e15)
    assert found.fitted.value == pytest.approx(0.31)
    assert found.residuals == pytest.approx((0.0, 0.0), abs=1e-9)
    assert not found.impossible


def test_the_best_efficiency_has_the_least_squares() -> None:
    found = fit_efficiency(WORK, [Point(1000, 9e3), Point(64_000, 5e3), Point(200_000, 6e3)], 1e15)
    tried = np.linspace(found.fitted.low, found.fitted.high, 2001)
    errors = [(sum((eta / x - 1) ** 2 for x in found.at), eta) for eta in tried]
    assert found.fitted.value == pytest.approx(min(errors)[1], rel=1e-3)


def test_the_article_counts_cached_tokens() -> None:
    """GLM-5.2 on 8 cards of 1 PFLOPS: over the peak without hits, and at 90 % one constant fits both figures within 12 %."""
    work = model_work("glm-5.2", 39.3e9)
    claims = ((65_536, 95_920.5), (300_000, 58_412.0))
    assert fit_efficiency(work, [Point(n, r) for n, r in claims], 8e15).impossible == (0,)
    found = fit_efficiency(work, [Point(n, r, 0.9) for n, r in claims], 8e15)
    assert found.at == pytest.approx((0.134, 0.109), rel=0.02)
    assert max(abs(r) for r in found.residuals) < 0.12


def test_weights_read_are_the_distinct_experts_of_draws() -> None:
    rng, experts = np.random.default_rng(11), 64
    counts = [len(np.unique(rng.integers(0, experts, 100))) for _ in range(4000)]
    assert Weights(64.0, 1.0).read(100) == pytest.approx(np.mean(counts), rel=0.01)
    assert Weights(70.0, 70.0).read(9) == 70.0


def test_a_decode_step_is_bound_by_memory_or_by_compute() -> None:
    weights = Weights(8e9, 8e9)
    half = exactly(0.5)
    on = Machine(exactly(1e18), exactly(1e12), half, half)
    slow_memory = decode_seconds(WORK, weights, on, batch=4, context=1000, token_bytes=1e5)
    assert slow_memory.value == pytest.approx((8e9 + 4 * 1000 * 1e5) / 0.5e12)
    on = Machine(exactly(1e12), exactly(1e18), half, half, step_overhead=1.0)
    slow_compute = decode_seconds(WORK, weights, on, batch=4, context=1000, token_bytes=1e5)
    assert slow_compute.value == pytest.approx(1.0 + 4 * (2e9 + 1e3 * 1000) / 0.5e12)


def test_measured_curves_stand_in_place_of_the_roofline() -> None:
    prefill, decode = Measured(((1000, 1.0), (2000, 1.5))), Measured(((4000, 0.02), (8000, 0.03)))
    one = exactly(1.0)
    on = Machine(one, one, one, one, measured=Curves(prefill, decode))
    assert prefill_seconds(WORK, 0, 2000, on) == exactly(1.5)
    assert prefill_seconds(WORK, 1000, 2000, on) == exactly(1.0)  # half a second of tokens, half of the fixed part
    assert decode_seconds(WORK, Weights(1.0, 1.0), on, batch=6, context=1000, token_bytes=1.0).value == pytest.approx(
        0.025
    )


def test_a_machine_of_the_catalogue() -> None:
    cards = load().accelerators
    found = machine(cards["mtt-s5000"], 8, fp8=True, compute=exactly(0.3), memory=exactly(0.6))
    assert found.rate == Interval(7.36e15, 8e15, 8e15)
    assert found.bandwidth == exactly(12.8e12)
    with pytest.raises(ConfigError, match=r"MTT S5000: no bf16_tflops"):
        machine(cards["mtt-s5000"], 8, fp8=False, compute=exactly(0.3), memory=exactly(0.6))
    with pytest.raises(ConfigError, match="cards"):
        machine(cards["mtt-s5000"], 0, fp8=True, compute=exactly(0.3), memory=exactly(0.6))


@pytest.mark.parametrize("point", [Point(0, 1.0), Point(5, -1.0), Point(5, 1.0, 1.0)])
def test_points_that_are_none_are_refused(point: Point) -> None:
    with pytest.raises(ConfigError, match="hit"):
        fit_efficiency(WORK, [point], 1e15)
    with pytest.raises(ConfigError, match="batch"):
        Weights(1.0, 1.0).read(0)

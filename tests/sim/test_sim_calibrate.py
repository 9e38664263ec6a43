"""Calibration's arithmetic, on times whose truth is known."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.sim.calibrate import (
    Batch,
    Beside,
    Pace,
    Prompt,
    PromptTimes,
    StepTimes,
    beside,
    cuts,
    latency,
    prompt_times,
    step_times,
    under_load,
)
from regauge.sim.curves import Measured

TRUE = PromptTimes(Measured(((16, 0.1), (64, 0.2), (256, 0.7))), 2e-6, 256)
STEPS = StepTimes(((1, 0.06), (2, 0.09), (4, 0.11)), 1e-5)


def _prompt(tokens: int, cached: int = 0, factor: float = 1.0) -> Prompt:
    return Prompt(tokens, cached, factor * TRUE(tokens - cached, cached))


def _batch(batch: int, resident: float, factor: float = 1.0) -> Batch:
    return Batch(batch, resident, factor * STEPS(batch, resident))


@given(st.integers(0, 2000), st.integers(1, 2000), st.integers(1, 300))
def test_chunks_cover_the_tokens_and_are_cut_where_the_engine_cuts(first: int, more: int, chunk: int) -> None:
    found = cuts(first, first + more, chunk)
    assert found[0][0] == first
    assert found[-1][1] == first + more
    assert all(a[1] == b[0] and a[1] % chunk == 0 for a, b in itertools.pairwise(found))
    assert all(0 < stop - start <= chunk for start, stop in found)


def test_prompts_that_follow_the_model_are_found_again() -> None:
    samples = [_prompt(n) for n in (16, 64, 256, 700, 1024)] + [_prompt(900, 512)]
    found = prompt_times(samples, 256)
    assert found.curve == TRUE.curve
    assert found.pair_s == pytest.approx(2e-6)
    assert max(map(abs, found.residuals)) < 1e-9
    assert found(1000, 128) == pytest.approx(TRUE(1000, 128))


def test_one_slow_measurement_moves_no_median() -> None:
    samples = [_prompt(n) for n in (16, 64, 256) for _ in range(3)] + [_prompt(64, factor=5.0)]
    assert prompt_times(samples, 256).curve == TRUE.curve


def test_two_prompts_in_one_step_pay_its_fixed_part_once() -> None:
    assert TRUE.step([(0, 32), (0, 32)]) == pytest.approx(TRUE(64, 0))
    assert TRUE.step([(0, 32), (0, 32)]) < 2 * TRUE(32, 0)


@given(st.randoms(use_true_random=False))
def test_steps_that_follow_the_model_are_found_again(rng: random.Random) -> None:
    samples = [
        _batch(b, b * context) for b in (1, 2, 4) for context in (rng.randrange(1, 200), rng.randrange(300, 2000))
    ]
    found = step_times(samples)
    assert found.token_s == pytest.approx(1e-5, rel=1e-3)
    assert found(2, 500) == pytest.approx(STEPS(2, 500))
    assert found(3, 0) == pytest.approx(0.10)


def test_steps_of_one_context_have_no_constant_below_zero() -> None:
    found = step_times([Batch(1, 1000, 0.05), Batch(1, 100, 0.06)])
    assert found.token_s == 0.0
    assert 0.05 < found(1, 500) < 0.06


@given(st.floats(1.0, 3.0), st.floats(1.0, 3.0), st.floats(0.2, 1.0))
def test_factors_of_shared_cores_are_found_again(prompt: float, step: float, share: float) -> None:
    prompts = [_prompt(256, factor=prompt), _prompt(700, 128, factor=prompt)]
    steps = [(_batch(2, 300, 1 + (step - 1) * share), share)]
    found = beside(prompts, TRUE, steps, STEPS)
    assert (found.prompt, found.step) == (pytest.approx(prompt), pytest.approx(step))


def test_a_factor_below_one_is_noise() -> None:
    assert beside([_prompt(256, factor=0.9)], TRUE, [(_batch(1, 10, 0.9), 1.0)], STEPS) == Beside(1.0, 1.0)


def test_latency_is_what_computing_leaves() -> None:
    found = latency([(n, 0.02 + 1e-5 * n + 0.5, 0.5) for n in (16, 256, 1024)])
    assert found(512) == pytest.approx(0.02 + 1e-5 * 512)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: prompt_times([_prompt(16), _prompt(64)], 256), "chunk of 256"),
        (lambda: prompt_times([Prompt(16, 16, 1.0)], 16), "no measured prompt"),
        (lambda: prompt_times([Prompt(16, 0, math.nan)], 16), "no measured prompt"),
        (lambda: step_times([]), "none was measured"),
        (lambda: step_times([Batch(0, 0, 1.0)]), "no measured step"),
        (lambda: beside([], TRUE, [], STEPS), "while others decode"),
        (lambda: beside([_prompt(16)], TRUE, [(_batch(1, 1), 0.0)], STEPS), "share of 0"),
        (lambda: latency([(16, 0.1, 0.2)]), "longer than the computing"),
        (lambda: Beside(0.5, 1.0), "factors of 1 or more"),
    ],
)
def test_nonsense_is_refused(wrong: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wrong()  # type: ignore[operator]


def test_slowed_times_keep_their_shape() -> None:
    assert TRUE.slowed(1.5)(900, 128) == pytest.approx(1.5 * TRUE(900, 128))
    assert STEPS.slowed(0.5)(3, 700) == pytest.approx(0.5 * STEPS(3, 700))


_FACTOR = st.floats(0.4, 3.0)


@given(_FACTOR, _FACTOR, st.floats(0.1, 10.0), st.floats(0.7, 2.0))
def test_the_pace_of_a_load_is_found_again(prompt: float, step: float, scale: float, power: float) -> None:
    """Times grow faster than the factor where requests queue, and first tokens wait a little for steps."""

    def load(pace: Pace) -> Pace:
        return Pace(scale * pace.prompt**power * pace.step**0.1, 0.1 * pace.step * pace.prompt**0.1)

    true = Pace(prompt, step)
    found = under_load(load(true), load)
    assert (found.prompt, found.step) == (pytest.approx(prompt, rel=0.03), pytest.approx(step, rel=0.03))


def test_a_load_that_does_not_follow_its_factors_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"misses the real one by 100%; is the machine busy\?"):
        under_load(Pace(2.0, 1.0), lambda _: Pace())


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_a_pace_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="give numbers above 0"):
        Pace(1.0, wrong)

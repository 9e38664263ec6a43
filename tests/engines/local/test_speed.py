"""Measured speeds: means over what was computed, not over time that passed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.engines.local.speed import Speed, Work


def test_nothing_is_known_at_first() -> None:
    speed = Speed()
    assert (speed.prefill_tokens_per_s, speed.tpot_s) == (0, 0)
    speed.add(Work(), 1.0)
    assert (speed.prefill_tokens_per_s, speed.tpot_s) == (0, 0)


def test_whoever_waits_for_a_turn_waits_longer() -> None:
    speed = Speed()
    for _ in range(10):
        speed.add(Work(decoded=4, decoding=12), 0.02)
    assert speed.tpot_s == pytest.approx(0.06)


def test_what_is_long_ago_counts_little() -> None:
    speed = Speed(memory_s=1.0)
    for _ in range(100):
        speed.add(Work(prompt_tokens=100), 0.1)
    for _ in range(100):
        speed.add(Work(prompt_tokens=20), 0.1)
    assert speed.prefill_tokens_per_s == pytest.approx(200, rel=1e-3)


WORK = st.builds(Work, st.integers(0, 512), st.integers(0, 32), st.integers(32, 64))


@given(st.lists(st.tuples(WORK, st.floats(1e-4, 5)), min_size=1, max_size=60))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_a_mean_lies_among_the_steps(steps: list[tuple[Work, float]]) -> None:
    speed = Speed()
    for work, seconds in steps:
        speed.add(work, seconds)
    for found, each in (
        (speed.prefill_tokens_per_s, [w.prompt_tokens / s for w, s in steps if w.prompt_tokens]),
        (speed.tpot_s, [s * w.decoding / w.decoded for w, s in steps if w.decoded]),
    ):
        if each:
            assert min(each) * 0.999 <= found <= max(each) * 1.001
        else:
            assert found == 0


def test_what_is_faded_is_soon_outweighed() -> None:
    speed = Speed()
    speed.add(Work(prompt_tokens=100, decoded=1, decoding=1), 1.0)
    before = speed.prefill_tokens_per_s, speed.tpot_s
    speed.fade(0.1)
    assert (speed.prefill_tokens_per_s, speed.tpot_s) == pytest.approx(before)
    speed.add(Work(prompt_tokens=1000, decoded=10, decoding=1), 1.0)
    assert speed.prefill_tokens_per_s > 900

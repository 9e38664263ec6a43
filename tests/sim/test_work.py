"""Operations against sums over every token, and against figures worked out apart; bytes against the presets'."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.layout.presets import load_named
from regauge.sim.devices import load
from regauge.sim.work import Term, kv_bytes, model_work


@given(st.integers(0, 900), st.integers(0, 900), st.integers(0, 400))
def test_a_term_is_the_sum_over_tokens(first: int, more: int, most: int) -> None:
    positions = np.arange(first, first + more)
    attended = np.minimum(positions, most) if most else positions
    assert Term("x", 3.0, most).operations(first, first + more) == 3.0 * attended.sum()


@pytest.mark.parametrize(
    ("name", "at_64k", "at_300k"),
    [("deepseek-v3", 235, 821), ("deepseek-v3.2", 141, 258), ("glm-5.2", 107, 127), ("glm-5", 123, 198),
     ("glm-4.5-air", 98, 364), ("glm-4.5", 212, 742), ("minimax-m2", 69, 248), ("qwen3.5-397b-a17b", 41, 99)],
)  # fmt: skip
def test_operations_per_token_worked_out_apart(name: str, at_64k: float, at_300k: float) -> None:
    size = load().models[name].active_b
    assert size is not None
    work = model_work(name, size.value * 1e9)
    for tokens, expected in ((65_536, at_64k), (300_000, at_300k)):
        assert work.operations(0, tokens) / tokens / 1e9 == pytest.approx(expected, rel=0.02)


def test_dense_latent_by_hand() -> None:
    work = model_work("deepseek-v3", 1e9)
    assert work.operations(100, 101) == 2e9 + 61 * 128 * 2 * (128 + 64 + 128) * 100
    assert work.attention(100, 101) == work.operations(100, 101) - 2e9


def test_cached_tokens_are_not_computed() -> None:
    work = model_work("glm-5.2", 39.3e9)
    parts = work.operations(0, 50_000) + work.operations(50_000, 64_000)
    assert parts == pytest.approx(work.operations(0, 64_000), rel=1e-12)


def test_recurrent_state_counts_once() -> None:
    layout = load_named("bf16", "kimi-linear-48b-a3b")
    assert kv_bytes(layout, 0) == 43_417_600
    assert kv_bytes(layout, 1000) == 43_417_600 + 8_064_000
    assert kv_bytes(load_named("fp8_e4m3", "glm-5.2"), 1) == 47_616


def test_nonsense_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="active"):
        model_work("glm-5.2", -1.0)
    with pytest.raises(ConfigError, match="cached"):
        model_work("glm-5.2", 1e9).operations(5, 4)

"""The network as M/G/1-PS, SRPT and M/D/1 queues: means within what chance allows; `bench/fluid.py` has more arrivals."""

from __future__ import annotations

import numpy as np
import pytest
from queue_theory import SIZES, expected, grid, measure

CASES = [
    ("ps", 0.5, "exponential"), ("ps", 0.7, "deterministic"), ("ps", 0.5, "heavy-tailed"),
    ("srpt", 0.7, "exponential"), ("srpt", 0.7, "heavy-tailed"), ("fifo", 0.5, "deterministic"),
]  # fmt: skip


@pytest.mark.parametrize(("order", "load", "sizes"), CASES)
def test_a_port_is_the_queue_that_theory_says(order: str, load: float, sizes: str) -> None:
    found = measure(order, load, sizes, arrivals=40_000)
    assert found.error < 0.02 * found.mean
    assert found.mean == pytest.approx(expected(order, load, sizes), abs=4 * found.error)


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_have_mean_1(sizes: str) -> None:
    assert np.mean(grid(SIZES[sizes])) == pytest.approx(1.0, rel=1e-3)

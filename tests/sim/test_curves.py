"""Fits of points that a polynomial made, of noise, and curves of measured points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.sim.curves import Measured, Polynomial, fit, read_measured

coefficient = st.floats(0.01, 10.0)


@given(coefficient, coefficient, coefficient)
def test_a_polynomial_is_found_again(fixed: float, linear: float, square: float) -> None:
    curve = Polynomial(fixed, linear * 1e-4, square * 1e-9)
    found = fit([(x, curve(x)) for x in (1_000, 8_000, 32_000, 128_000)])
    assert found.worst() < 1e-6
    assert found.curve(64_000) == pytest.approx(curve(64_000), rel=1e-6)


def test_least_squares_of_relative_errors() -> None:
    xs, ys = np.array([1.0, 2.0, 3.0, 5.0]), np.array([3.1, 4.9, 7.2, 10.8])
    design = np.stack([np.ones(4), xs], axis=1) / ys[:, None]
    expected = np.linalg.solve(design.T @ design, design.T @ np.ones(4))
    found = fit(list(zip(xs, ys, strict=True)), degree=1)
    assert (found.curve.fixed, found.curve.linear) == pytest.approx(tuple(expected))
    assert found.residuals == pytest.approx(tuple(design @ expected - 1.0))


def test_coefficients_are_never_negative() -> None:
    found = fit([(1.0, 1.0), (2.0, 4.0), (3.0, 9.0), (4.0, 17.0)])  # bends upwards from below 0
    assert min(found.curve.fixed, found.curve.linear, found.curve.square) >= 0.0
    assert found.worst() < 0.1


@pytest.mark.parametrize("points", [[(1.0, 1.0)], [(1.0, 0.0), (2.0, 1.0), (3.0, 1.0)], [(1.0, float("nan"))] * 3])
def test_points_that_fit_nothing_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigError, match="points"):
        fit(points)


def test_measured_points_are_joined_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "prefill.csv"
    path.write_text("tokens,seconds,other\n1000,1.0,x\n2000,3.0,x\n4000,4.0,x\n")
    curve = read_measured(path, value="seconds")
    assert curve == Measured(((1000, 1.0), (2000, 3.0), (4000, 4.0)))
    assert [curve(x) for x in (1000, 1500, 2000, 3000, 6000, 100)] == [1.0, 2.0, 3.0, 3.5, 5.0, 0.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens\n1\n", ":1: no column seconds"),
        ("tokens,seconds\n1,1\n2,x\n", ":3: tokens and seconds are numbers"),
        ("tokens,seconds\n1,-1\n", ":2: tokens and seconds are finite"),
        ("tokens,seconds\n1,1\n2\n", ":3: tokens and seconds are numbers"),
        ("tokens,seconds\n2,1\n1,1\n", "ascending"),
        ("tokens,seconds\n2,1\n", "2 to"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_measured(path, value="seconds")

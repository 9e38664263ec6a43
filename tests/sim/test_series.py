"""A run over time: against counting each request at each point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_logs import DONE, LATE, NO_ROOM, log, random_log

from regauge.sim import series
from regauge.sim.log import Log

seeds = st.integers(0, 1000)


def counted(log: Log, at: float, begin: str, end: str) -> list[int]:
    rows = zip(getattr(log, begin), getattr(log, end), log.ended, strict=True)
    return [i for i, (b, e, over) in enumerate(rows) if b <= at and not (e if e == e else over) <= at]


@given(seeds, st.integers(1, 40))
def test_what_waits_and_is_computed_is_what_counting_finds(seed: int, count: int) -> None:
    made = random_log(seed, count)
    points = np.linspace(-1, 130, 57)
    assert series.waiting(made, points).tolist() == [len(counted(made, at, "at", "began")) for at in points]
    assert series.computing(made, points).tolist() == [len(counted(made, at, "began", "computed")) for at in points]
    tokens = made.prompt + made.output
    held = [sum(tokens[i] for i in counted(made, at, "seated", "ended")) for at in points]
    assert series.resident(made, points).tolist() == held
    assert sum(series.resident(made, points, worker) for worker in range(4)).tolist() == held


@given(seeds, st.integers(1, 40), st.integers(2, 50))
def test_all_bytes_arrive_once(seed: int, count: int, edges: int) -> None:
    made = random_log(seed, count)
    points = np.linspace(-1, 150, edges)
    crossed = series.inflow(made, points) * np.diff(points)
    assert crossed.sum() == pytest.approx(made.nbytes.sum(), rel=1e-9, abs=1.0)
    assert (crossed >= -1.0).all()
    mine = made.decode == 2
    assert (series.inflow(made, points, 2) * np.diff(points)).sum() == pytest.approx(made.nbytes[mine].sum(), abs=1.0)


def test_one_transfer_is_a_block() -> None:
    found = series.inflow(log(DONE, NO_ROOM), np.array([0.0, 1.0, 1.5, 2.5, 3.0]))
    assert found == pytest.approx([0.0, 4e8, 4e8, 0.0])  # 6e8 bytes from 1.0 to 2.5


def test_points_reach_from_the_first_arrival_to_the_last_end() -> None:
    points = series.span(log(DONE, LATE), 5)
    assert (points[0], points[-1], len(points)) == (0.0, 21.0, 5)
    assert len(series.span(log())) == 0
    assert series.span(log(DONE, LATE), share=0.5)[-1] == (3.5 + 21.0) / 2

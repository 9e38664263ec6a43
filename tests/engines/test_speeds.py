"""Measuring an engine: every point once a round, medians, spreads, and the CSV that the catalogue reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from regauge.engines.speeds import Grid, Step, Timed, measure, off, table
from regauge.errors import ConfigError
from regauge.sim.curves import read_measured

GRID = Grid(prompts=(10, 20), batches=(1, 4), contexts=(8, 32), rounds=3, steps=2)


class _Known:
    """An engine whose times are known; what it is first asked is much slower."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, int]] = Counter()

    async def prefill(self, tokens: int) -> float:
        return self._time(0, tokens, tokens / 100)

    async def decode(self, batch: int, context: int, steps: int) -> Step:
        return Step(self._time(batch, context, 0.01 * batch), batch * (context + 1 + steps / 2))

    def _time(self, batch: int, tokens: int, seconds: float) -> float:
        self.asked[batch, tokens] += 1
        return 50.0 if self.asked[batch, tokens] == 1 else seconds


def test_each_point_is_measured_once_a_round_and_the_first_time_does_not_count() -> None:
    engine, told = _Known(), list[tuple[int, int]]()
    speeds = asyncio.run(measure(engine, GRID, lambda done, of: told.append((done, of))))
    assert set(engine.asked.values()) == {GRID.rounds + 1}
    assert told == [(i, 24) for i in range(1, 25)]
    assert [(p.tokens, p.seconds, p.spread) for p in speeds.prefill] == [(10, 0.1, 0.0), (20, 0.2, 0.0)]
    assert [(p.batch, p.context, p.seconds) for p in speeds.decode] == [
        (1, 8, 0.01),
        (4, 8, 0.04),
        (1, 32, 0.01),
        (4, 32, 0.04),
    ]
    assert [p.tokens for p in speeds.steps(32)] == [34, 136]


def test_a_points_time_is_the_median_and_its_spread_the_middle_half() -> None:
    point = Timed(5, (1.0, 2.0, 3.0, 4.0, 100.0))
    assert (point.seconds, point.spread) == (3.0, (4.0 - 2.0) / 3.0)


def test_the_catalogue_reads_what_is_written(tmp_path: Path) -> None:
    points = [Timed(1_234_567.0, (0.25,)), Timed(16, (0.125, 0.126, 0.127))]
    (tmp_path / "curve.csv").write_text(table(points))
    curve = read_measured(tmp_path / "curve.csv", value="seconds")
    assert curve.points == ((16, 0.126), (1_234_567, 0.25))
    assert off(points, curve) == pytest.approx(0.0)
    assert off([Timed(16, (0.252,))], curve) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": (10,)}, "prompts: give 2 to"),
        ({"prompts": (0, 10)}, "from 1 to 4,194,304"),
        ({"prompts": (20, 10)}, "prompts: give them ascending"),
        ({"batches": (2, 2)}, "batches: give them ascending"),
        ({"batches": ()}, "batches: give 1 to"),
        ({"contexts": (-1,)}, "contexts: give 1 to"),
        ({"batches": (1,), "contexts": (8,)}, "give another batch"),
        ({"rounds": 0}, "rounds: give a number from 1"),
        ({"steps": 1}, "steps: give a number from 2"),
    ],
)
def test_grids_without_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Grid(**given)

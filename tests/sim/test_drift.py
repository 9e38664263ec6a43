"""How fast computing goes over time: its arithmetic, and a shared fleet that follows it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from regauge.config import RouteConfig
from regauge.errors import ConfigError
from regauge.sim.calibrate import Beside, PromptTimes, StepTimes
from regauge.sim.cluster import Cluster
from regauge.sim.curves import Measured
from regauge.sim.drift import STEADY, Course, Drift, course
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.log import Log
from regauge.sim.shared import SharedFleet
from regauge.sim.trace import Arrival

TIMES = PromptTimes(Measured(((1, 0.05), (256, 0.7))), 1e-6, 256)
STEPS = StepTimes(((1, 0.06), (8, 0.18)), 1e-6)
BOTH = Beside(1.3, 1.6)
FAST = 1e15

_FACTOR = st.floats(0.3, 3.0)
_COURSES = st.lists(st.tuples(st.floats(0.05, 1.0), _FACTOR), min_size=1, max_size=12).map(
    lambda steps: Course(tuple(zip(np.cumsum([s for s, _ in steps]).tolist(), [f for _, f in steps], strict=True)))
)
_LOADS = st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(1, 700), st.integers(1, 9)), min_size=1, max_size=8).map(
    lambda loads: [
        Arrival(float(at), tokens, output, ())
        for at, (_, tokens, output) in zip(np.cumsum([x[0] for x in loads]), loads, strict=True)
    ]
)


def _run(arrivals: list[Arrival], drift: Drift = STEADY, times: PromptTimes = TIMES, steps: StepTimes = STEPS) -> Log:
    decode = DecodeModel(pages=10_000, page_size=16, step_s=0.06, curve=steps)
    prefill = PrefillModel(400.0, cache_blocks=1_000)
    cluster = Cluster(1, 1, prefill, decode, bytes_per_token=1.0, prefill_nic=FAST, decode_nic=FAST, block=64)
    return SharedFleet(cluster, RouteConfig(block_tokens=64), times, BOTH, drift).run(arrivals).log


def _times(log: Log) -> np.ndarray:
    return np.stack([log.began, log.computed, log.first, log.ended])


@given(_LOADS, st.lists(st.floats(0.01, 50.0), min_size=1, max_size=20, unique=True))
@settings(max_examples=40)
def test_a_course_of_ones_changes_nothing_at_all(arrivals: list[Arrival], at: list[float]) -> None:
    ones = Course(tuple((t, 1.0) for t in sorted(at)))
    assert np.array_equal(_times(_run(arrivals, Drift(ones, ones))), _times(_run(arrivals)))


@given(_LOADS, _FACTOR, _FACTOR)
@settings(max_examples=40)
def test_a_constant_course_is_slowed_constants(arrivals: list[Arrival], prompt: float, step: float) -> None:
    drift = Drift(Course(((0.0, prompt),)), Course(((0.0, step),)))
    slowed = _run(arrivals, times=TIMES.slowed(prompt), steps=STEPS.slowed(step))
    assert _times(_run(arrivals, drift)) == pytest.approx(_times(slowed), rel=1e-6)


@given(_COURSES, st.integers(1, 700), st.integers(2, 30))
@settings(max_examples=60)
def test_alone_a_request_takes_what_its_course_makes_of_its_work(with_it: Course, tokens: int, output: int) -> None:
    """Prompts and steps follow courses of their own; the step under way changes its speed, too."""
    other = Course(tuple((at, 1 / factor) for at, factor in with_it.points))
    log = _run([Arrival(0.2, tokens, output, ())], Drift(with_it, other))
    began, computed, first, ended = _times(log)[:, 0]
    assert (computed - began) / with_it.during(began, computed) == pytest.approx(TIMES(tokens, 0), rel=1e-6)
    plain = _run([Arrival(0.2, tokens, output, ())])
    assert (ended - first) / other.during(first, ended) == pytest.approx(plain.ended[0] - plain.first[0], rel=1e-6)


@given(_COURSES, st.lists(st.tuples(st.integers(1, 700), st.integers(1, 9)), min_size=1, max_size=6))
@example(Course(((0.5, 1.0), (1.0, 0.5))), [(1, 8), (1, 2), (214, 5), (55, 1)])
@settings(max_examples=60)
def test_a_load_that_is_all_there_at_once_only_has_another_clock(both: Course, asked: list[tuple[int, int]]) -> None:
    """With one course for prompts and steps, each event comes when as much work is done as without it, queues and all."""
    arrivals = [Arrival(0.0, tokens, output, ()) for tokens, output in asked]
    plain, drifting = _times(_run(arrivals)), _times(_run(arrivals, Drift(both, both)))
    later = drifting > 1e-9
    work = [at / both.during(0.0, at) for at in drifting[later]]
    assert work == pytest.approx(plain[later], rel=1e-5, abs=1e-6)


@given(_COURSES, st.floats(0.0, 5.0), st.floats(0.1, 3.0), st.floats(0.1, 3.0))
def test_work_of_two_halves_is_that_of_the_whole(given_: Course, begin: float, one: float, two: float) -> None:
    middle, end = begin + one, begin + one + two
    halves = one / given_.during(begin, middle) + two / given_.during(middle, end)
    assert (end - begin) / given_.during(begin, end) == pytest.approx(halves)


@given(_COURSES, st.floats(0.0, 5.0), st.floats(0.1, 3.0), st.floats(0.05, 0.95))
def test_a_cut_course_says_the_same_of_its_time(given_: Course, begin: float, long: float, share: float) -> None:
    cut = given_.cut(begin, begin + long)
    assert cut.during(share * long / 2, share * long) == pytest.approx(
        given_.during(begin + share * long / 2, begin + share * long)
    )


@given(_COURSES)
def test_changes_are_where_the_factor_changes(given_: Course) -> None:
    changes = list(given_.changes())
    assert changes[0] == (0.0, given_.points[0][1])
    assert all(a[1] != b[1] and a[0] < b[0] for a, b in itertools.pairwise(changes))
    assert replace(given_, points=tuple(changes)).during(0.0, 20.0) == pytest.approx(given_.during(0.0, 20.0))


def test_a_beat_holds_half_way_to_its_neighbours() -> None:
    found = course([(1.0, 0.2), (2.0, 0.4), (4.0, 0.1)], 0.2)
    assert found.points == ((1.0, 1.0), (1.5, 2.0), (3.0, 0.5))


def test_no_beats_are_no_course() -> None:
    with pytest.raises(ConfigError, match="no points"):
        course([], 0.2)


@pytest.mark.parametrize(
    ("points", "words"),
    [((), "no points"), (((0.0, 0.0),), "above 0"), (((0.0, inf),), "above 0"), (((nan, 1.0),), "finite times"),
     (((1.0, 1.0), (1.0, 2.0)), "must ascend")],
)  # fmt: skip
def test_a_course_that_is_none_is_refused(points: tuple[tuple[float, float], ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Course(points)


def test_a_window_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ConfigError, match="an end after the begin"):
        Course().during(2.0, 2.0)

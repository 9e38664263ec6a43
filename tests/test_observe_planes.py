"""What hosts tell of their interfaces, as the gateway counts it."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from regauge.observe_planes import PlaneMetrics
from regauge.plane_meter import InterfaceBytes


def told(metrics: PlaneMetrics, direction: str = "received") -> float:
    return metrics.nbytes.labels("h", "compute", "cmp0", direction)._value.get()


CLOCK = itertools.count(1.0)


def say(metrics: PlaneMetrics, worker: str, received: int, sent: int = 0, at: float | None = None) -> None:
    metrics.host(
        "h", worker, [InterfaceBytes("compute", "cmp0", received, sent, 50e9)], next(CLOCK) if at is None else at
    )


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=20))
def test_what_is_counted_is_what_came_since_the_first_word(steps: list[int]) -> None:
    metrics, total = PlaneMetrics.create(CollectorRegistry()), 10**12
    say(metrics, "d0", total)
    for more in steps:
        total += more
        say(metrics, "d0", total, 2 * total)
    assert told(metrics) == sum(steps)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(-5, 5)), min_size=1, max_size=20))
def test_a_second_worker_whose_answers_are_overtaken_counts_nothing_twice(steps: list[tuple[int, int]]) -> None:
    metrics, total = PlaneMetrics.create(CollectorRegistry()), 10**12
    say(metrics, "d0", total)
    for more, late in steps:
        total += more
        say(metrics, "d0", total)
        say(metrics, "d1", total + late)
    assert told(metrics) == sum(more for more, _ in steps)


def test_another_worker_goes_on_where_one_is_gone() -> None:
    metrics = PlaneMetrics.create(CollectorRegistry())
    say(metrics, "d0", 1_000)
    say(metrics, "d0", 1_500)
    metrics.gone("d0")
    say(metrics, "d1", 1_400)
    say(metrics, "d1", 1_700)
    assert told(metrics) == 500 + 300


def test_a_counter_that_begins_anew_counts_from_there() -> None:
    metrics = PlaneMetrics.create(CollectorRegistry())
    for received in (1_000, 1_500, 200):
        say(metrics, "d0", received)
    assert told(metrics) == 500 + 200
    assert metrics.speed.labels("h", "compute", "cmp0")._value.get() == 50e9


@given(st.lists(st.floats(0, 60), max_size=20), st.integers(1, 10**11))
def test_bytes_over_seconds_are_never_above_the_line(moments: list[float], line: int) -> None:
    """An interface at line rate is not shown above it, in whichever order, and however late, its host's words come."""
    metrics = PlaneMetrics.create(CollectorRegistry())
    for at in moments:
        say(metrics, "d0", int(at * line), at=at)
    seconds = metrics.seconds.labels("h", "compute", "cmp0")._value.get()
    assert told(metrics) <= line * seconds * (1 + 1e-9) + len(moments)  # each reading is rounded down to a byte
    assert seconds <= max(moments, default=0.0)

"""No rate is above what was recorded: whatever counters and clocks do (sgl-project/sglang#31877 showed speeds above the line's)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.rates import Sample, grown, rate

samples = st.builds(Sample, st.integers(0, 1 << 62), st.floats(0, 1e9), st.integers(1, 3))


@given(samples, samples)
def test_no_rate_times_its_time_is_more_than_came(before: Sample, after: Sample) -> None:
    found = rate(before, after)
    if found is None:
        assert before.process != after.process or after.at <= before.at or after.total < before.total
    else:
        assert 0 <= found * (after.at - before.at) <= (after.total - before.total) * (1 + 1e-12)


@given(st.integers(1, 1 << 40), st.lists(st.tuples(st.floats(1e-3, 60), st.floats(0, 1)), min_size=2, max_size=30))
def test_samples_of_a_line_never_show_more_than_the_line(line: int, steps: list[tuple[float, float]]) -> None:
    """Each step takes so long, and the line is used by such a share; samples are as exact as the counter, a whole byte."""
    told, at, total = [Sample(0, 0.0)], 0.0, 0.0
    for seconds, share in steps:
        at, total = at + seconds, total + seconds * share * line
        told.append(Sample(int(total), at))
    for before, after in pairwise(told):
        found = rate(before, after)
        assert found is not None
        assert found <= line * (1 + 1e-9) + 1 / (after.at - before.at)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.booleans()), min_size=1, max_size=40))
def test_what_has_grown_adds_up_to_all_that_every_process_counted(steps: list[tuple[int, bool]]) -> None:
    """Each step counts more, or a new process begins at 0 first."""
    process, total, counted, before, added = 1, 0, 0, None, 0
    for more, begins in steps:
        if begins:
            process, total = process + 1, 0
        total, counted = total + more, counted + more
        after = Sample(total, 0.0, process)
        added += grown(before, after)
        before = after
    assert added == counted


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, Sample(5, 1.0)),
        (Sample(5, 1.0), Sample(9, 1.0)),
        (Sample(5, 2.0), Sample(9, 1.0)),
        (Sample(9, 1.0), Sample(5, 2.0)),
        (Sample(5, 1.0, 1), Sample(9, 2.0, 2)),
    ],
)
def test_two_samples_that_say_nothing_have_no_rate(before: Sample | None, after: Sample) -> None:
    assert rate(before, after) is None

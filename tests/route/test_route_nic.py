"""A NIC's prediction is the plain sum over its transfers, however it is computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.route.nic import TAIL_S, Flow, Nic

RATE = 1e9
FLOWS = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2), st.floats(0, 3e9)), max_size=6)


@given(FLOWS, st.floats(0, 2e9), st.floats(0, 3e9), st.floats(0, 3), st.floats(0, 2))
def test_finish_is_the_sum_over_what_is_in_front(
    flows: list[tuple[float, float, float]], backlog: float, size: float, ready: float, seconds: float
) -> None:
    nic, now = Nic(), 1.0
    nic.said(int(backlog), RATE, now)
    for number, (begins, lasts, rest) in enumerate(flows):
        nic.add(str(number), Flow(begins, begins + lasts, rest), now)
    begin, complete = max(now, ready), ready + seconds
    drained = RATE * (begin - now)
    before = [rest for begins, _, rest in flows if begins < complete]
    foreign = max(0.0, nic.foreign - drained)
    left = max(0.0, drained - nic.foreign)
    keep = max(0.0, 1 - left / sum(before)) if sum(before) else 0.0
    shared = sum(min(rest * keep, size) for rest in before)
    landed, harm = nic.finish(size, ready, complete, now, RATE)
    expected = max(begin + (size + foreign + shared) / RATE, complete + TAIL_S)
    assert landed == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert harm == pytest.approx(shared / RATE, rel=1e-9, abs=1e-9)

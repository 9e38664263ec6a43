"""A NIC's prediction is the plain sum over its transfers, however it is computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.route.nic import TAIL_S, Flow, Nic

RATE = 1e9
FLOWS = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2), st.floats(0, 3e9)), max_size=6)


@given(FLOWS, st.floats(0, 2e9), st.floats(0, 3e9), st.floats(1, 4), st.floats(0, 2))
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


class Plain:
    """The same fluid, transfer by transfer: all that is ready shares evenly what others' bytes leave."""

    def __init__(self) -> None:
        self.now, self.foreign = 0.0, 0.0
        self.rests: dict[str, list[float]] = {}

    def advance(self, now: float) -> None:
        while self.now < now:
            begins = [ready for ready, _ in self.rests.values() if self.now < ready]
            lasts = min([now, *begins]) - self.now
            going = [each for each in self.rests.values() if each[0] <= self.now and each[1] > 0]
            if self.foreign:
                lasts = min(lasts, self.foreign / RATE)
                self.foreign = (
                    max(0.0, self.foreign - lasts * RATE) if lasts * RATE < self.foreign * (1 - 1e-12) else 0.0
                )
            elif going:
                lasts = min(lasts, min(each[1] for each in going) * len(going) / RATE)
                share = lasts * RATE / len(going)
                for each in going:
                    each[1] = each[1] - share if each[1] > share * (1 + 1e-12) else 0.0
            self.now = now if self.now + lasts >= now or lasts == 0 else self.now + lasts


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "drop", "said"]), st.integers(0, 5), st.floats(0, 3), st.floats(0, 2)),
        max_size=30,
    )
)
def test_time_passes_as_if_each_transfer_was_moved(steps: list[tuple[str, int, float, float]]) -> None:
    nic, plain, now = Nic(), Plain(), 0.0
    nic.said(0, RATE, now)
    for what, number, amount, seconds in steps:
        now += seconds
        plain.advance(now)
        name, size = str(number), amount * RATE
        if what == "drop":
            nic.drop(name, now)
            plain.rests.pop(name, None)
        elif what == "add" and name not in plain.rests:
            nic.add(name, Flow(now + amount / 2, now + amount, size), now)
            plain.rests[name] = [now + amount / 2, size]
        else:
            nic.said(int(size), RATE, now)
            begun = [each for each in plain.rests.values() if each[0] <= now]
            mine = sum(rest for _, rest in begun)
            plain.foreign = max(0.0, int(size) - mine)
            for each in begun if mine > int(size) else ():
                each[1] *= int(size) / mine
        nic.drop("nobody", now)
        nic.finish(1.0, now, now, now, RATE)  # looks at it as of now
        assert nic.booked == pytest.approx(sum(rest for _, rest in plain.rests.values()), abs=100)
        assert nic.foreign == pytest.approx(plain.foreign, abs=100)
        front, ours = nic.least(RATE, now + amount, now, RATE)
        landed, harm = nic.finish(RATE, now + amount, now + amount, now, RATE)
        assert now + amount + 1 + front / RATE <= landed + 1e-6
        assert ours / RATE <= harm + 1e-6

"""KV on another plane than compute: never claimed where there is none, and found where there is enough of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.astray import SETTLE_S, WINDOW_S, Carried, Crossed, Watch, missing


@dataclass
class Host:
    """A worker and its interfaces, chunk by chunk. What the interfaces tell lags behind by up to SETTLE_S."""

    now: float = 0.0
    carried: list[tuple[float, int]] = field(default_factory=list)
    """When a chunk (or other traffic) crossed the compute plane, and its bytes."""
    strayed: int = 0
    landed: int = 0
    flying: list[tuple[int, bool]] = field(default_factory=list)

    def begin(self, nbytes: int, *, crosses_first: bool) -> None:
        """A chunk goes out: its bytes cross at once, or only when it lands."""
        self.flying.append((nbytes, crosses_first))
        if crosses_first:
            self.carried.append((self.now, nbytes))

    def land(self, *, astray: bool) -> None:
        nbytes, crossed = self.flying.pop(0)
        self.landed += nbytes
        if astray and not crossed:
            self.strayed += nbytes
        elif not crossed:
            self.carried.append((self.now, nbytes))

    def reading(self, lag: float) -> Carried:
        return Carried("boot", sum(n for at, n in self.carried if at <= self.now - lag), 0)

    def crossed(self) -> Crossed:
        return Crossed(sent=self.landed, sending=sum(n for n, _ in self.flying))


STEP = st.tuples(st.sampled_from([0.0, 0.5, 2.0, 5.0]), st.sampled_from(["begin", "land", "other"]), st.integers(1, 9), st.booleans(),
                 st.sampled_from([0.0, SETTLE_S]))  # fmt: skip


@settings(max_examples=400)
@given(st.lists(STEP, min_size=3, max_size=20), st.booleans())
def test_no_more_is_said_to_be_astray_than_is(steps: list[tuple[float, str, int, bool, float]], wrong: bool) -> None:
    host, watch = Host(), Watch()
    for seconds, what, nbytes, early, lag in steps:
        host.now += seconds
        if what == "begin":
            host.begin(nbytes, crosses_first=early)
        elif what == "land" and host.flying:
            host.land(astray=wrong)
        elif what == "other":
            host.carried.append((host.now, nbytes))
        watch.look(host.now, host.reading(lag), host.crossed())
        assert watch.missing <= host.strayed


def test_kv_that_the_compute_plane_did_not_carry_is_found() -> None:
    watch, sent = Watch(), 0
    for second in range(30):
        sent += 1000
        watch.look(float(second), Carried("boot", 100 * second, 0), Crossed(sent=sent))
    windows = int((29 - SETTLE_S) // WINDOW_S)
    assert watch.missing == windows * (
        WINDOW_S * 1000 - 8 * 100
    )  # the interfaces were read 3 s after each window's end
    assert watch.missing < sent


def test_what_came_in_counts_as_what_went_out_does() -> None:
    carried = Carried("boot", 0, 400)
    assert missing((Crossed(), Carried("boot", 0, 0)), (Crossed(received=1000), carried)) == 600
    assert missing((Crossed(receiving=300), Carried("boot", 0, 0)), (Crossed(received=1000), carried)) == 300


def test_nothing_is_said_of_interfaces_that_began_anew() -> None:
    begin = (Crossed(sent=5), Carried("boot", 50, 0))
    assert missing(begin, (Crossed(sent=500), Carried("other boot", 50, 0))) is None
    assert missing(begin, (Crossed(sent=500), Carried("boot", 49, 0))) is None
    assert missing(begin, (Crossed(sent=4), Carried("boot", 50, 0))) is None

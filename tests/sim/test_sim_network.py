"""The fluid network against what is known in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.sim.clock import Clock
from regauge.sim.network import Network


class Run:
    """A network whose flows note when they are done."""

    def __init__(self, ports: dict[str, float]) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, ports)
        self.ended: dict[str, float] = {}

    def flow(self, name: str, *ports: str, size: float | None = None, rank: int = 0):  # type: ignore[no-untyped-def]
        flow = self.network.open(ports, lambda: self.ended.__setitem__(name, self.clock.now), rank)
        if size is not None:
            self.network.add(flow, size, last=True)
        return flow

    def at(self, when: float, what) -> None:  # type: ignore[no-untyped-def]
        self.clock.at(when, what)


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=12))
def test_equal_sharing_ends_when_processor_sharing_says(sizes: list[float]) -> None:
    """N flows that begin together at one receiver: the k-th smallest ends after sum(min(size, own)) / rate."""
    run = Run({f"s{i}": 1e9 for i in range(len(sizes))} | {"r": 10.0})
    for index, size in enumerate(sizes):
        run.flow(str(index), f"s{index}", "r", size=size)
    run.clock.run()
    for index, size in enumerate(sizes):
        assert run.ended[str(index)] == pytest.approx(sum(min(size, other) for other in sizes) / 10)
    assert run.network.carried("r") == pytest.approx(sum(sizes))


def test_twelve_at_once_take_twelve_times_one() -> None:
    one, twelve = (Run({f"s{i}": 50e9 for i in range(12)} | {"r": 50e9}) for _ in range(2))
    one.flow("0", "s0", "r", size=1e9)
    for index in range(12):
        twelve.flow(str(index), f"s{index}", "r", size=1e9)
    one.clock.run()
    twelve.clock.run()
    assert list(twelve.ended.values()) == pytest.approx([12 * one.ended["0"]] * 12)


def test_bytes_that_come_in_parts_end_with_the_last() -> None:
    run = Run({"s": 10.0, "r": 10.0})
    network, flow = run.network, run.flow("a", "s", "r")
    run.at(0.0, lambda: network.add(flow, 50.0))
    run.at(2.0, lambda: network.add(flow, 50.0))
    run.at(20.0, lambda: network.finish(flow))
    run.clock.run()
    assert run.ended == {"a": 20.0}
    run.flow("b", "s", "r", size=50.0)
    run.clock.run()
    assert run.ended == {"a": 20.0, "b": 25.0}


def test_what_is_produced_slower_than_the_line_crosses_as_it_comes() -> None:
    run = Run({"s": 10.0, "r": 10.0})
    slow = run.flow("slow", "s", "r")
    run.network.produce(slow, 40.0, 10.0, last=True)
    assert (run.network.rate(slow), run.network.load("r"), run.network.backlog("r")) == (4.0, 0.4, 0.0)
    run.flow("bulk", "s", "r", size=60.0)  # gets what slow does not want, but never less than half
    assert run.network.load("r") == 1.0
    run.clock.run()
    assert run.ended == {"slow": 10.0, "bulk": 12.0 - 2.0}


def test_what_is_produced_faster_than_the_line_waits() -> None:
    run = Run({"r": 10.0})
    fast = run.flow("fast", "r")
    run.network.produce(fast, 100.0, 5.0)
    run.at(2.0, lambda: run.network.produce(fast, 10.0, 20.0, last=True))
    run.clock.run(5.0)
    assert run.network.backlog("r") == pytest.approx(101.5 - 50.0)
    run.clock.run()
    assert run.ended["fast"] == pytest.approx(22.0)  # the backlog is gone before: what is left comes at 0.5 a second


def test_a_better_rank_goes_first_and_a_rank_can_change() -> None:
    run = Run({"r": 10.0})
    run.flow("first", "r", size=100.0)
    later = run.flow("later", "r", size=50.0, rank=1)
    assert run.network.rate(later) == 0.0
    run.at(2.0, lambda: run.network.rerank(later, -1))
    run.clock.run()
    assert run.ended == pytest.approx({"later": 7.0, "first": 15.0})


def test_a_port_that_is_down_stops_what_crosses_it_and_nothing_else() -> None:
    run = Run({"a": 10.0, "b": 10.0, "r": 10.0})
    run.flow("a", "a", "r", size=50.0)
    run.flow("b", "b", "r", size=50.0)
    run.at(2.0, lambda: run.network.port("a", 0.0))
    run.at(8.0, lambda: run.network.port("a", 5.0))
    run.clock.run()
    assert run.ended == {"b": 6.0, "a": 16.0}
    assert run.network.load("a") == 0.0


def test_a_closed_flow_says_what_crossed_and_leaves_its_share() -> None:
    run = Run({"r": 10.0})
    gone, kept = run.flow("gone", "r", size=100.0), run.flow("kept", "r", size=100.0)
    crossed: list[float] = []
    run.at(4.0, lambda: crossed.append(run.network.close(gone)))
    run.clock.run()
    assert (crossed, run.ended, run.network.carried("r")) == ([20.0], {"kept": 12.0}, 120.0)
    with pytest.raises(ValueError, match="the flow is over"):
        run.network.add(kept, 1.0)


def test_a_flow_without_bytes_is_done_when_it_is_finished() -> None:
    run = Run({"r": 10.0})
    run.network.finish(run.flow("none", "r"))
    late = run.flow("late", "r")
    run.network.produce(late, 0.0, 3.0, last=True)
    run.network.produce(late, 5.0, 0.0)
    assert run.ended == {}, "done is called by the clock"
    run.clock.run()
    assert run.ended == {"none": 0.0, "late": 3.0}


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e-300, 1e-12, 1e-6])
@pytest.mark.parametrize("begin", [0.0, 1e7])
def test_times_too_short_for_a_double_lose_no_byte(seconds: float, begin: float) -> None:
    run = Run({"r": 50e9})
    flow = run.flow("a", "r")
    run.at(begin, lambda: run.network.produce(flow, 100e9, seconds, last=True))
    run.clock.run()
    assert run.ended["a"] - begin == pytest.approx(2.0)
    assert run.network.carried("r") == pytest.approx(100e9)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"port nic0: rate is .* give a finite one, 0 or more"):
        Network(Clock(), {"nic0": rate})
    network = Network(Clock(), {"nic0": 1.0})
    with pytest.raises(ConfigError, match="port nic0: rate is"):
        network.port("nic0", rate)


def test_what_makes_no_sense_is_refused() -> None:
    network = Network(Clock(), {"nic0": 1.0, "nic1": 1.0})
    with pytest.raises(ConfigError, match="no port 'nic00'; did you mean 'nic0'"):
        network.open(("nic00",), lambda: None)
    with pytest.raises(ConfigError, match="each of its ports once, and at least one"):
        network.open(("nic0", "nic0"), lambda: None)
    flow = network.open(("nic0", "nic1"), lambda: None)
    for size in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"a flow is given .* bytes: give 0 or more"):
            network.add(flow, size)
        with pytest.raises(ValueError, match=r"over .* s: give a time of 0 or more"):
            network.produce(flow, 1.0, size)


def test_a_clock_runs_in_order_of_time_then_of_asking() -> None:
    clock, ran = Clock(), []
    for name, when in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        clock.at(when, lambda name=name: ran.append((clock.now, name)))  # type: ignore[misc]
    clock.run(1.5)
    assert ran == [(1.0, "a"), (1.0, "b")]
    clock.after(-5.0, lambda: ran.append((clock.now, "late")))
    clock.run()
    assert ran[2:] == [(1.0, "late"), (2.0, "c")]

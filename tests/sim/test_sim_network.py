"""The fluid network against what is known in closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.sim.clock import Clock
from regauge.sim.network import Flow, Network, rates

PORTS = {"a": 10.0, "b": 4.0, "x": 6.0, "y": 20.0}
FLOWS = st.lists(
    st.sampled_from([("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"), ("a", "b", "x")]), min_size=1, max_size=12
)


@given(FLOWS)
def test_shares_are_max_min_fair(ports: list[tuple[str, ...]]) -> None:
    """Each flow has a full port of its own where no other flow has more (Bertsekas and Gallager's definition of a bottleneck)."""
    flows = [Flow(each, lambda: None) for each in ports]
    rates(flows, PORTS)
    used = {port: sum(flow.rate for flow in flows if port in flow.ports) for port in PORTS}
    assert all(used[port] <= rate + 1e-9 for port, rate in PORTS.items())
    for flow in flows:
        assert any(
            used[port] >= PORTS[port] - 1e-9
            and all(other.rate <= flow.rate + 1e-9 for other in flows if port in other.ports)
            for port in flow.ports
        )


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=12))
def test_equal_sharing_ends_when_processor_sharing_says(sizes: list[float]) -> None:
    """N flows that begin together at one receiver: the k-th smallest ends after sum(min(size, own)) / rate."""
    clock = Clock()
    network = Network(clock, {f"s{i}": 1e9 for i in range(len(sizes))} | {"r": 10.0})
    ended: dict[int, float] = {}
    for index, size in enumerate(sizes):
        flow = network.open((f"s{index}", "r"), lambda index=index: ended.__setitem__(index, clock.now))  # type: ignore[misc]
        network.add(flow, size * 1000, last=True)
    clock.run()
    for index, size in enumerate(sizes):
        expected = sum(min(size, other) for other in sizes) * 1000 / 10
        assert ended[index] == pytest.approx(expected, rel=1e-3, abs=0.2 * len(sizes))
    assert network.carried["r"] == pytest.approx(1000 * sum(sizes), abs=len(sizes))


def test_bytes_that_come_in_parts_end_with_the_last() -> None:
    clock = Clock()
    network = Network(clock, {"s": 10.0, "r": 10.0})
    ended: list[float] = []
    flow = network.open(("s", "r"), lambda: ended.append(clock.now))
    for when, size, last in ((0.0, 50.0, False), (2.0, 50.0, False), (20.0, 0.0, True)):
        clock.at(when, lambda size=size, last=last: network.add(flow, size, last=last))  # type: ignore[misc]
    clock.run()
    assert ended == [20.0]
    other = network.open(("s", "r"), lambda: ended.append(clock.now))
    network.add(other, 50.0, last=True)
    clock.run()
    assert ended == [20.0, 25.0]


def test_a_clock_runs_in_order_of_time_then_of_asking() -> None:
    clock, ran = Clock(), []
    for name, when in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        clock.at(when, lambda name=name: ran.append((clock.now, name)))  # type: ignore[misc]
    clock.run(1.5)
    assert ran == [(1.0, "a"), (1.0, "b")]
    clock.after(-5.0, lambda: ran.append((clock.now, "late")))
    clock.run()
    assert ran[2:] == [(1.0, "late"), (2.0, "c")]

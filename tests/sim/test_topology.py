"""Topologies: which ports lie on the way, and how many a network takes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.sim.clock import Clock
from regauge.sim.network import Network
from regauge.sim.topology import Ends, FatTree, Racks, Rails, Single, Topology

ARTICLE = Ends(senders=12, receivers=1, sender_nics=8, receiver_nics=8)
ENDS = st.builds(Ends, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
TOPOLOGY = ENDS.flatmap(
    lambda ends: st.one_of(
        st.just(Single(ends)),
        st.builds(Racks, st.just(ends), st.integers(1, 4), st.integers(1, 3), st.just(1e9)),
        st.builds(FatTree, st.just(ends), st.sampled_from([6, 8]), st.just(1e9)),
        st.builds(Rails, st.just(ends), st.integers(1, 3), st.just(1e9)),
    )
)


@given(TOPOLOGY, st.data())
def test_a_path_is_of_ports_that_are_there_and_the_same_each_time(topology: Topology, data: st.DataObject) -> None:
    ends = topology.ends  # type: ignore[attr-defined]
    sides = (ends.senders, ends.sender_nics, ends.receivers, ends.receiver_nics)
    way = [data.draw(st.integers(0, each - 1)) for each in sides]
    flow = data.draw(st.integers(0, 2**40))
    path = topology.path(*way, flow)
    assert path == topology.path(*way, flow)
    assert len(set(path)) == len(path) in (0, 2, 4)
    assert set(path) <= set(topology.ports())
    assert ends.nics <= topology.use().used <= topology.use().ports


@given(st.sampled_from([4, 6, 8]), st.data())
def test_a_fat_trees_path_goes_up_and_comes_down_on_cables_that_join(k: int, data: st.DataObject) -> None:
    tree = FatTree(Ends(k**3 // 8, k**3 // 8), k, 1e9)
    sender, receiver = (data.draw(st.integers(0, k**3 // 8 - 1)) for _ in range(2))
    path = tree.path(sender, 0, receiver, 0, data.draw(st.integers(0, 1000)))
    pods = [position // (k // 2) ** 2 for position in (sender, k**3 // 8 + receiver)]
    if pods[0] != pods[1]:
        assert len(path) == 4
        assert path[0].rpartition("up")[2] == path[1].split(".agg")[1].split(".")[0], (
            "the edge's cable ends at that switch"
        )
        assert path[1].replace(f"pod{pods[0]}", f"pod{pods[1]}").replace("up", "down") == path[2], "one core, both pods"
    assert len(tree.ports()) == k**3  # k^3/2 cables, both ways
    assert tree.use().used == tree.use().ports, "when full of NICs, no port is free"


def test_flows_spread_over_the_cables_and_some_collide() -> None:
    racks = Racks(Ends(2, 2), racks=2, uplinks=4, rate=1e9)
    taken = Counter(racks.path(0, 0, 1, 0, flow) for flow in range(1600))
    assert len(taken) == 16, "the cable up and the cable down are picked apart"
    assert all(60 < count < 140 for count in taken.values())


def test_an_oversubscribed_uplink_is_what_its_flows_share() -> None:
    racks = Racks(Ends(8, 8), racks=2, uplinks=1, rate=10.0)
    clock, ended = Clock(), []
    nics = {f"p{i}": 10.0 for i in range(8)} | {f"d{i}": 10.0 for i in range(8)}
    network = Network(clock, nics | racks.ports())
    for i in range(4):  # from rack 0 to rack 1
        flow = network.open(
            (f"p{2 * i}", *racks.path(2 * i, 0, 2 * i + 1, 0, i), f"d{2 * i + 1}"), lambda: ended.append(clock.now)
        )
        network.add(flow, 10.0, last=True)
    clock.run()
    assert (ended, racks.oversubscription(10.0)) == ([4.0] * 4, 8.0)


def test_ports_that_the_articles_deployment_takes() -> None:
    """12 prefill servers and a decode server with 8 NICs each: 104 of one switch's 128."""
    assert (Single(ARTICLE).use().used, Single(ARTICLE).use().ports) == (104, 128)
    rails = Rails(ARTICLE, switch_ports=32)
    assert (rails.use().switches, rails.use().used) == (8, 104)
    assert rails.path(3, 5, 0, 5, flow=7) == ()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Ends(0, 1), "senders is 0; give 1 to"),
        (
            lambda: Single(ARTICLE, 64),
            "one switch would need 104 ports for NICs and has 64; take a larger switch .switch_ports.",
        ),
        (lambda: Racks(ARTICLE, 13, 200, 1e9), "a rack's switch would need 216 ports"),
        (lambda: Racks(ARTICLE, 13, 16, 1e9), "the spine would need 208 ports for uplinks"),
        (lambda: Racks(ARTICLE, 2, 4, -1.0), r"rate is -1\.0 bytes/s; give a finite one above 0"),
        (lambda: FatTree(ARTICLE, 5, 1e9), "k is 5; a fat tree's switches have an even number"),
        (lambda: FatTree(ARTICLE, 4, 1e9), "104 NICs, .* has room for 16; k = 8 has room"),
        (lambda: Rails(ARTICLE, switch_ports=8), "a leaf would need 13 ports"),
        (lambda: Rails(ARTICLE).path(0, 1, 0, 2, 0), "nothing leads from rail 1 to rail 2; give the leaves uplinks"),
        (lambda: Rails(ARTICLE).path(12, 0, 0, 0, 0), "sender 12 is not there; there are 12, counted from 0"),
        (lambda: Single(ARTICLE).path(0, 0, 0, 8, 0), "receiver's NIC 8 is not there"),
    ],
)
def test_what_cannot_be_built_is_refused(make, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=said):
        make()

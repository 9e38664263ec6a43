"""Transfers at each level of detail: incast, several NICs, order, and what the two levels agree on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_cases import check, serve
from regauge.config import RouteConfig
from regauge.move.flow_types import CREDIT, PEER_FIFO, POLICIES, UNCONTROLLED, Policy
from regauge.sim.cluster import Cluster, Level
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.fleet import Fleet
from regauge.sim.topology import Ends, Racks, Single
from regauge.sim.trace import Arrival, generate

INSTANT = PrefillModel(1e12, overhead_s=0.0)
BURST = Cluster(12, 1, INSTANT, decode_nic=1e9, prefill_nic=1e9, bytes_per_token=1e6)
"""A thousand tokens are a gigabyte, and a second of a NIC."""


@pytest.mark.parametrize("level", ["fluid", "flow", "protocol"])
def test_twelve_at_once_into_one_worker_take_twelve_times_one(level: Level) -> None:
    cluster = replace(BURST, transfers=level)
    _, one = serve(cluster, [Arrival(0.0, 1_000, 1, ())], "round-robin")
    _, all_of_them = serve(cluster, [Arrival(0.0, 1_000, 1, ())] * 12, "round-robin")
    assert one.log.landed[0] == pytest.approx(1.0, rel=1e-3)
    assert all_of_them.log.landed.max() == pytest.approx(12.0, rel=1e-3)
    assert all_of_them.log.landed.min() == pytest.approx(12.0 if level == "fluid" else 1.0, rel=0.03)
    assert all_of_them.carried["d0"] == pytest.approx(12e9)


@pytest.mark.parametrize("level", ["fluid", "flow", "protocol"])
def test_transfers_spread_over_the_nics_of_a_worker(level: Level) -> None:
    cluster = replace(BURST, transfers=level, decode_nics=4)
    fleet, result = serve(cluster, [Arrival(0.0, 1_000, 1, ())] * 12, "round-robin")
    assert result.log.landed.max() == pytest.approx(3.0, rel=1e-3)
    assert [result.carried[nic] for nic in cluster.nics("d0")] == pytest.approx([3e9] * 4)
    check(fleet, result, [Arrival(0.0, 1_000, 1, ())] * 12)
    senders = replace(BURST, transfers=level, prefills=1, prefill_nics=4, decode_nics=4)
    _, out = serve(senders, [Arrival(0.0, 1_000, 1, ())] * 4, "round-robin")
    # The protocol's chunks are multiples of 128 tokens, and a link waits for the credit of a whole one.
    assert out.log.landed.max() == pytest.approx(1.0, rel=0.05 if level == "protocol" else 1e-3)


@pytest.mark.parametrize("level", ["fluid", "flow", "protocol"])
def test_kv_goes_while_the_prompt_is_computed(level: Level) -> None:
    """What of the transfer is not hidden: nothing but a part where the NIC is fast, all but the computing where it is slow."""
    arrivals = [Arrival(0.0, 10_000, 2, ())]
    fast = Cluster(1, 1, PrefillModel(10_000.0, 0.0), decode_nic=20e9, bytes_per_token=1e6, transfers=level)
    _, result = serve(fast, arrivals)
    assert 0 <= result.log.landed[0] - 1.0 <= 0.6 / 16
    _, slow = serve(replace(fast, decode_nic=1e9), arrivals)
    assert slow.log.landed[0] == pytest.approx(10.0, rel=0.01)


def test_credit_lets_the_short_pass_and_the_fluid_does_not() -> None:
    arrivals = [Arrival(0.0, 10_000, 1, ()), Arrival(1.0, 500, 1, ())]
    landed = {}
    for policy in (CREDIT, UNCONTROLLED):
        _, result = serve(replace(BURST, transfers="flow", flow_policy=policy), arrivals, "round-robin")
        landed[policy.name] = result.log.landed
    assert landed["credit"][1] == pytest.approx(1.5, abs=0.05)
    assert landed["uncontrolled"][1] == pytest.approx(2.0, abs=0.1)
    assert landed["credit"][0] == pytest.approx(10.5, rel=0.01)
    assert landed["uncontrolled"][0] == pytest.approx(10.5, rel=0.01)


def test_one_at_a_time_for_each_peer_waits_in_line() -> None:
    one_sender = replace(BURST, prefills=1, transfers="flow", flow_policy=PEER_FIFO)
    _, result = serve(one_sender, [Arrival(0.0, 5_000, 1, ()), Arrival(0.0, 500, 1, ())], "round-robin")
    assert list(result.log.landed) == pytest.approx([5.0, 5.5], rel=0.01)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_baseline_carries_every_byte(policy: Policy) -> None:
    cluster = Cluster(
        3, 2, PrefillModel(20_000.0), DecodeModel(slots=16, pages=20_000), decode_nic=2e9, prefill_nic=4e9,
        transfers="flow", flow_policy=policy, decode_nics=2,
    )  # fmt: skip
    arrivals = generate(1, 30, 3.0)
    fleet, result = serve(cluster, arrivals)
    check(fleet, result, arrivals)
    assert result.log.complete.all()


def test_both_levels_agree_where_nobody_waits() -> None:
    arrivals = generate(4, 60, 0.5)
    means = {}
    for level in ("fluid", "flow"):
        cluster = Cluster(4, 2, PrefillModel(20_000.0), DecodeModel(), decode_nic=50e9, transfers=level)
        means[level] = float(serve(cluster, arrivals)[1].log.ttft().mean())
    assert means["flow"] == pytest.approx(means["fluid"], rel=0.05)


def test_flow_control_tells_the_router_what_is_in_front_of_its_nics() -> None:
    cluster = replace(BURST, transfers="flow")
    seen: list[float] = []
    fleet = Fleet(cluster, RouteConfig(block_tokens=512))
    fleet.run(
        [Arrival(0.0, 1_000, 1, ())] * 12, watch=lambda now: seen.append(now.transfers.backlog(now.decodes["d0"]))
    )
    # After a second. Two have not been let in yet: what is in front of the NIC would take more than `commit_s`, 10 s.
    assert seen[2] == pytest.approx(9e9, rel=0.02)
    assert seen[-1] == 0


@pytest.mark.parametrize("level", ["fluid", "flow", "protocol"])
def test_what_lies_between_the_nics_may_be_the_bottleneck(level: Level) -> None:
    """Decode is in the first rack; what comes from the second shares its uplink."""
    arrivals = [Arrival(0.0, 1_000, 1, ())] * 4
    ends = Ends(senders=2, receivers=1)
    for fabric, last in ((Single(ends), 2.0), (Racks(ends, 2, 1, 0.5e9), 4.0)):
        cluster = replace(BURST, transfers=level, prefills=2, prefill_nic=2e9, decode_nic=2e9, fabric=fabric)
        fleet, result = serve(cluster, arrivals, "round-robin")
        check(fleet, result, arrivals)
        # With credit the slow sender's share may be served last, and alone.
        assert 0.999 * last <= result.log.landed.max() <= (1.001 if level == "fluid" else 1.25) * last

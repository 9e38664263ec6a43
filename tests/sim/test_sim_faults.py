"""What goes wrong is survived or ends requests: none is lost, and nothing stays held. Random clusters, traces and faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_cases import POLICY_NAMES, check, clusters, schedules, serve, traces
from regauge.config_route import PolicyName
from regauge.errors import ConfigError
from regauge.sim.cluster import Cluster, Level
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.faults import Fault, read
from regauge.sim.log import FAILED, Log
from regauge.sim.trace import Arrival

SMALL = Cluster(
    2, 2, PrefillModel(10_000.0), DecodeModel(slots=8), bytes_per_token=1e5, prefill_nic=1e9, decode_nic=1e9
)


def same(one: Log, other: Log) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True) for name in ("first", "ended", "nbytes", "outcome"))  # fmt: skip


@given(st.data(), clusters(), traces(), st.sampled_from(POLICY_NAMES))
@settings(max_examples=15, deadline=None)
def test_whatever_goes_wrong_each_request_ends_once(
    data: st.DataObject, cluster: Cluster, arrivals: list[Arrival], policy: PolicyName
) -> None:
    faults = data.draw(schedules(cluster))
    fleet, result = serve(cluster, arrivals, policy, faults)
    check(fleet, result, arrivals)
    _, again = serve(cluster, arrivals, policy, faults)
    assert same(result.log, again.log)


@pytest.mark.parametrize("level", ["fluid", "flow", "protocol"])
def test_a_prefill_worker_that_dies_costs_a_second_attempt(level: Level) -> None:
    arrivals = [Arrival(0.0, 10_000, 10, ())]
    cluster = replace(SMALL, transfers=level)
    _, calm = serve(cluster, arrivals)
    worker = f"p{calm.log.prefill[0]}"
    fleet, result = serve(cluster, arrivals, faults=[Fault(at=0.6, what="dead", who=worker)])
    check(fleet, result, arrivals)
    assert result.log.attempts[0] == 2
    assert result.log.complete.all()
    assert result.log.prefill[0] == 1 - calm.log.prefill[0]
    assert result.log.ttft()[0] == pytest.approx(0.6 + calm.log.ttft()[0], rel=1e-3)
    assert calm.log.nbytes[0] < result.log.nbytes[0] < 1.6 * calm.log.nbytes[0]


def test_an_answer_goes_on_where_its_decode_worker_died() -> None:
    arrivals = [Arrival(0.0, 10_000, 200, ())]
    _, calm = serve(SMALL, arrivals)
    worker, first, step = f"d{calm.log.decode[0]}", calm.log.first[0], 0.0204
    fleet, result = serve(SMALL, arrivals, faults=[Fault(at=first + 50.5 * step, what="dead", who=worker)])
    check(fleet, result, arrivals)
    log = result.log
    assert log.first[0] == first
    assert log.complete.all()
    # 51 tokens had come; the next prefill gives one more of the 149 that are left.
    assert log.ended[0] - log.landed[0] == pytest.approx(148 * step)
    assert log.landed[0] - (first + 50.5 * step) == pytest.approx(0.02 + 10_051 / 10_000, rel=0.02)


def test_a_request_waits_for_the_only_worker_or_stops() -> None:
    alone = replace(SMALL, prefills=1)
    arrivals = [Arrival(0.0, 10_000, 5, ())]
    _, result = serve(alone, arrivals, faults=[Fault(at=0.5, what="dead", who="p0", seconds=3.0)])
    assert result.log.began[0] == pytest.approx(3.5)
    assert result.log.complete.all()
    fleet, result = serve(alone, arrivals, faults=[Fault(at=0.5, what="dead", who="p0")])
    assert result.log.outcome[0] == FAILED
    assert result.log.ended[0] == pytest.approx(0.5 + alone.wait_s)
    check(fleet, result, arrivals)


@pytest.mark.parametrize("level", ["fluid", "flow", "protocol"])
def test_a_port_that_is_down_holds_transfers_up_and_then_fails_them(level: Level) -> None:
    arrivals = [Arrival(0.0, 10_000, 5, ())]
    cluster = replace(SMALL, prefills=1, decodes=1, transfers=level)
    _, calm = serve(cluster, arrivals)
    _, short = serve(cluster, arrivals, faults=[Fault(at=0.5, what="port", who="d0", seconds=1.9, factor=0.0)])
    assert short.log.attempts[0] == 1
    assert short.log.landed[0] > 2.4
    assert calm.log.landed[0] < 1.5
    fleet, long = serve(cluster, arrivals, faults=[Fault(at=0.5, what="port", who="d0", seconds=10.0, factor=0.0)])
    assert long.log.attempts[0] > 1
    check(fleet, long, arrivals)


def test_a_slow_worker_takes_longer() -> None:
    arrivals = [Arrival(0.0, 10_000, 101, ())]
    one = replace(SMALL, prefills=1, decodes=1)
    slow = [Fault(at=0.0, what="slow", who=who, factor=3.0) for who in ("p0", "d0")]
    _, calm = serve(one, arrivals)
    _, result = serve(one, arrivals, faults=slow)
    assert result.log.ttft()[0] == pytest.approx(3 * calm.log.ttft()[0])
    assert result.log.tpot()[0] == pytest.approx(3 * calm.log.tpot()[0])


def test_a_schedule_is_read_and_nonsense_refused(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text('[[faults]]\nat = 1\nfor = 2.5\nwhat = "port"\nwho = "d0"\nfactor = 0\n')
    assert read(path) == (Fault(at=1.0, what="port", who="d0", seconds=2.5, factor=0.0),)
    for text, message in (
        ('at = -1\nwhat = "dead"\nwho = "p0"', r"faults.toml: fault 1: .*at: must be 0 or more and finite, not -1"),
        ('at = 1\nwhat = "dead"\nwho = "p0"\nfactor = 2', r"fault 1: .*a dead worker has none"),
        ('at = 1\nwhat = "slow"\nwho = "p0"', r'fault 1: .*"slow" needs one, 1 or more'),
        ('at = 1\nwhat = "slow"\nwho = "p0"\nfactor = nan', r'fault 1: .*"slow" needs one, 1 or more'),
        ('at = 1\nwhat = "melt"\nwho = "p0"', r"fault 1: Invalid enum value 'melt'"),
        ('at = 1\nwhat = "dead"\nwho = "p0"\nuntil = 3', r"fault 1: .*unknown field `until`"),
        ('at = 1\nfor = 0\nwhat = "dead"\nwho = "p0"', r"fault 1: .*for: must be more than 0"),
    ):
        path.write_text(f"[[faults]]\n{text}\n")
        with pytest.raises(ConfigError, match=message):
            read(path)
    path.write_text("faults = 3")
    with pytest.raises(ConfigError, match=r"faults.toml: Expected `array`"):
        read(path)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.toml")


def test_a_fault_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fault at 1 s: there is no worker 'p7'"):
        serve(SMALL, [], faults=[Fault(at=1.0, what="dead", who="p7")])
    with pytest.raises(ConfigError, match=r"there is no port 'd0\.1'"):
        serve(SMALL, [], faults=[Fault(at=1.0, what="port", who="d0.1", factor=0.0)])

"""Cases of a scenario run: what differs between them is what the scenario says, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from regauge.errors import ConfigError
from regauge.sim import arrivals, replay
from regauge.sim.log import COLUMNS, Log
from regauge.sim.replay import Case, cases, differences, fabric, play, setup_of
from regauge.sim.results import Run
from regauge.sim.scenario import Scenario, decode
from regauge.sim.topology import FatTree, Racks, Rails, Single

SMALL = """
    [prefill]
    servers = 3
    nics = 1
    [decode]
    servers = 2
    nics = 1
    [trace]
    requests = 120
    rate = 6.0
    [run]
    seeds = 2
"""


def run(text: str = "") -> tuple[list[Run], dict[tuple[str, int], Log]]:
    scenario = decode((SMALL + text).encode())
    requests = arrivals.load(scenario.trace)
    setup = setup_of(scenario, requests)
    runs, logs = [], {}
    for seed in replay.seeds(scenario):
        for case in cases(scenario):
            made, result = play(scenario, setup, case, seed, requests)
            runs.append(made)
            logs[case.name, seed] = result.log
    return runs, logs


def test_cases_are_all_pairs() -> None:
    scenario = decode(b"""
        [network]
        transfers = "flow"
        [run]
        policies = ["prefix", "round-robin", "prefix"]
        flows = ["credit", "peer-fifo"]
    """)
    assert [case.name for case in cases(scenario)] == [
        "prefix, credit", "prefix, peer-fifo", "round-robin, credit", "round-robin, peer-fifo"]  # fmt: skip
    assert [case.route.policy for case in cases(scenario)][::2] == ["prefix", "round-robin"]
    assert cases(Scenario()) == [Case("network-aware", Scenario().route, "credit")]


def test_a_seed_says_it_all() -> None:
    (first, again), (logs, others) = zip(run(), run(), strict=True)
    assert first == again
    for key, log in logs.items():
        assert all(np.array_equal(getattr(log, name), getattr(others[key], name), equal_nan=True) for name in COLUMNS)
    assert not np.array_equal(logs["network-aware", 1].at, logs["network-aware", 2].at)


def test_policies_see_the_same_requests_and_differ() -> None:
    runs, logs = run("policies = ['round-robin', 'network-aware']\nwarm = 0.25")
    for seed in (1, 2):
        one, other = (logs[case, seed] for case in ("round-robin", "network-aware"))
        assert np.array_equal(one.at, other.at)
        assert np.array_equal(one.prompt, other.prompt)
        assert not np.array_equal(one.prefill, other.prefill)
    assert all(run.summary.requests == 90 for run in runs)
    assert all(run.summary.outcomes["complete"] == 90 for run in runs)
    hits = differences(runs, "network-aware", "round-robin", ["hit", "ttft_mean"])
    assert hits["hit"].mean == pytest.approx(
        sum((1 if run.case == "network-aware" else -1) * run.summary.hit for run in runs) / 2
    )
    with pytest.raises(ConfigError, match="2 and 1 runs are no pairs"):
        differences(runs[:3], "round-robin", "network-aware", ["hit"])


def test_progress_is_told_to_the_last_request() -> None:
    scenario = decode(SMALL.encode())
    requests = arrivals.load(scenario.trace)
    told: list[tuple[int, float]] = []
    _, result = play(
        scenario, setup_of(scenario, requests), cases(scenario)[0], 1, requests, lambda *at: told.append(at)
    )
    assert told[-1][0] == 120
    assert told[-1][1] >= result.seconds > 0


def test_limits_of_the_router_refuse() -> None:
    runs, _ = run("[route]\nttft_s = 0.06\nadmit_share = 1.0")
    assert all(run.summary.outcomes["limited"] > 0 for run in runs)
    assert all(run.events["deadline"] > 0 for run in runs)


def test_a_worker_that_dies_costs_time_and_no_request() -> None:
    runs, _ = run("")
    broken, _ = run("[[faults]]\nat = 5.0\nfor = 10.0\nwhat = 'dead'\nwho = 'p1'")
    for whole, part in zip(runs, broken, strict=True):
        assert part.summary.outcomes["complete"] == whole.summary.outcomes["complete"] == 108
        assert part.summary.busy["p1"] < whole.summary.busy["p1"]
        assert part.summary.ttft.mean > whole.summary.ttft.mean


def test_slow_workers_get_less() -> None:
    text = SMALL.replace("servers = 3", "servers = 3\nspeeds = { p0 = 0.2 }")
    scenario = decode(text.encode())
    requests = arrivals.load(scenario.trace)
    _, result = play(scenario, setup_of(scenario, requests), cases(scenario)[0], 1, requests)
    log = result.log
    cost = (log.computed - log.began) / (log.prompt - log.cached)
    assert np.median(cost[log.prefill == 0]) > 2 * np.median(cost[log.prefill == 1])
    assert (log.prefill == 0).sum() < (log.prefill == 1).sum()


@pytest.mark.parametrize(
    ("text", "kind"),
    [("", Single), ("topology = 'racks'\nracks = 2\nuplinks = 4", Racks), ("topology = 'fat-tree'", FatTree),
     ("topology = 'rails'\nuplinks = 2", Rails)],
)  # fmt: skip
def test_topologies(text: str, kind: type) -> None:
    scenario = decode(f"[network]\n{text}".encode())
    requests = arrivals.load(scenario.trace)
    found = fabric(scenario, setup_of(scenario, requests))
    assert isinstance(found, kind)
    if isinstance(found, FatTree):
        assert found.k == 8  # 104 NICs: 8^3 / 4 = 128 have room, 6^3 / 4 = 54 not


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[decode]\nservers = 5", "one switch would need 136 ports for NICs and has 128"),
        ("[network]\ntopology = 'rails'", r"network\.uplinks: flow control chooses the NICs of both sides apart"),
        ("[network]\ntopology = 'fat-tree'\ntree = 4", "k = 8 has room"),
        ("[[faults]]\nat = 1.0\nwhat = 'dead'\nwho = 'p12'", "there is no worker 'p12'; did you mean"),
        ("[[faults]]\nat = 1.0\nwhat = 'port'\nwho = 'x'\nfactor = 0.0", "there is no port 'x'"),
    ],
)  # fmt: skip
def test_what_no_run_could_be_made_of_is_refused_before(text: str, told: str) -> None:
    scenario = decode(text.encode())
    requests = arrivals.load(scenario.trace)
    with pytest.raises(ConfigError, match=told):
        setup_of(scenario, requests)

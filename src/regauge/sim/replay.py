"""A scenario's cases, each with each seed, run and summed up. What is random is the seed's alone: cases of one seed see the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from regauge.config_route import RouteConfig
from regauge.errors import ConfigError
from regauge.move.flow_types import POLICIES
from regauge.sim import faults
from regauge.sim.arrivals import Requests
from regauge.sim.confidence import Estimate, paired
from regauge.sim.fleet import Cluster, Fleet, Result
from regauge.sim.results import Report, Run, versions
from regauge.sim.scenario import Scenario
from regauge.sim.setup import Setup, prepare
from regauge.sim.summary import Summary, flat, pooled, summarize
from regauge.sim.topology import Ends, FatTree, Racks, Rails, Single, Topology

FLOWS = {policy.name: policy for policy in POLICIES}
Progress = Callable[[int, float], None]
"""Told requests over, and seconds simulated."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a comparison."""

    name: str
    route: RouteConfig
    flow: str


def cases(scenario: Scenario) -> list[Case]:
    """Return what is compared: all routing policies with all flow controls that the scenario names."""
    policies = list(dict.fromkeys(scenario.run.policies)) or [scenario.route.policy]
    flows = list(dict.fromkeys(scenario.run.flows)) or [scenario.network.flow]
    return [
        Case(policy if len(flows) == 1 else f"{policy}, {flow}", replace(scenario.route, policy=policy), flow)
        for policy in policies
        for flow in flows
    ]


def seeds(scenario: Scenario) -> list[int]:
    """Return the scenario's seeds."""
    return [scenario.run.first_seed + i for i in range(scenario.run.seeds)]


def cluster(scenario: Scenario, setup: Setup, flow: str, block: int) -> Cluster:
    """Return the simulator's cluster, with the flow control of that name. Raises ConfigError for a network that cannot be."""
    return Cluster(
        prefills=scenario.prefill.servers,
        decodes=scenario.decode.servers,
        prefill=setup.prefill,
        decode=setup.decode,
        slow={int(name[1:]): speed for name, speed in scenario.prefill.speeds.items()},
        bytes_per_token=setup.bytes_per_token,
        prefill_nic=setup.prefill_nic.bytes_per_s,
        decode_nic=setup.decode_nic.bytes_per_s,
        prefill_nics=setup.prefill_nic.count,
        decode_nics=setup.decode_nic.count,
        fabric=fabric(scenario, setup),
        transfers=scenario.network.transfers,
        flow_policy=FLOWS[flow],
        block=block,
    )


def fabric(scenario: Scenario, setup: Setup) -> Topology:
    """Return what lies between the NICs. Cables carry what the faster side's NICs do. Raises ConfigError for too few ports."""
    table = scenario.network
    ends = Ends(scenario.prefill.servers, scenario.decode.servers, setup.prefill_nic.count, setup.decode_nic.count)
    rate = max(setup.prefill_nic.bytes_per_s, setup.decode_nic.bytes_per_s)
    if table.topology == "switch":
        return Single(ends, table.switch_ports)
    if table.topology == "rails":
        if not table.uplinks and (ends.sender_nics, ends.receiver_nics) != (1, 1):
            raise ConfigError(
                "network.uplinks: flow control chooses the NICs of both sides apart, so that transfers cross rails; give each rail some"
            )
        return Rails(ends, table.uplinks, rate if table.uplinks else 0.0, table.switch_ports)
    if table.topology == "racks":
        return Racks(ends, table.racks, table.uplinks or 1, rate, table.switch_ports)
    return FatTree(ends, table.tree or least_tree(ends), rate)


def least_tree(ends: Ends) -> int:
    """Return the ports of the smallest switches of which a fat tree holds all NICs."""
    k = 2
    while k**3 // 4 < ends.nics:
        k += 2
    return k


def play(
    scenario: Scenario, setup: Setup, case: Case, seed: int, requests: Requests, progress: Progress | None = None
) -> tuple[Run, Result]:
    """Run one case with one seed; the result's log has the warm requests, too, the summary has not."""
    fleet = _fleet(scenario, setup, case, seed, requests.block)
    told = None if progress is None else lambda done: progress(done, fleet.clock.now)
    result = fleet.run(requests.of(seed), progress=told)
    warm = int(scenario.run.warm * len(result.log))
    summary = summarize(result, scenario.slo.ttft_s, scenario.slo.tpot_s, warm)
    return Run(
        case.name, seed, summary, {str(k): v for k, v in result.decisions.items()} | {"events": result.events}
    ), result


def report(scenario: Scenario, requests: Requests, setup: Setup, runs: Sequence[Run]) -> Report:
    """Return all runs as one report."""
    by_case: dict[str, list[Summary]] = {}
    for run in runs:
        by_case.setdefault(run.case, []).append(run.summary)
    together = [pooled(case, summaries) for case, summaries in by_case.items()]
    notes = [*setup.notes, *requests.notes]
    return Report(scenario, list(runs), together, requests.told(), versions(), notes)


def differences(runs: Sequence[Run], case: str, other: str, names: Sequence[str]) -> dict[str, Estimate]:
    """Return a case's figures minus another's, seed by seed; names as in `summary.flat`. Raises ConfigError for unlike seeds."""
    rows = {
        which: [flat(run.summary) for run in sorted(runs, key=lambda run: run.seed) if run.case == which]
        for which in (case, other)
    }
    return {name: paired([row[name] for row in rows[case]], [row[name] for row in rows[other]]) for name in names}


def setup_of(scenario: Scenario, requests: Requests) -> Setup:
    """Return the setup of a scenario, for its requests' blocks. Raises ConfigError, LayoutError for all that a run would."""
    setup = prepare(scenario, requests.block)
    for case in cases(scenario):
        _fleet(scenario, setup, case, scenario.run.first_seed, requests.block)
    return setup


def _fleet(scenario: Scenario, setup: Setup, case: Case, seed: int, block: int) -> Fleet:
    route = replace(case.route, block_tokens=block)
    broken = faults.parse(scenario.faults, "scenario")
    return Fleet(cluster(scenario, setup, case.flow, block), route, seed, faults=broken)

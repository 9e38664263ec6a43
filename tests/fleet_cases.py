"""Small random clusters, traces and faults, and what must hold after any run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import strategies as st

from regauge.config import RouteConfig
from regauge.config_route import PolicyName
from regauge.move.flow_types import POLICIES
from regauge.sim.cluster import Cluster, Level, Result
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.faults import Fault
from regauge.sim.fleet import Fleet
from regauge.sim.log import COMPLETE
from regauge.sim.trace import Arrival

KINDS: tuple[Literal["dead", "slow", "port"], ...] = ("dead", "slow", "port")
POLICY_NAMES: tuple[PolicyName, ...] = ("round-robin", "least-load", "prefix", "cache+load", "network-aware")


@st.composite
def clusters(draw: st.DrawFn, levels: Sequence[Level] = ("fluid", "flow", "protocol")) -> Cluster:
    """Up to 3 + 3 workers, few slots and pages, NICs that are soon full."""
    computer = draw(st.sampled_from((None, PrefillModel(4_000.0, cache_blocks=20))))
    return Cluster(
        prefills=draw(st.integers(1, 3)),
        decodes=draw(st.integers(1, 3)),
        prefill=PrefillModel(draw(st.sampled_from((5_000.0, 50_000.0))), cache_blocks=draw(st.integers(0, 30))),
        decode=DecodeModel(
            slots=draw(st.integers(1, 6)),
            pages=draw(st.sampled_from((200, 10_000))),
            step_token_s=draw(st.sampled_from((0.0, 1e-6))),
            computer=computer,
            beside=draw(st.sampled_from((0.0, 0.5))),
        ),
        bytes_per_token=1e5,
        prefill_nic=1e9,
        decode_nic=draw(st.sampled_from((1e8, 2e9))),
        prefill_nics=draw(st.integers(1, 2)),
        decode_nics=draw(st.integers(1, 2)),
        transfers=draw(st.sampled_from(levels)),
        flow_policy=draw(st.sampled_from(POLICIES)),
        wait_s=5.0,
    )


@st.composite
def traces(draw: st.DrawFn) -> list[Arrival]:
    """Up to 15 requests, some of which wait for others."""
    count = draw(st.integers(1, 15))
    gaps = draw(st.lists(st.sampled_from((0.0, 0.05, 0.5)), min_size=count, max_size=count))
    arrivals: list[Arrival] = []
    at = 0.0
    for i, gap in enumerate(gaps):
        tokens = draw(st.integers(1, 6_000))
        blocks = tuple(range(draw(st.integers(0, 3)), tokens // 512))
        after = draw(st.integers(-1, i - 1)) if i else -1
        at += gap
        arrivals.append(Arrival(at, tokens, draw(st.integers(1, 40)), blocks, after, 0.1 if after >= 0 else 0.0))
    return arrivals


@st.composite
def schedules(draw: st.DrawFn, cluster: Cluster) -> tuple[Fault, ...]:
    """Up to four faults of any kind; some last to the end."""
    workers = [f"p{i}" for i in range(cluster.prefills)] + [f"d{i}" for i in range(cluster.decodes)]
    faults = []
    for _ in range(draw(st.integers(0, 4))):
        what = draw(st.sampled_from(KINDS))
        who = draw(st.sampled_from(sorted(cluster.all_ports()) if what == "port" else workers))
        factor = {"dead": None, "slow": 3.0, "port": draw(st.sampled_from((0.0, 0.5)))}[what]
        lasts = draw(st.sampled_from((0.5, 4.0, None)))
        faults.append(Fault(at=draw(st.floats(0, 5)), what=what, who=who, seconds=lasts, factor=factor))
    return tuple(faults)


def serve(
    cluster: Cluster,
    arrivals: Sequence[Arrival],
    policy: PolicyName = "network-aware",
    faults: Sequence[Fault] = (),
    offload_tokens: int = 0,
) -> tuple[Fleet, Result]:
    """Serve a trace to its end."""
    fleet = Fleet(
        cluster, RouteConfig(policy=policy, block_tokens=512, offload_tokens=offload_tokens), 1, faults=faults
    )
    return fleet, fleet.run(arrivals)


def check(fleet: Fleet, result: Result, arrivals: Sequence[Arrival]) -> None:
    """Every request ended once; bytes and tokens add up; nothing is held, booked or counted on afterwards."""
    log, cluster = result.log, fleet.cluster
    assert len(log) == len(arrivals)
    assert list(log.prompt) == [each.tokens for each in arrivals]
    assert list(log.output) == [each.output for each in arrivals]
    done = log.outcome == COMPLETE
    once = done & (log.attempts == 1)
    assert ((log.cached >= 0) & (log.cached < log.prompt))[once].all()
    assert (log.attempts[done] >= 1).all()
    crossed = done & (log.prefill >= 0)
    steps = (log.at, log.seated, log.began, log.computed, log.landed, log.ended)
    for before, after in pairwise(steps):
        assert (before <= after)[crossed].all()
    assert np.isfinite(log.first[done]).all()
    assert (log.first <= log.ended)[done].all()
    # Every byte of a transfer that was not cut short is there, and no byte crossed a port for nobody.
    whole = crossed & (log.attempts == 1)
    assert log.nbytes[whole] == pytest.approx(log.prompt[whole] * cluster.bytes_per_token)
    for role, count in (("p", cluster.prefills), ("d", cluster.decodes)):
        sent = sum(result.carried[nic] for i in range(count) for nic in cluster.nics(f"{role}{i}"))
        assert sent == pytest.approx(log.nbytes.sum(), rel=1e-6, abs=10.0)
    assert fleet.open == 0
    assert fleet.router.booked == 0
    for standing in fleet.router.workers.values():
        assert not standing.queue
        assert not standing.seats
        assert not len(standing.nic)
        assert standing.queue_s == pytest.approx(0.0, abs=1e-9)
    for decode in fleet.decodes.values():
        assert (decode.seats, decode.pages_used, decode.batch, decode.waiting) == (0, 0, 0, 0)
        assert decode.resident == 0
    for prefill in fleet.prefills.values():
        assert prefill.current is None
        assert prefill.waiting == 0
        assert prefill.queued_tokens() == 0
    assert all(abs(planned) < 1e-3 for planned in fleet.transfers.paths.planned.values())

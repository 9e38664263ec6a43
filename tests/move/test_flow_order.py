"""Who comes next: deadlines, sizes, age, tenants."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.config import FlowConfig
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_ledger import Flow
from regauge.move.flow_order import Order
from regauge.move.flow_types import Credit, Demand, FlowAction, NicLimits, Rank

RATE = 1_000.0
LIMITS = FlowConfig(quantum_bytes=10, unscheduled_bytes=0, urgent_s=0.0, max_wait_s=1e9)


def order(limits: FlowConfig = LIMITS, now: float = 0.0) -> Order:
    return Order(limits, RATE, now, now)


def flow(name: str, nbytes: int, deadline: float | None = None, *, bulk: bool = False) -> Flow:
    return Flow(Demand(name, "p", nbytes, deadline=deadline, bulk=bulk), 0.0, nbytes, ready=nbytes)


def names(flows: list[Flow]) -> list[str]:
    return [f.demand.transfer for f in flows]


def test_without_deadlines_the_shortest_comes_first_and_bulk_last() -> None:
    small, large, bulk = flow("s", 10), flow("l", 1_000), flow("b", 1, bulk=True)
    assert order().first([large, bulk, small], 10) == (small, Rank.NORMAL)
    assert order().first([bulk], 10) == (bulk, Rank.BULK)


def test_what_remains_counts_not_what_was_announced() -> None:
    nearly = flow("nearly", 1_000)
    nearly.granted = 995
    assert order().first([flow("small", 10), nearly], 10)[0] is nearly


def test_a_deadline_passes_shorter_ones_only_when_its_slack_is_gone() -> None:
    small, due = flow("s", 100), flow("d", 500, deadline=0.7)
    assert order(now=0.0).first([small, due], 10) == (small, Rank.NORMAL)
    assert order(now=0.195).first([small, due], 10) == (due, Rank.URGENT)


def test_a_late_transfer_takes_no_slack_of_others_and_is_not_last_either() -> None:
    late, due, free = flow("late", 100, deadline=0.05), flow("due", 500, deadline=0.6), flow("free", 800)
    assert order().on_time([late, due, free]) == [due]
    assert order().first([late, due, free], 10) == (late, Rank.NORMAL)
    assert order(now=0.095).first([late, due, free], 10) == (due, Rank.URGENT)
    last = FlowConfig(quantum_bytes=10, urgent_s=0.0, late="last")
    assert order(last).first([late, due, free], 10)[0] is due
    assert order(last).first([late], 10) == (late, Rank.BULK)


def test_urgent_ones_leave_the_longest_behind_when_not_all_can_be_on_time() -> None:
    # Earliest deadline first would serve "long", and miss all three.
    long, a, b = flow("long", 900, deadline=0.95), flow("a", 300, deadline=1.0), flow("b", 300, deadline=1.05)
    assert names(order().on_time([long, a, b])) == ["a", "b"]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), min_size=1, max_size=7),
)
def test_no_other_set_keeps_more_deadlines(jobs: list[tuple[int, int]]) -> None:
    flows = [flow(str(i), 10 * needs, deadline=due / 100 + 1e-9) for i, (needs, due) in enumerate(jobs)]
    kept = order().on_time(flows)

    def feasible(chosen: tuple[tuple[int, int], ...]) -> bool:
        end = 0
        for needs, due in sorted(chosen, key=lambda job: job[1]):
            end += needs
            if end > due:
                return False
        return True

    most = max(n for n in range(len(jobs) + 1) if any(map(feasible, itertools.combinations(jobs, n))))
    assert len(kept) == most
    assert feasible(tuple(jobs[int(name)] for name in names(kept)))


class Line:
    """A receiver whose single sender has everything ready: each granted byte lands after its time on the wire."""

    def __init__(self, limits: FlowConfig) -> None:
        self.flow = ReceiverFlow([NicLimits("a", RATE, 0.001, 20)], limits=limits)
        self.now = 0.0
        self.got: dict[str, int] = {}
        self.landed: dict[str, int] = {}
        self.ends: dict[str, float] = {}
        self.queue: list[tuple[str, int]] = []

    def add(self, demand: Demand) -> None:
        self.take(self.flow.arrive(demand, self.now))
        self.take(self.flow.backlog(demand.transfer, demand.nbytes, self.now))

    def take(self, actions: list[FlowAction]) -> None:
        for action in actions:
            if isinstance(action, Credit):
                new = action.data_bytes - self.got.get(action.transfer, 0)
                self.got[action.transfer] = action.data_bytes
                self.queue += [(action.transfer, new)] if new else []

    def step(self) -> None:
        name, nbytes = self.queue.pop(0)
        self.now += nbytes / RATE
        self.landed[name] = self.landed.get(name, 0) + nbytes
        known = self.flow.transfers[name]
        self.take(self.flow.landed(name, self.landed[name], self.now))
        if self.landed[name] == known.total:
            self.ends[name] = self.now
            self.take(self.flow.end(name, self.now))


def test_nobody_starves_however_many_shorter_ones_come() -> None:
    limits = FlowConfig(quantum_bytes=10, unscheduled_bytes=0, max_wait_s=1.0, aged_share=0.2, fair_s=1e6)
    line = Line(limits)
    line.add(Demand("large", "p", 400))
    for i in range(2_000):
        line.add(Demand(f"s{i}", "p", 20))
        line.step()
        if "large" in line.ends:
            break
    # It waits max_wait_s, then takes a fifth of the link: 400 bytes in 2 s.
    assert 1.0 < line.ends["large"] <= 1.0 + 2.0 + 0.2


def test_without_aging_it_would_starve() -> None:
    line = Line(LIMITS)
    line.add(Demand("large", "p", 400))
    for i in range(500):
        line.add(Demand(f"s{i}", "p", 20))
        line.step()
    assert "large" not in line.ends


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_tenant_with_backlog_gets_its_share_over_any_horizon(data: st.DataObject) -> None:
    """From when its backlog begins, a tenant is behind its weighted share by `fair_s` of the NIC and a quantum per tenant at most."""
    tenants = data.draw(st.integers(2, 4))
    weights = {str(i): data.draw(st.sampled_from([0.5, 1.0, 3.0])) for i in range(tenants)}
    fair_s = data.draw(st.sampled_from([0.05, 0.2, 1.0]))
    limits = FlowConfig(quantum_bytes=10, unscheduled_bytes=0, max_wait_s=1e9, fair_s=fair_s, shares=weights)
    line = Line(limits)
    sizes = {str(i): data.draw(st.sampled_from([20, 100, 1_000])) for i in range(tenants)}
    count = 0
    start: dict[str, int] = {}
    for _ in range(400):
        for tenant in weights:
            while sum(f.hungry for f in line.flow.transfers.values() if f.demand.tenant == tenant) < 3:
                count += 1
                line.add(Demand(f"{tenant}:{count}", "p", sizes[tenant], tenant=tenant))
        granted = {t: sum(n for name, n in line.got.items() if name.startswith(t + ":")) for t in weights}
        start = start or dict(granted)
        given_ = {t: granted[t] - start[t] for t in weights}
        for tenant, weight in weights.items():
            share = sum(given_.values()) * weight / sum(weights.values())
            # Once more at the start: the first grants were made before the last tenant had come.
            assert given_[tenant] >= share - 2 * fair_s * RATE - 10 * tenants
        line.step()

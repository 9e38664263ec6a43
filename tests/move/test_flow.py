"""Receiver-driven flow control: placement, admission, windows, leases."""

import pytest

from regauge.config import FlowConfig
from regauge.errors import ConfigError, ProtocolError
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_types import (
    PEER_FIFO,
    UNCONTROLLED,
    Admit,
    Credit,
    Demand,
    FlowAction,
    Late,
    NicLimits,
    Rank,
    Refuse,
)

RATE = 1e9
Q = 1_000
LIMITS = FlowConfig(quantum_bytes=Q, unscheduled_bytes=0, lease_s=2.0)


def nic(name: str = "a", window: int | None = 4 * Q) -> NicLimits:
    return NicLimits(name, RATE, 0.001, window)


def credited(actions: list[FlowAction]) -> dict[str, int]:
    return {a.transfer: a.data_bytes for a in actions if isinstance(a, Credit)}


def ready(flow: ReceiverFlow, demand: Demand, now: float = 0.0) -> list[FlowAction]:
    return [*flow.arrive(demand, now), *flow.backlog(demand.transfer, demand.nbytes, now)]


def test_credit_covers_only_what_is_ready_and_within_the_window() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    assert flow.arrive(Demand("t", "p", 100 * Q, pages=3), 0.0) == [Admit("t", "p", "a", 3)]
    assert credited(flow.backlog("t", 2 * Q, 0.0)) == {"t": 2 * Q}
    assert credited(flow.backlog("t", 100 * Q, 0.0)) == {"t": 4 * Q}
    assert flow.backlog("t", 100 * Q, 0.0) == []
    assert credited(flow.landed("t", Q, 0.1)) == {"t": 5 * Q}
    assert flow.landed("t", Q, 0.1) == [], "repeated words change nothing"


def test_a_credit_is_whole_quanta_or_all_that_is_left() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    ready(flow, Demand("t", "p", 5 * Q + 7))
    assert credited(flow.landed("t", Q // 2, 0.0)) == {}
    assert credited(flow.landed("t", Q, 0.0)) == {"t": 5 * Q}
    assert credited(flow.landed("t", 2 * Q, 0.0)) == {"t": 5 * Q + 7}
    # 3,007 are outstanding: a quantum does not fit, whoever asks for it.
    assert credited(ready(flow, Demand("u", "q", Q))) == {}
    assert credited(flow.landed("t", 2 * Q + 7, 0.0)) == {"u": Q}


def test_a_chunk_larger_than_the_window_goes_alone() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    assert credited(ready(flow, Demand("big", "p", 30 * Q, unit_bytes=15 * Q))) == {"big": 15 * Q}
    assert credited(ready(flow, Demand("next", "q", Q))) == {}
    assert credited(flow.landed("big", 14 * Q, 0.0)) == {"next": Q}
    assert credited(flow.landed("next", Q, 0.0)) == {}, "another unit does not fit beside what is outstanding"
    assert credited(flow.landed("big", 15 * Q, 0.0)) == {"big": 30 * Q}


def test_placed_on_the_nic_with_the_least_in_front_of_it_among_those_allowed() -> None:
    flow = ReceiverFlow([nic("a"), NicLimits("fast", 10 * RATE, 0.001, 4 * Q), nic("b")], limits=LIMITS)

    def where(demand: Demand) -> str:
        [admit] = [a for a in flow.arrive(demand, 0.0) if isinstance(a, Admit)]
        return admit.nic

    assert where(Demand("1", "p", 10_000, nics=("a",))) == "a"
    assert where(Demand("2", "p", 20_000, nics=("fast",))) == "fast"
    assert where(Demand("3", "p", 5_000, nics=("a", "b"))) == "b"
    assert where(Demand("4", "p", 5_000)) == "fast", "20,000 bytes at ten times the rate are less than 5,000"


def test_pages_and_bytes_are_lent_together() -> None:
    flow = ReceiverFlow([nic()], pages=10, limits=LIMITS)
    assert flow.arrive(Demand("a", "p", Q, pages=8), 0.0) == [Admit("a", "p", "a", 8)]
    assert flow.arrive(Demand("b", "q", Q, pages=3), 0.0) == []
    assert flow.backlog("b", Q, 0.0) == [], "no pages, no credit"
    assert flow.end("a", 0.1) == []
    assert flow.pages_free == 2, "pages outlive the bytes: the engine reads them"
    with pytest.raises(ProtocolError, match="before it has ended"):
        flow.free("b", 0.1)
    actions = flow.free("a", 0.2)
    assert actions[0] == Admit("b", "q", "a", 3)
    assert credited(actions) == {"b": Q}
    flow.end("b", 0.3)
    flow.free("b", 0.3)
    assert flow.pages_free == 10


def test_pages_go_by_deadline_and_small_ones_pass_until_the_large_one_has_aged() -> None:
    flow = ReceiverFlow([nic()], pages=10, limits=LIMITS)
    flow.arrive(Demand("held", "p", Q, pages=5), 0.0)
    flow.arrive(Demand("large", "p", Q, pages=9), 0.0)
    assert [type(a) for a in flow.arrive(Demand("small", "p", Q, pages=2), 1.0)] == [Admit]
    flow.end("small", 1.5)
    flow.free("small", 1.5)
    assert flow.arrive(Demand("later", "p", Q, pages=2), LIMITS.max_wait_s) == [], (
        "the large one has waited long enough"
    )
    flow.end("held", 3.0)
    actions = flow.free("held", 3.0)
    assert [a.transfer for a in actions if isinstance(a, Admit)] == ["large"]


def test_a_link_with_too_much_ahead_of_it_lends_no_pages() -> None:
    limits = FlowConfig(quantum_bytes=Q, commit_s=1.0)
    flow = ReceiverFlow([nic()], pages=100, limits=limits)
    flow.arrive(Demand("long", "p", int(3 * RATE), pages=1), 0.0)
    assert flow.arrive(Demand("more", "q", int(RATE / 2), pages=1), 0.0) == []
    assert flow.pages_free == 99
    assert [a.transfer for a in flow.end("long", 1.0) if isinstance(a, Admit)] == ["more"]


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        (Demand("x", "p", Q, pages=11), "needs 11 pages, the pool has 10"),
        (Demand("x", "p", 1 << 30, unit_bytes=(64 << 20) + 1), "send chunks of at most 67108864"),
        (Demand("x", "p", Q, nics=("z",)), "none of the NICs z is here: a are"),
        (Demand("x", "p", int(RATE), deadline=0.5), "its deadline is in 0.5 s"),
    ],
)
def test_refusals_say_why_and_hold_nothing(demand: Demand, reason: str) -> None:
    flow = ReceiverFlow([nic()], pages=10, limits=FlowConfig(late="refuse"))
    [refused] = flow.arrive(demand, 0.0)
    assert isinstance(refused, Refuse)
    assert reason in refused.reason
    assert not flow.transfers
    assert flow.pages_free == 10


def test_as_many_transfers_as_allowed() -> None:
    flow = ReceiverFlow([nic()], limits=FlowConfig(max_transfers=1))
    flow.arrive(Demand("1", "p", Q), 0.0)
    [refused] = flow.arrive(Demand("2", "p", Q), 0.0)
    assert isinstance(refused, Refuse)
    assert "max_transfers" in refused.reason


def test_small_transfers_go_at_once_within_their_budget() -> None:
    limits = FlowConfig(quantum_bytes=Q, unscheduled_bytes=Q, unscheduled_budget_bytes=2 * Q)
    flow = ReceiverFlow([nic()], limits=limits)
    assert credited(flow.arrive(Demand("1", "p", Q), 0.0)) == {"1": Q}, "before any byte is ready"
    assert credited(flow.arrive(Demand("2", "q", Q), 0.0)) == {"2": Q}
    assert credited(flow.arrive(Demand("3", "r", Q), 0.0)) == {}, "the budget is used up"
    assert credited(flow.arrive(Demand("4", "r", Q + 1), 0.0)) == {}
    assert credited(flow.backlog("4", Q + 1, 0.0)) == {"4": Q + 1}
    [state] = flow.links()
    assert (state.granted_bytes, state.unscheduled_bytes) == (3 * Q + 1, 2 * Q)
    flow.landed("1", Q, 0.1)
    flow.end("2", 0.1)
    assert flow.links()[0].unscheduled_bytes == 0


def test_credit_of_a_silent_sender_goes_to_others_under_a_new_epoch() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    ready(flow, Demand("frozen", "p", 10 * Q))
    flow.landed("frozen", Q, 0.0)
    # Longer than the frozen one, so that only its credit standing still brings it forward.
    assert credited(ready(flow, Demand("other", "q", 50 * Q))) == {}
    assert credited(flow.tick(0.01)) == {}
    assert credited(flow.tick(0.06)) == {"other": 4 * Q}, "credit that stands still is replaced"
    assert flow.links()[0].stalled_bytes == 4 * Q
    flow.renew("other", 2.0)
    flow.tick(2.1)
    state = flow.links()[0]
    assert (state.granted_bytes, state.stalled_bytes) == (4 * Q, 4 * Q)
    frozen = flow.transfers["frozen"]
    assert (frozen.epoch, frozen.granted, frozen.landed) == (1, Q, Q)
    # It thaws, and gets credit anew, which moves as any other.
    flow.end("other", 2.1)
    assert credited(flow.renew("frozen", 2.15))["frozen"] == 5 * Q
    assert flow.links()[0].stalled_bytes == 0
    # What it had sent before lands after all.
    [credit] = [a for a in flow.landed("frozen", 3 * Q, 2.2) if isinstance(a, Credit)]
    assert (credit.transfer, credit.epoch, credit.data_bytes) == ("frozen", 1, 7 * Q)


def test_more_than_was_ever_granted_is_a_breach() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    ready(flow, Demand("t", "p", 10 * Q))
    with pytest.raises(ProtocolError, match="sent 4001 bytes on a credit of 4000"):
        flow.landed("t", 4 * Q + 1, 0.0)
    with pytest.raises(ProtocolError, match="announced 10000 bytes, not 20001"):
        flow.backlog("t", 20_001, 0.0)
    with pytest.raises(ProtocolError, match="known already"):
        flow.arrive(Demand("t", "p", 1), 0.0)
    assert flow.landed("over", 5, 0.0) == flow.backlog("over", 5, 0.0) == flow.renew("over", 0.0) == []


def test_a_chunk_that_is_sent_again_makes_the_transfer_longer() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    ready(flow, Demand("t", "p", 2 * Q))
    flow.landed("t", 2 * Q, 0.0)
    assert credited(flow.backlog("t", 3 * Q, 0.1)) == {"t": 3 * Q}
    assert flow.links()[0].backlog_bytes == Q


def test_credit_is_repeated_before_it_goes_stale_to_a_sender_that_lives() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    [first] = [a for a in ready(flow, Demand("t", "p", 2 * Q)) if isinstance(a, Credit)]
    assert flow.tick(0.3) == []
    flow.renew("t", 0.35)
    [again] = flow.tick(0.4)
    assert isinstance(again, Credit)
    assert (again.epoch, again.data_bytes, again.sequence) == (first.epoch, first.data_bytes, first.sequence + 1)
    assert again.freshness_s == LIMITS.lease_s / 2


def test_one_slow_sender_leaves_the_rest_of_the_window_to_others() -> None:
    flow = ReceiverFlow([NicLimits("a", 1e9, 0.001)], limits=FlowConfig(quantum_bytes=50_000, unscheduled_bytes=0))
    ready(flow, Demand("first", "q", 50_000))
    flow.landed("first", 50_000, 0.001)
    flow.end("first", 0.001)
    ready(flow, Demand("slow", "p", 10_000_000), 0.001)
    window = flow.links()[0].window_bytes
    assert flow.transfers["slow"].outstanding > 0.9 * window
    now, landed = 0.001, 0
    for _ in range(60):
        # 1 % of the line rate, with all of the window at first.
        now, landed = now + 0.005, landed + 50_000
        flow.landed("slow", landed, now)
        flow.tick(now)
    slow = flow.transfers["slow"]
    assert slow.outstanding < 0.25 * window
    assert flow.links()[0].bytes_per_s < 0.03e9, "about what the link does at present"
    ready(flow, Demand("brisk", "q", 100_000_000), now)
    assert flow.links()[0].bytes_per_s > 0.9e9, "the slow sender set the pace, the NIC did not"
    assert flow.transfers["brisk"].outstanding > 10 * 50_000


def test_the_window_follows_the_measured_rate_and_delay() -> None:
    flow = ReceiverFlow([NicLimits("a", 1e9, 0.001)], limits=FlowConfig(quantum_bytes=50_000, unscheduled_bytes=0))
    before = flow.links()[0]
    assert before.window_bytes == int(1.25e6) + 2 * max(50_000, 125_000)
    for i in range(8):
        ready(flow, Demand(str(i), str(i), 40_000_000))
    now = 0.004
    # The NIC gives an eighth of its rate, and its first bytes took 4 ms.
    landed = dict.fromkeys(flow.transfers, 0)
    for _ in range(2_000):
        name = next(n for n, f in flow.transfers.items() if f.granted > landed[n])
        step = min(50_000, flow.transfers[name].granted - landed[name])
        landed[name] += step
        flow.landed(name, landed[name], now)
        now += step / 0.125e9
    after = flow.links()[0]
    assert after.bytes_per_s == pytest.approx(0.125e9, rel=0.1)
    assert after.rtt_s == pytest.approx(0.004)
    assert after.window_bytes == pytest.approx(4 * 0.125e9 * 0.004 + 2 * 62_500, rel=0.15)


def test_late_transfers_are_named_once() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    actions = flow.arrive(Demand("t", "p", int(RATE), deadline=0.5), 0.0)
    assert [type(a) for a in actions] == [Admit, Late]
    flow.backlog("t", int(RATE), 0.0)
    assert flow.tick(0.05) == []
    flow.arrive(Demand("u", "q", Q, deadline=0.1), 0.0)
    assert [a.transfer for a in flow.tick(0.2) if isinstance(a, Late)] == ["u"], "its bytes were not ready in time"


def test_baselines_grant_what_is_ready_at_once() -> None:
    free = ReceiverFlow([nic()], limits=LIMITS, policy=UNCONTROLLED)
    assert credited(ready(free, Demand("1", "p", 100 * Q))) == {"1": 100 * Q}
    fifo = ReceiverFlow([nic()], limits=LIMITS, policy=PEER_FIFO)
    ready(fifo, Demand("1", "p", 10 * Q))
    assert credited(ready(fifo, Demand("2", "p", Q))) == {}
    assert credited(ready(fifo, Demand("3", "q", 5 * Q))) == {"3": 5 * Q}
    assert credited(fifo.landed("1", 10 * Q, 0.0)) == {"2": Q}


def test_the_link_state_adds_up() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    ready(flow, Demand("t", "p", 10 * Q))
    flow.arrive(Demand("u", "q", 7 * Q), 0.0)
    flow.landed("t", Q, 0.0)
    [state] = flow.links()
    assert (state.granted_bytes, state.queued_bytes, state.backlog_bytes) == (4 * Q, 5 * Q, 16 * Q)
    assert state.backlog_s == 16 * Q / RATE
    assert flow.next_wake() is not None
    for name in ("t", "u"):
        flow.end(name, 0.1)
    [state] = flow.links()
    assert (state.transfers, state.granted_bytes, state.queued_bytes, state.backlog_bytes) == (0, 0, 0, 0)
    assert flow.next_wake() is None


def test_limits_name_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"NIC 'x'"):
        NicLimits("x", 0.0)
    with pytest.raises(ConfigError, match="overcommit"):
        FlowConfig(overcommit=0.5)
    with pytest.raises(ConfigError, match="shares"):
        FlowConfig(shares={"t": 0.0})
    with pytest.raises(ConfigError, match="aged_share"):
        FlowConfig(aged_share=1.0)
    with pytest.raises(ConfigError, match="one each"):
        ReceiverFlow([nic(), nic()])


def test_ranks_are_told_to_the_sender() -> None:
    flow = ReceiverFlow([nic()], limits=LIMITS)
    [_, credit] = ready(flow, Demand("t", "p", Q, deadline=10.0))
    assert isinstance(credit, Credit)
    assert credit.rank is Rank.NORMAL
    assert credit.slack_s == pytest.approx(10.0, abs=0.01)
    [_, credit] = ready(flow, Demand("u", "p", Q, bulk=True))
    assert isinstance(credit, Credit)
    assert credit.rank is Rank.BULK

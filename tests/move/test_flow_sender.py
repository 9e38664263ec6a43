"""The senders' half: credits obeyed, the receivers' order kept, the NIC's pace kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError, ProtocolError
from regauge.move.flow_sender import RECOVER_S, Pace, SenderFlow, Turn
from regauge.move.flow_types import Credit, NicLimits, Rank

NIC = NicLimits("tx", 1e6, 0.001)


def credit(transfer: str, upto: int, *, epoch: int = 0, sequence: int = 1, rank: Rank = Rank.NORMAL) -> Credit:
    return Credit(transfer, "d", "rx", epoch, sequence, upto, 1.0, rank, 0, None)


def sender(*transfers: tuple[str, int], order: str = "credit") -> SenderFlow:
    flow = SenderFlow([NIC], order=order, burst_bytes=1_000)  # type: ignore[arg-type]  # from parameters
    for name, nbytes in transfers:
        flow.offer(name, "d", nbytes, "tx")
        flow.ready(name, nbytes)
    return flow


def drain(flow: SenderFlow, most: int = 100) -> list[str]:
    now, out = 0.0, []
    while True:
        turn = flow.choose("tx", now, most=most)
        if turn is None:
            wake = flow.next_wake("tx", now)
            if wake is None:
                return out
            now = wake
            continue
        flow.sent(turn.transfer, turn.nbytes, now)
        out.append(turn.transfer)


def test_only_what_is_computed_and_allowed_is_sent() -> None:
    flow = SenderFlow([NIC])
    flow.offer("t", "d", 500, "tx")
    flow.credit(credit("t", 300), 0.0)
    assert flow.choose("tx", 0.0) is None
    assert flow.ready("t", 200) == 200
    assert flow.choose("tx", 0.0) == Turn("t", "d", "rx", 0, 200)
    flow.sent("t", 150, 0.0)
    flow.ready("t", 500)
    assert flow.choose("tx", 0.0) == Turn("t", "d", "rx", 150, 150)
    with pytest.raises(ProtocolError, match="151 bytes to send, 150 are computed, allowed and fresh"):
        flow.sent("t", 151, 0.0)


def test_credits_may_be_repeated_overtaken_and_late() -> None:
    flow = sender(("t", 500))
    flow.credit(credit("t", 300, sequence=2), 0.0)
    flow.credit(credit("t", 100, sequence=1), 0.0)
    flow.credit(credit("gone", 100), 0.0)
    turn = flow.choose("tx", 0.0)
    assert turn is not None
    assert turn.nbytes == 300
    flow.credit(credit("t", 50, epoch=1), 0.0)
    flow.credit(credit("t", 400, sequence=9), 0.0)
    turn = flow.choose("tx", 0.0)
    assert turn is not None
    assert turn.nbytes == 50, "the old epoch's credit is over"


def test_credit_goes_stale_and_a_repetition_freshens_it() -> None:
    flow = sender(("t", 500))
    flow.credit(credit("t", 300), 0.0)
    flow.credit(credit("t", 300, sequence=1), 0.9)
    assert flow.choose("tx", 1.0) is None, "a duplicate of the same message makes nothing fresh"
    assert flow.next_wake("tx", 1.0) is None
    flow.credit(credit("t", 300, sequence=2), 1.0)
    assert flow.choose("tx", 1.5) is not None


def test_transfers_to_several_receivers_go_in_the_receivers_order() -> None:
    flow = sender(("bulk", 100), ("long", 300), ("short", 200), ("urgent", 400))
    for name, rank in (("bulk", Rank.BULK), ("long", Rank.NORMAL), ("short", Rank.NORMAL), ("urgent", Rank.URGENT)):
        flow.credit(credit(name, 400, rank=rank), 0.0)
    assert drain(flow) == ["urgent"] * 4 + ["short"] * 2 + ["long"] * 3 + ["bulk"]


def test_the_baselines_orders() -> None:
    fifo = sender(("a", 200), ("b", 100), order="fifo")
    fair = sender(("a", 200), ("b", 100), order="fair")
    for flow in (fifo, fair):
        for name in "ba":
            flow.credit(credit(name, 200), 0.0)
    assert drain(fifo) == ["a", "a", "b"]
    assert drain(fair) == ["a", "b", "a"]


def test_names_are_checked() -> None:
    flow = sender(("t", 1))
    with pytest.raises(ProtocolError, match="offered already"):
        flow.offer("t", "d", 1, "tx")
    with pytest.raises(ProtocolError, match="no NIC 'eth9'"):
        flow.offer("u", "d", 1, "eth9")
    with pytest.raises(ConfigError, match="one each"):
        SenderFlow([NIC, NIC])
    flow.end("t")
    assert not flow.transfers
    flow.sent("t", 1, 0.0)
    assert flow.ready("t", 1) == 0


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 0.002)), max_size=60), st.sets(st.integers(0, 59)))
def test_a_nic_never_sends_more_than_its_pace_and_one_burst(turns: list[tuple[int, float]], cuts: set[int]) -> None:
    pace, burst, now = Pace(1e6, 1_000), 1_000, 0.0
    sends: list[tuple[float, int]] = []
    for i, (nbytes, pause) in enumerate(turns):
        now += pause
        if i in cuts:
            pace.cut(now, 0.0005)
        if pace.wait(now) == 0:
            pace.take(nbytes, now)
            sends.append((now, nbytes))
    for first in range(len(sends)):
        total = 0
        for when, nbytes in sends[first:]:
            # A turn begins when the bucket is not empty: the last one may reach beyond.
            assert total <= burst + 1e6 * (when - sends[first][0]) + 1e-6
            total += nbytes


def test_waiting_as_long_as_told_is_enough() -> None:
    pace = Pace(1e6, 1_000)
    pace.take(5_000, 0.0)
    wait = pace.wait(0.0)
    assert wait == pytest.approx(0.004, rel=0.01)
    assert pace.wait(wait) == 0


def test_congestion_halves_the_pace_once_per_round_trip_and_it_climbs_back() -> None:
    flow = sender()
    flow.congested("tx", 0.0)
    flow.congested("tx", 0.0009)
    assert flow.pace("tx", 0.0) == 0.5e6
    before = flow.pace("tx", 0.001)
    flow.congested("tx", 0.001)
    assert flow.pace("tx", 0.001) == before / 2
    assert flow.pace("tx", 0.001 + 4 * RECOVER_S) == pytest.approx(before / 2 + 0.25e6)
    assert flow.pace("tx", 1.0) == 1e6
    for i in range(1_000):
        flow.congested("tx", 2.0 + 0.001_01 * i)
        assert flow.pace("tx", 2.0 + 0.001_01 * i) >= 1e6 / 64

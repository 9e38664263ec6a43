"""The transfer protocol over a faulty network, and rule by rule.

The random part runs `regauge.testing`: three prefill and two decode workers of one or two ranks, real machines and pools, simulated
memory and network. A step is one event of that world: a message read, a write landed, a chunk compared, a layer computed, a fault, ...
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_cases import (
    DIGEST,
    PAGES,
    checks,
    granted,
    kinds,
    offered,
    receiver,
    said,
    sender,
    word,
)

from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.counted import Counted
from regauge.move.flow_sender import Pace
from regauge.move.outleg import LinkTerms
from regauge.move.protocol import (
    Check,
    Delivered,
    Failed,
    FenceLink,
    Granted,
    Part,
    Released,
    Send,
    Write,
)
from regauge.move.receiver import Receiver
from regauge.move.sender import Sender
from regauge.testing import faults
from regauge.testing.shape import Group, Setup

# ---- over a faulty network ----


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), number=st.integers(0, 2**32))
def test_invariants_hold_over_a_faulty_network(seed: int, number: int) -> None:
    faults.run_world(seed, number, 400)


def test_ten_thousand_steps_inject_every_fault() -> None:
    outcome = faults.run(10_000, seed=4)
    assert outcome.steps >= 10_000
    assert outcome.stats["delivered on decode"] > 30
    assert set(outcome.faults) <= set(faults.FAULTS)
    for kind in faults.FAULTS:
        assert outcome.faults[kind] > 0, f"no {kind}"
    for end in faults.ENDS_OF_FAULTS.values():
        assert outcome.stats[end] > 0, f"no {end}"
    for ending in ("given up by a worker", "given up by the peer", "deadline", "lease over"):
        assert outcome.stats[f"failed: {ending}"] > 0, f"no transfer ended by {ending}"


@pytest.mark.parametrize("credit", [False, True])
@pytest.mark.parametrize("staged", [(), ("full", "window", "recurrent")])
def test_without_faults_every_transfer_is_delivered(staged: tuple[str, ...], *, credit: bool) -> None:
    def quiet(setup: Setup) -> Setup:
        return replace(setup, staged=staged, flow=faults.FLOW if credit else None)

    driver = faults.run_world(7, 0, 1_500, quiet, harsh=0.0)
    assert not driver.faults
    assert driver.world.stats["transfers"] > 5
    assert not [name for name in driver.world.stats if name.startswith("failed")]


def test_a_violation_is_told_with_its_seed_and_the_last_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receiver, "cancel", lambda *_: [])
    monkeypatch.setattr(Receiver, "tick", lambda *_: [])
    with pytest.raises(faults.Broken, match=r"(?s)seed 3, world \d+: .*the last events:\n.*heard ") as broken:
        faults.run(50_000, seed=3)
    number = int(str(broken.value).split("world ")[1].split(":")[0])
    with pytest.raises(faults.Broken) as again:
        faults.run_world(3, number, faults.WORLD_STEPS)
    assert str(again.value) == str(broken.value)


# ---- rule by rule ----


def test_layers_that_wait_are_written_together() -> None:
    s = sender()
    assert granted(s) == [Granted("t", 0)]
    (first,) = s.ready("t", (0, 1), (0, 8), 0.0)
    assert s.ready("t", (1, 2), (0, 8), 0.0) == s.ready("t", (2, 3), (0, 8), 0.0) == []
    assert isinstance(first, Write)
    told, second = s.written("t", "d", 1, first.seq, 8, DIGEST, 0.0)
    assert isinstance(told, Send)
    assert isinstance(second, Write)
    assert (second.layers, second.tokens, second.table) == ((1, 3), (0, 8), PAGES[0])


def test_a_nic_keeps_its_pace_and_other_nics_theirs() -> None:
    s = Sender(offer_s=10, deadline_s=100, resume_s=0, paces=[Pace(1_000.0, burst=16), Pace(1_000.0, burst=16)])
    parts = (Part(0, tuple(range(8))),)
    for peer, way in (("d", 0), ("e", 0), ("f", 1)):
        terms = LinkTerms(parts, lambda _, tokens: tokens, ways=(way,), chunk_bytes=8, depth=8)
        s.link_up(peer, terms, "i")
        s.offer(peer, [peer], 8, 0.0)
        s.on_message(peer, m.Grant(peer, 1, PAGES, 0, 30.0), 0.0)
    writes = [a for peer in "def" for a in s.ready(peer, (0, 8), (0, 8), 0.0) if isinstance(a, Write)]
    assert [w.peer for w in writes] == ["d", "d", "f", "f"]  # 16 bytes of each NIC, then it is e's turn to wait
    assert s.resume(0.0) == []
    assert s.wake == pytest.approx(0.001)
    assert [a.peer for a in s.resume(0.001) if isinstance(a, Write)] == ["d", "f"]
    assert s.wake == pytest.approx(0.009)


@pytest.mark.parametrize("nic", [0, 1, 2])
def test_credit_names_the_nic_that_the_bytes_go_to(nic: int) -> None:
    s = Sender(offer_s=10, deadline_s=100, resume_s=0)
    s.link_up("d", LinkTerms((Part(0, (0,)),), lambda _, tokens: tokens, ways=(0, 0)), "i")
    s.offer("t", ["d"], 8, 0.0)
    s.on_message("d", m.Grant("t", 1, PAGES, 0, 30.0, credit=0), 0.0)
    s.ready("t", (0, 1), (0, 8), 0.0)
    if nic == 2:
        with pytest.raises(ProtocolError, match="NIC 2, which it does not have"):
            s.on_message("d", m.Credit("t", 1, 8, nic=nic), 0.0)
        return
    [write] = s.on_message("d", m.Credit("t", 1, 8, nic=nic), 0.0)
    assert isinstance(write, Write)
    assert write.nic == nic


def test_chunks_are_announced_in_order_though_they_land_in_another() -> None:
    s = sender(depth=2, chunk_bytes=8)
    granted(s)
    first, second = s.ready("t", (0, 2), (0, 8), 0.0)
    assert isinstance(first, Write)
    assert isinstance(second, Write)
    assert said(s.written("t", "d", 1, second.seq, 8, DIGEST, 0.0)) == []
    announced = said(s.written("t", "d", 1, first.seq, 8, DIGEST, 0.0))
    assert [w.seq for w in announced if isinstance(w, m.Written)] == [0, 1]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (word(0, (0, 1), (0, 8), epoch=9), "has epoch 1, not 9"),
        (word(0, (0, 4), (0, 8)), "has no layers 0..3"),
        (word(0, (1, 1), (0, 8)), "has no layers"),
        (word(0, (0, 1), (0, 9)), "tokens 0..8"),
        (word(0, (0, 1), (4, 8)), "twice or out of order"),
        (word(1, (0, 1), (0, 8)), "twice or out of order"),
        (m.Written("t", 1, 0, 1, (0, 1), (0, 8), None, 1, DIGEST), "of pair 1"),
        (m.Finish("t", 1, 0, b""), "finished 't' with chunks missing"),
        (m.Finish("t", 2, 0, b""), "has epoch 1, not 2"),
        (m.Want("t", 2, 8), "has epoch 1, not 2"),
        (m.Fenced("t"), "which nobody asked for"),
        (m.Grant("t", 1, [], 0, 1.0), "which prefill does not say here"),
    ],
)
def test_a_prefill_that_breaks_the_rules_is_named(message: m.Message, complaint: str) -> None:
    r = receiver()
    offered(r)
    with pytest.raises(ProtocolError, match=complaint):
        r.on_message("p", message, 0.0)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (m.Again("t", 1, 0), "wants chunk 0 again, which was not written"),
        (m.Freed(0), "freed staging slot 0"),
        (m.Commit("t"), "before it was finished"),
        (m.Offer("t", 8), "which decode does not say here"),
    ],
)
def test_a_decode_that_breaks_the_rules_is_named(message: m.Message, complaint: str) -> None:
    s = sender()
    granted(s)
    with pytest.raises(ProtocolError, match=complaint):
        s.on_message("d", message, 0.0)


@pytest.mark.parametrize(
    ("grant", "complaint"),
    [
        (m.Grant("t", 1, [], 0, 10.0), "grants 0 page tables"),
        (m.Grant("t", 1, PAGES, 9, 10.0), "from token 9"),
        (m.Grant("t", 1, PAGES, 0, 10.0, None, [[0, 0]]), "it never wanted"),
        (m.Grant("t", 1, PAGES, 4, 10.0, None, [[0, 4, 4]]), "it never wanted"),
    ],
)
def test_a_grant_that_does_not_fit_is_refused(grant: m.Grant, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        granted(sender(), grant)


def test_a_peer_cannot_speak_of_anothers_transfer() -> None:
    s, r = sender(), receiver(peers=("p", "q"))
    r.expect("t", ["p"], 8, PAGES, 0.0)
    for message in (m.Offer("t", 8), m.Abort("t", "no")):
        with pytest.raises(ProtocolError, match="which is p's"):
            r.on_message("q", message, 0.0)
    with pytest.raises(ProtocolError, match="before any page was granted"):
        r.on_message("p", m.Renew("t"), 0.0)
    s.offer("t", ["d"], 8, 0.0)
    with pytest.raises(ProtocolError, match="which is d's"):
        s.on_message("e", m.Commit("t"), 0.0)
    with pytest.raises(ProtocolError, match="no link to nobody"):
        s.offer("u", ["d", "nobody"], 8, 0.0)
    with pytest.raises(ProtocolError, match="offered already"):
        s.offer("t", ["d"], 8, 0.0)
    with pytest.raises(ProtocolError, match="expected already"):
        r.expect("t", ["p"], 8, PAGES, 0.0)


def test_tokens_that_leave_a_hole_are_refused() -> None:
    s = sender()
    granted(s)
    s.ready("t", (0, 1), (0, 4), 0.0)
    with pytest.raises(ProtocolError, match="tokens from 5 are ready, those before end at 4"):
        s.ready("t", (0, 1), (5, 8), 0.0)


def test_a_slot_that_holds_nothing_is_an_error_not_a_hang() -> None:
    s = sender(staged=frozenset({0}), slots=1, slot_bytes=0)
    granted(s)
    with pytest.raises(ProtocolError, match="enlarge staging_bytes"):
        s.ready("t", (0, 1), (0, 8), 0.0)


def test_leases_are_renewed_while_prefill_computes() -> None:
    s, r = sender(), receiver()
    granted(s, offered(r))
    for now in (4.0, 8.0, 12.0, 16.0):
        assert s.tick(now) == [Send("d", m.Renew("t"))]
        assert r.on_message("p", m.Renew("t"), now) == []
        assert r.tick(now) == []
    silent = r.tick(27.0)
    assert silent[0] == Send("p", m.Fence("t"))
    assert silent[1] == Failed("t", "no sign of life from p for 10 s", held=True)
    assert silent[-1] == FenceLink("p")


def test_a_chunk_that_differs_is_written_once_more_and_then_fails() -> None:
    s, r = sender(), receiver()
    granted(s, offered(r))
    (write,) = s.ready("t", (0, 3), (0, 8), 0.0)
    assert isinstance(write, Write)
    for _ in range(2):
        (w,) = said(s.written("t", "d", 1, write.seq, 24, DIGEST, 0.0))
        (check,) = checks(r, w)  # type: ignore[arg-type]  # it is a Written
        told = r.checked(check, 0.0, agrees=False)
        if said(told) == [m.Again("t", 1, 0)]:
            (rewrite,) = s.on_message("d", m.Again("t", 1, 0), 0.0)
            assert rewrite == write
    assert told == [Send("p", m.Fence("t")), Failed("t", "chunk 0 from p arrived corrupted twice", held=True)]
    with pytest.raises(ProtocolError, match="or was twice"):
        s.on_message("d", m.Again("t", 1, 0), 0.0)
    assert r.on_message("p", m.Fenced("t"), 0.0) == [Released("t")]


def test_a_chunk_that_comes_again_must_be_the_same_one() -> None:
    r = receiver()
    offered(r)
    (check,) = checks(r, word(0, (0, 3), (0, 4)))
    r.checked(check, 0.0, agrees=False)
    with pytest.raises(ProtocolError, match="another one the second time"):
        r.on_message("p", word(0, (0, 3), (0, 8)), 0.0)


def test_source_pages_are_kept_while_a_write_reads_them() -> None:
    s = sender()
    granted(s)
    (write,) = s.ready("t", (0, 3), (0, 8), 0.0)
    assert isinstance(write, Write)
    assert s.cancel("t", "the client left") == [Failed("t", "the client left", held=True)]
    assert s.on_message("d", m.Fence("t"), 0.0) == []
    assert s.written("t", "d", 1, 0, 24, DIGEST, 0.0) == [Send("d", m.Fenced("t")), Released("t")]
    assert s.on_message("d", m.Fence("t"), 0.0) == [Send("d", m.Fenced("t"))]


def test_credit_is_asked_for_and_never_exceeded() -> None:
    s = sender(depth=4)
    granted(s, m.Grant("t", 1, PAGES, 0, 10.0, credit=0))
    assert s.ready("t", (0, 1), (0, 8), 0.0) == [Send("d", m.Want("t", 1, 8))]
    first = s.on_message("d", m.Credit("t", 1, 5), 0.0)
    assert [w.tokens for w in first if isinstance(w, Write)] == [(0, 4)]
    assert s.on_message("d", m.Credit("t", 1, 3), 0.0) == []
    assert s.transfers(0.0)[0].legs[0].credit == 5
    more = s.on_message("d", m.Credit("t", 1, 8), 0.0)
    sizes = [(w.tokens[1] - w.tokens[0]) * (w.layers[1] - w.layers[0]) for w in (*first, *more) if isinstance(w, Write)]
    assert sum(sizes) == 8


def test_window_and_recurrent_groups_bring_what_they_need() -> None:
    window, state = Group("window", (1,), 3), Group("recurrent", (2,))
    parts = (Part(0, (0,)), Part(1, (1,), window.live), Part(2, (2,), state.live))
    tables = [m.Table([1, 2]), m.Table([3], 5), m.Table([4])]
    s, r = sender(parts=parts, depth=9), receiver(parts=parts)
    granted(s, offered(r, 8, tables))
    early = s.ready("t", (0, 3), (0, 5), 0.0)
    late = s.ready("t", (0, 3), (5, 8), 0.0)
    assert [(w.pair, w.tokens, w.table) for w in (*early, *late) if isinstance(w, Write)] == [
        (0, (0, 5), tables[0]), (2, (0, 1), tables[2]), (0, (5, 8), tables[0]), (1, (5, 8), tables[1])
    ]  # fmt: skip


def test_several_ranks_on_either_side() -> None:
    s, r = sender(peers=("d", "e"), depth=9), receiver(peers=("p", "q"))
    s.offer("t", ["d", "e"], 8, 0.0)
    assert s.on_message("d", m.Grant("t", 1, PAGES, 4, 10.0), 0.0) == []
    assert s.on_message("e", m.Grant("t", 1, PAGES, 2, 10.0), 0.0) == [Granted("t", 2)]
    assert [w.peer for w in s.ready("t", (0, 3), (0, 8), 0.0) if isinstance(w, Write)] == ["d", "e"]
    for peer in ("d", "e"):
        s.written("t", peer, 1, 0, 24, DIGEST, 0.0)
    assert kinds(s.finish("t", b"")) == ["Finish", "Finish"]
    assert s.on_message("d", m.Commit("t"), 0.0) == []
    assert kinds(s.on_message("e", m.Commit("t"), 0.0)) == ["Delivered"]

    r.expect("t", ["p", "q"], 8, PAGES, 0.0)
    for i, peer in enumerate(("p", "q")):
        r.on_message(peer, m.Offer("t", 8), 0.0)
        w = replace_epoch(word(0, (0, 3), (0, 8)), i + 1)
        (check,) = r.on_message(peer, w, 0.0)
        assert isinstance(check, Check)
        assert r.checked(check, 0.0) == []
    assert r.on_message("p", m.Finish("t", 1, 1, b"first"), 0.0) == []
    r.link_lost("p", "gone", 0.0)  # nothing more was to come from it
    done = r.on_message("q", m.Finish("t", 2, 1, b""), 0.0)
    counted = Counted().chunk(1, DIGEST).chunk(1, DIGEST)
    assert done == [Send("q", m.Commit("t")), Delivered("t", b"first", 2, 0.0, counted)]


def replace_epoch(message: m.Written, epoch: int) -> m.Written:
    return m.Written("t", epoch, message.seq, 0, message.layers, message.tokens, None, 1, DIGEST)


def test_one_rank_that_fails_ends_the_others_legs() -> None:
    r = receiver(peers=("p", "q"))
    r.expect("t", ["p", "q"], 8, PAGES, 0.0)
    for peer in ("p", "q"):
        r.on_message(peer, m.Offer("t", 8), 0.0)
    failed = r.on_message("p", m.Abort("t", "out of memory"), 0.0)
    assert failed == [Send("q", m.Fence("t")), Failed("t", "out of memory", held=True)]
    assert r.on_message("q", m.Fenced("t"), 0.0) == [Released("t")]


def test_offers_that_nobody_asked_for_are_forgotten() -> None:
    r = receiver()
    assert r.on_message("p", m.Offer("t", 8), 0.0) == []
    r.tick(61.0)
    assert r.expect("t", ["p"], 8, PAGES, 61.0) == []
    assert kinds(r.on_message("p", m.Offer("t", 9), 61.0)) == ["Abort", "Failed"]


def test_a_transfer_that_prefill_gave_up_before_its_request_came_fails_at_once() -> None:
    s, d = sender(), receiver(peers=("p", "q"))
    s.offer("t", ["d"], 8, 0.0)
    [abort] = said(s.cancel("t", "preempted"))
    for peer in ("p", "q"):
        d.on_message(peer, m.Offer("t", 8), 0.0)
    assert d.on_message("p", abort, 1.0) == []
    failed = d.expect("t", ["p", "q"], 8, PAGES, 2.0)
    assert failed == [Failed("t", "preempted", held=False), Send("q", m.Abort("t", "preempted"))]
    assert d.expect("t", ["p"], 8, PAGES, 3.0) == []  # asked for once more
    assert kinds(d.on_message("p", m.Offer("t", 8), 3.0)) == ["Grant"]


def test_what_prefill_gave_up_may_be_offered_again() -> None:
    d = receiver()
    for message in (m.Offer("t", 8), m.Abort("t", "preempted"), m.Offer("t", 8)):
        assert d.on_message("p", message, 0.0) == []
    assert kinds(d.expect("t", ["p"], 8, PAGES, 1.0)) == ["Grant"]

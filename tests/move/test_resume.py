"""Links that break: what a new one goes on from, what is said again, and what ends."""

from __future__ import annotations

from protocol_cases import (
    DIGEST,
    FULL,
    PAGES,
    checks,
    granted,
    kinds,
    link_terms,
    offered,
    receiver,
    said,
    sender,
    word,
)

from regauge.move import messages as m
from regauge.move.counted import Counted
from regauge.move.protocol import Delivered, Failed, FenceLink, Released, Relink, Send, Stages, Write


def test_a_new_link_goes_on_from_what_is_verified() -> None:
    s, r = sender(chunk_bytes=8), receiver()
    granted(s, offered(r))
    s.ready("t", (0, 3), (0, 4), 0.0)
    s.ready("t", (0, 3), (4, 8), 0.0)
    first, second, third = checks(r, word(0, (0, 2), (0, 4)), word(1, (2, 3), (0, 4)), word(2, (0, 1), (4, 8)))
    r.checked(third, 0.0)  # a layer is verified up to its first chunk that is not
    r.checked(second, 0.0)
    assert r.link_lost("p", "gone", 0.0) == [FenceLink("p")]
    assert r.on_message("p", m.Offer("t", 8), 0.0) == []  # something may still land: no pages yet
    r.checked(first, 0.0)
    assert r.link_fenced("p", 0.0) == r.link_up("p", FULL, "one", 1.0) == []
    (grant,) = said(r.on_message("p", m.Offer("t", 8), 1.0))
    assert isinstance(grant, m.Grant)
    assert (grant.epoch, grant.done) == (2, [[8, 4, 4]])
    assert s.link_lost("d", "gone", 0.0) == [Relink("d")]
    assert s.link_up("d", link_terms(), "one") == [Send("d", m.Offer("t", 8))]
    (write,) = s.on_message("d", grant, 1.0)
    assert isinstance(write, Write)
    assert (write.epoch, write.seq, write.layers, write.tokens) == (2, 0, (1, 3), (4, 8))


def test_a_chunk_that_differs_after_its_link_broke_is_not_verified_by_a_later_one() -> None:
    r = receiver()
    offered(r)
    first, second = checks(r, word(0, (0, 3), (0, 4)), word(1, (0, 3), (4, 8)))
    r.link_lost("p", "gone", 0.0)
    assert r.checked(first, 0.0, agrees=False) == r.checked(second, 0.0) == []
    r.link_fenced("p", 0.0)
    r.link_up("p", FULL, "one", 0.0)
    (grant,) = said(r.on_message("p", m.Offer("t", 8), 0.0))
    assert isinstance(grant, m.Grant)
    assert grant.done == [[0, 0, 0]]


def test_a_grant_of_an_earlier_link_that_comes_late_allows_no_write() -> None:
    s, r = sender(), receiver()
    s.offer("t", ["d"], 8, 0.0)
    unheard = offered(r)
    for side in (s, r):
        side.link_lost("p" if side is r else "d", "gone", 0.0)
    r.link_fenced("p", 0.0)
    assert kinds(r.cancel("t", "over", 0.0)) == ["Failed"]  # its pages are free: nothing may be written into them
    s.link_up("d", link_terms(), "one", r.epoch)
    assert s.on_message("d", unheard, 1.0) == s.ready("t", (0, 3), (0, 8), 1.0) == []
    assert kinds(s.on_message("d", m.Grant("t", 2, PAGES, 0, 10.0), 1.0)) == ["Granted", "Write"]


def test_what_an_earlier_link_said_changes_nothing() -> None:
    s, r = sender(), receiver()
    old = offered(r)
    granted(s, old)
    r.link_lost("p", "gone", 0.0)
    r.link_fenced("p", 0.0)
    r.link_up("p", FULL, "one", 0.0)
    late = (word(0, (0, 3), (0, 8)), m.Want("t", 1, 24), m.Renew("t"), m.Finish("t", 1, 1, b""))
    assert [r.on_message("p", message, 9.0) for message in late] == [[]] * 4
    (grant,) = said(r.on_message("p", m.Offer("t", 8), 9.0))
    assert isinstance(grant, m.Grant)
    assert [r.on_message("p", message, 9.0) for message in (*late, m.Offer("t", 8))] == [[]] * 5
    s.link_lost("d", "gone", 0.0)
    s.link_up("d", link_terms(), "one", old.epoch)
    assert s.on_message("d", old, 9.0) == []
    assert s.transfers(9.0)[0].legs[0].state == "offered"
    s.on_message("d", grant, 9.0)
    for message in (old, m.Again("t", 1, 0), m.Credit("t", 1, 5)):
        assert s.on_message("d", message, 9.0) == []
    r.cancel("t", "over", 9.0)
    assert r.on_message("p", word(0, (0, 3), (0, 8), slot=0), 9.0) == []  # that slot was another link's
    assert r.on_message("p", word(0, (0, 3), (0, 8), epoch=2, slot=0), 9.0) == [Send("p", m.Freed(0))]


def test_a_restarted_peer_ends_what_waits_for_it() -> None:
    s, r = sender(), receiver()
    granted(s, offered(r))
    s.link_lost("d", "gone", 0.0)
    r.link_lost("p", "gone", 0.0)
    r.link_fenced("p", 0.0)
    assert s.link_up("d", link_terms(), "two") == [Failed("t", "decode worker d has been restarted", held=False)]
    assert r.link_up("p", FULL, "two", 0.0) == [Failed("t", "prefill worker p has been restarted", held=False)]
    assert s.transfers(0.0) == r.transfers(0.0) == []


def test_a_commit_lost_with_its_link_is_said_again() -> None:
    s, r = sender(), receiver()
    granted(s, offered(r))
    (write,) = s.ready("t", (0, 3), (0, 8), 0.0)
    assert isinstance(write, Write)
    (w,) = said(s.written("t", "d", 1, 0, 24, DIGEST, 0.0))
    (check,) = checks(r, w)  # type: ignore[arg-type]  # it is a Written
    (finish,) = said(s.finish("t", b"first token"))
    r.checked(check, 0.0)
    counted = Counted().chunk(24, DIGEST)
    assert r.on_message("p", finish, 1.0) == [
        Send("p", m.Commit("t")),
        Delivered("t", b"first token", 24, 1.0, counted, Stages(last_byte_to_commit=1.0)),
    ]
    s.link_lost("d", "gone", 1.0)
    r.link_lost("p", "gone", 1.0)
    (offer,) = said(s.link_up("d", link_terms(), "one"))
    r.link_up("p", FULL, "one", 1.0)
    (commit,) = said(r.on_message("p", offer, 1.0))
    assert commit == m.Commit("t")
    assert kinds(s.on_message("d", commit, 1.0)) == ["Delivered"]
    assert s.on_message("d", commit, 1.0) == []


def test_a_transfer_that_failed_while_its_link_was_gone_is_told_so() -> None:
    s, r = sender(), receiver()
    granted(s, offered(r))
    s.link_lost("d", "gone", 1.0)
    r.link_lost("p", "gone", 1.0)
    assert r.cancel("t", "the client left", 1.0) == [Failed("t", "the client left", held=True)]
    assert r.link_fenced("p", 1.0) == [Released("t")]
    r.link_up("p", FULL, "one", 1.0)
    (offer,) = said(s.link_up("d", link_terms(), "one"))
    (abort,) = said(r.on_message("p", offer, 1.0))
    assert kinds(s.on_message("d", abort, 1.0)) == ["Failed", "Abort"]


def test_without_a_new_link_in_time_both_sides_fail() -> None:
    s, r = sender(), receiver()
    granted(s, offered(r))
    s.link_lost("d", "gone", 0.0)
    r.link_lost("p", "gone", 0.0)
    r.link_fenced("p", 0.0)
    assert s.tick(4.9) == r.tick(4.9) == []
    reason = "lost the link to {}, and no new one stands after 5 s"
    assert s.tick(5.0) == [Failed("t", reason.format("d"), held=False)]
    assert r.tick(5.0) == [Failed("t", reason.format("p"), held=False)]


def test_pages_stay_held_until_the_data_connection_is_fenced() -> None:
    r = receiver()
    offered(r)
    r.link_lost("p", "gone", 0.0)
    assert r.tick(5.0) == [Failed("t", "lost the link to p, and no new one stands after 5 s", held=True)]
    assert r.tick(1000.0) == []
    assert r.link_fenced("p", 1000.0) == [Released("t")]


def test_time_that_is_over_is_not_given_back_to_a_process_that_stood_still() -> None:
    s, r = sender(), receiver()
    s.offer("t", ["d"], 8, 0.0)
    assert kinds(s.on_message("d", m.Grant("t", 1, PAGES, 0, 10.0), 60.0)) == ["Failed", "Abort"]
    r.expect("t", ["p"], 8, PAGES, 0.0)
    assert kinds(r.on_message("p", m.Offer("t", 8), 60.0)) == ["Abort", "Failed"]


def test_a_link_that_cannot_be_made_again_fails_what_waits() -> None:
    s = sender()
    granted(s)
    s.link_lost("d", "gone", 0.0)
    assert s.waits_for("d")
    assert s.link_refused("d", "no") == [Failed("t", "no", held=False)]
    assert not s.waits_for("d")

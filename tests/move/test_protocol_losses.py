"""What a peer could not be told because its link was gone is told over the next one."""

from __future__ import annotations

import pytest
from protocol_cases import FULL, PAGES, granted, link_terms, receiver, said, sender

from regauge.move import messages as m
from regauge.move.protocol import Failed, FenceLink, Relink, Send
from regauge.move.sender import MAX_UNTOLD


def test_a_transfer_given_up_while_its_link_is_gone_is_told_on_the_next() -> None:
    s = sender()
    granted(s)
    assert Relink("d") in s.link_lost("d", "broken", 1.0)
    assert s.cancel("t", "the client went away") == [Failed("t", "the client went away", held=False)]
    assert s.link_up("d", link_terms(), "one") == [Send("d", m.Abort("t", "the client went away"))]
    s.link_lost("d", "broken", 2.0)
    assert s.link_up("d", link_terms(), "one") == [], "once"


def test_a_transfer_given_up_before_its_grant_is_told_again_if_the_link_breaks() -> None:
    """Its offer and its end may have been lost with the link: decode would wait for the offer."""
    s = sender()
    s.offer("t", ["d"], 8, 0.0)
    assert m.Abort("t", "no") in said(s.cancel("t", "no"))
    s.link_lost("d", "broken", 1.0)
    assert s.link_up("d", link_terms(), "one") == [Send("d", m.Abort("t", "no"))]


@pytest.mark.parametrize("instance", ["one", "two"])
def test_a_name_that_is_offered_anew_or_to_a_new_process_is_not_given_up(instance: str) -> None:
    s = sender()
    s.offer("t", ["d"], 8, 0.0)
    s.cancel("t", "no")
    if instance == "one":
        s.offer("t", ["d"], 8, 0.0)
    s.link_lost("d", "broken", 1.0)
    told = said(s.link_up("d", link_terms(), instance))
    assert told == ([m.Offer("t", 8)] if instance == "one" else [])


def test_what_is_remembered_for_a_peer_is_bounded() -> None:
    s = sender()
    for i in range(MAX_UNTOLD + 5):
        s.offer(f"t{i}", ["d"], 8, 0.0)
        s.cancel(f"t{i}", "no")
    s.link_lost("d", "broken", 1.0)
    told = said(s.link_up("d", link_terms(), "one"))
    assert [message.transfer for message in told if isinstance(message, m.Abort)] == [
        f"t{i}" for i in range(5, MAX_UNTOLD + 5)
    ]


def test_decode_ends_a_request_whose_offer_was_lost_once_it_hears_so() -> None:
    r = receiver()
    r.expect("t", ["p"], 8, PAGES, 0.0)
    assert r.link_lost("p", "broken", 1.0) == [FenceLink("p")]
    r.link_fenced("p", 1.0)
    r.link_up("p", FULL, "one", 2.0)
    assert r.on_message("p", m.Abort("t", "the client went away"), 2.0) == [
        Failed("t", "the client went away", held=False)
    ]
    assert r.on_message("p", m.Abort("t", "the client went away"), 2.0) == [], "what has ended already stays as it is"

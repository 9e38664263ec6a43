"""A sender and a receiver with a link, and words about a transfer `t`, for the tests of the protocol's rules."""

from __future__ import annotations

from dataclasses import replace

from regauge.move import messages as m
from regauge.move.outleg import LinkTerms
from regauge.move.protocol import Action, Check, Part, Send
from regauge.move.receiver import Receiver
from regauge.move.sender import Sender

DIGEST = b"12345678"
PAGES = [m.Table([5, 6])]
FULL = (Part(0, (0, 1, 2)),)


def sender(*, resume_s: float = 5.0, peers: tuple[str, ...] = ("d",), **terms: object) -> Sender:
    made = Sender(offer_s=60.0, deadline_s=30.0, resume_s=resume_s)
    for peer in peers:
        made.link_up(peer, link_terms(**terms), "one")
    return made


def link_terms(**changes: object) -> LinkTerms:
    return replace(LinkTerms(FULL, lambda _, tokens: tokens, depth=1), **changes)  # type: ignore[arg-type]


def receiver(*, resume_s: float = 5.0, peers: tuple[str, ...] = ("p",), parts: tuple[Part, ...] = FULL) -> Receiver:
    made = Receiver(lease_s=10.0, offer_s=60.0, deadline_s=30.0, resume_s=resume_s)
    for peer in peers:
        made.link_up(peer, parts, "one", 0.0)
    return made


def offered(made: Receiver, tokens: int = 8, tables: list[m.Table] = PAGES) -> m.Grant:
    made.expect("t", ["p"], tokens, tables, 0.0)
    (grant,) = made.on_message("p", m.Offer("t", tokens), 0.0)
    assert isinstance(grant, Send)
    assert isinstance(grant.message, m.Grant)
    return grant.message


def granted(made: Sender, grant: m.Grant | None = None, tokens: int = 8) -> list[Action]:
    made.offer("t", ["d"], tokens, 0.0)
    return made.on_message("d", grant or m.Grant("t", 1, PAGES, 0, 10.0), 0.0)


def word(
    seq: int, layers: tuple[int, int], tokens: tuple[int, int], epoch: int = 1, slot: int | None = None
) -> m.Written:
    return m.Written("t", epoch, seq, 0, layers, tokens, slot, 1, DIGEST)


def checks(made: Receiver, *words: m.Written) -> list[Check]:
    out = [action for w in words for action in made.on_message("p", w, 0.0)]
    assert all(isinstance(action, Check) for action in out)
    return out  # type: ignore[return-value]  # as just asserted


def said(actions: list[Action]) -> list[m.Message]:
    return [action.message for action in actions if isinstance(action, Send)]


def kinds(actions: list[Action]) -> list[str]:
    return [type(a.message if isinstance(a, Send) else a).__name__ for a in actions]

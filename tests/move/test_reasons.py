"""Every reason that the protocol gives falls into a class of its own: taken from the protocol itself, not from a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from regauge.config import FlowConfig
from regauge.errors import ProtocolError, Refused, TransferFailed
from regauge.move import messages as m
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_types import NicLimits
from regauge.move.inleg import InLeg
from regauge.move.outleg import LinkTerms, OutLeg
from regauge.move.protocol import Action, Check, Failed, Part, Send
from regauge.move.reasons import _CLASSES, reason_class
from regauge.move.receiver import Receiver
from regauge.move.sender import Sender
from regauge.observe import OTHER, REASONS

PART = Part(0, (0,))
TIMES = {"offer_s": 60.0, "deadline_s": 30.0, "resume_s": 3.0}


def test_the_classes_are_the_labels() -> None:
    assert sorted([*(name for name, _ in _CLASSES), OTHER]) == sorted(REASONS)


def receiver(*, offered: int = 8) -> Receiver:
    """A receiver that expects 8 tokens from p, on a link that stands; they are granted if as many are offered."""
    r = Receiver(lease_s=5.0, **TIMES)
    r.link_up("p", [PART], "first", 0.0)
    r.expect("x", ["p"], 8, [m.Table([0, 1])], 0.0)
    if offered:
        r.on_message("p", m.Offer("x", offered), 0.0)
    return r


def sender() -> Sender:
    s = Sender(**TIMES)
    s.link_up("d", LinkTerms((PART,), lambda _, tokens: tokens), "first")
    s.offer("x", ["d"], 8, 0.0)
    return s


def mismatch() -> Iterable[Action]:
    return receiver(offered=0).on_message("p", m.Offer("x", 9), 0.0)


def restarted() -> Iterable[Action]:
    r = receiver()
    r.link_lost("p", "lost", 0.0)
    r.link_fenced("p", 0.0)
    return r.link_up("p", [PART], "second", 0.0)


def corrupted() -> Iterable[Action]:
    r = receiver()
    for _ in range(2):
        word = m.Written("x", 1, 0, 0, (0, 1), (0, 8), None, 8, bytes(16))
        [check] = [a for a in r.on_message("p", word, 0.0) if isinstance(a, Check)]
        actions = r.checked(check, 0.0, agrees=False)
    return actions


def fenced_too_late() -> Iterable[Action]:
    r = receiver()
    r.link_lost("p", "lost", 0.0)
    return r.link_fenced("p", 10.0)


def not_relinked() -> Iterable[Action]:
    r = receiver()
    r.link_lost("p", "lost", 0.0)
    r.link_fenced("p", 0.0)
    return r.tick(4.0)


def never_relinked() -> Iterable[Action]:
    s = sender()
    s.link_lost("d", "lost", 0.0)
    return s.tick(4.0)


def crowded() -> list[list[Action]]:
    """What prefill and then decode do about the second transfer where flow control takes one."""
    flow = ReceiverFlow([NicLimits("n", 1e9)], limits=FlowConfig(max_transfers=1))
    r, s = Receiver(lease_s=5.0, flow=flow, **TIMES), sender()
    r.link_up("p", [PART], "first", 0.0)
    for name in ("w", "x"):
        r.expect(name, ["p"], 8, [m.Table([0, 1])], 0.0)
        actions = r.on_message("p", m.Offer(name, 8), 0.0)
    [abort] = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, m.Abort)]
    for grant in (a.message for a in actions if isinstance(a, Send) and isinstance(a.message, m.Grant)):
        s.on_message("d", grant, 0.0)
    near = s.on_message("d", abort, 0.0)
    [answer] = [a.message for a in near if isinstance(a, Send)]
    return [near, r.on_message("p", answer, 0.0)]


def refused() -> Iterable[Action]:
    s = sender()
    s.link_lost("d", "lost", 0.0)
    return s.link_refused("d", "no new link to d: another dtype")  # as `OutboundLinks` says it


CASES: list[tuple[str, Callable[[], Iterable[Action]]]] = [
    ("mismatch", mismatch),
    ("restarted", restarted),
    ("corrupted", corrupted),
    ("link", fenced_too_late),
    ("link", not_relinked),
    ("link", never_relinked),
    ("refused", refused),
    ("flow", lambda: crowded()[0]),
    ("flow", lambda: crowded()[1]),
    ("lease", lambda: receiver().tick(6.0)),
    ("deadline", lambda: receiver(offered=0).tick(61.0)),
    ("deadline", lambda: sender().tick(61.0)),
    ("peer", lambda: sender().on_message("d", m.Fence("x"), 0.0)),
    ("deadline", lambda: sender().on_message("d", m.Abort("x", "the KV cache did not arrive from p in time"), 0.0)),
    ("aborted", lambda: sender().cancel("x", "the request was aborted")),
]


@pytest.mark.parametrize(("expected", "case"), CASES)
def test_what_the_protocol_says_is_sorted(expected: str, case: Callable[[], Iterable[Action]]) -> None:
    [reason] = [action.reason for action in case() if isinstance(action, Failed)]
    assert reason_class(TransferFailed(reason)) == expected


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        ("fault", "a chunk could not be brought into its pages: no memory"),
        ("fault", "a chunk could not be written: no memory"),
        ("refused", "p0 together do not send layer 3: name every prefill rank"),
        ("refused", "no link from p: rope.theta: prefill has 500000.0, decode has 10000.0"),
        ("link", "lost prefill worker p: the peer closed the control connection"),
        ("link", "the link to d was closed"),
        ("other", "the client went away"),
    ],
)
def test_what_the_drivers_say_is_sorted(expected: str, reason: str) -> None:
    assert reason_class(TransferFailed(reason)) == expected


def test_a_refusal_is_one_on_whichever_side_it_was_found() -> None:
    assert (
        reason_class(Refused(("rope",))) == reason_class(ProtocolError("the peer refuses the pair: rope")) == "refused"
    )
    assert reason_class(ProtocolError("the peer sent Ready")) == "other"


def test_the_manual_explains_every_reason_and_state() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "operations.md").read_text().splitlines()
    explained = {word for line in lines if line.startswith("| ") for word in line.split("|")[1].strip().split(", ")}
    states = {word for leg in (InLeg, OutLeg) for word in get_args(get_type_hints(leg)["state"])}
    assert {*REASONS, *states, "expected", "quarantined", "closing", "relinking", "up"} <= explained

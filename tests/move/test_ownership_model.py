"""Every interleaving of small clusters of the real machines, pools and memory: what holds, and that each guard is needed.

A mutation takes one guard away; the search must then find a history that breaks an invariant. See docs/ownership.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from regauge.move import messages as m
from regauge.move.inleg import InLeg
from regauge.move.outleg import OutLeg
from regauge.move.protocol import Action, Check, Failed
from regauge.move.receiver import Receiver
from regauge.move.sender import Sender
from regauge.testing import snapshot
from regauge.testing.choices import events
from regauge.testing.explore import Caught, Search, begin, instances
from regauge.testing.violation import Violation

INSTANCES = {instance.name: instance for instance in instances()}
DOCS = (Path(__file__).parents[2] / "docs" / "ownership.md").read_text("utf-8")


def documented(name: str) -> tuple[int, int]:
    """Return the states and transitions that docs/ownership.md gives for an instance: they change with what the machines do or keep."""
    (row,) = re.findall(rf"^\| {name} \|.*\| ([\d,]+) \| ([\d,]+) \|$", DOCS, re.MULTILINE)
    states, transitions = (int(figure.replace(",", "")) for figure in row)
    return states, transitions


@pytest.mark.parametrize("name", INSTANCES)
def test_every_interleaving_keeps_every_invariant(name: str) -> None:
    found = Search(INSTANCES[name], 100_000).run()
    assert found.complete
    assert found.ends > 0
    assert (found.states, found.transitions) == documented(name)


Patch = pytest.MonkeyPatch


def pages_freed_at_failure(patch: Patch) -> None:
    patch.setattr(InLeg, "quiet", property(lambda _: True))


def release_without_fence(patch: Patch) -> None:
    lost = Receiver.link_lost

    def link_lost(self: Receiver, peer: str, reason: str, now: float) -> list[Action]:
        return lost(self, peer, reason, now) + self.link_fenced(peer, now)

    patch.setattr(Receiver, "link_lost", link_lost)


def fenced_under_a_write(patch: Patch) -> None:
    patch.setattr(OutLeg, "busy", property(lambda _: False))


def source_freed_at_failure(patch: Patch) -> None:
    fail = Sender._fail

    def failed(self: Sender, *args: Any) -> list[Action]:
        return [Failed(a.transfer, a.reason, held=False) if isinstance(a, Failed) else a for a in fail(self, *args)]

    patch.setattr(Sender, "_fail", failed)


def digests_not_compared(patch: Patch) -> None:
    checked = Receiver.checked

    def agreeing(self: Receiver, check: Check, now: float, *, agrees: bool, error: str) -> list[Action]:
        return checked(self, check, now, agrees=True, error=error)

    patch.setattr(Receiver, "checked", agreeing)


def differing_chunk_forgotten(patch: Patch) -> None:
    checked = Receiver.checked

    def forgetful(self: Receiver, check: Check, now: float, *, agrees: bool, error: str) -> list[Action]:
        actions = checked(self, check, now, agrees=agrees, error=error)
        t = self._inbound.get(check.transfer)
        if t is not None and t.legs[check.peer].state == "lost":
            t.legs[check.peer].again.pop(check.seq, None)
        return actions

    patch.setattr(Receiver, "checked", forgetful)


def resumed_from_what_is_written(patch: Patch) -> None:
    grant = InLeg.grant

    def granted(self: InLeg, *args: Any) -> list[list[int]]:
        for part in self.parts:
            part.verified = list(part.written)
        return grant(self, *args)

    patch.setattr(InLeg, "grant", granted)


def epochs_ignored(patch: Patch) -> None:
    own = Receiver._on_own

    def any_epoch(self: Receiver, name: str, t: Any, leg: InLeg, message: Any, now: float) -> list[Action]:
        if isinstance(message, m.Want | m.Written | m.Finish):
            message = msgspec.structs.replace(message, epoch=leg.epoch)
        return own(self, name, t, leg, message, now)

    patch.setattr(Receiver, "_on_own", any_epoch)


def committed_when_finished(patch: Patch) -> None:
    patch.setattr(InLeg, "complete", property(lambda self: self.finish is not None))


def slot_of_a_failed_transfer_kept(patch: Patch) -> None:
    own = Receiver._on_own

    def silent(self: Receiver, name: str, t: Any, leg: InLeg, message: Any, now: float) -> list[Action]:
        return [] if t.failed and isinstance(message, m.Written) else own(self, name, t, leg, message, now)

    patch.setattr(Receiver, "_on_own", silent)


def no_time_limits(patch: Patch) -> None:
    patch.setattr(Receiver, "tick", lambda *_: [])


@pytest.mark.parametrize(
    ("mutation", "instance", "complaint"),
    [
        (pages_freed_at_failure, "reuse", "gives back pages of t0 under"),
        (release_without_fence, "reuse", "gives back pages of t0 under"),
        (fenced_under_a_write, "reuse", "under"),
        (source_freed_at_failure, "reuse", "p gives back pages of t0 under"),
        (digests_not_compared, "resume", "1 of 2 cells of t0"),
        (differing_chunk_forgotten, "resume", "1 of 2 cells of t0"),
        (resumed_from_what_is_written, "resume", "cells of t0"),
        (epochs_ignored, "repeats", "broke the rules"),
        (committed_when_finished, "slots", "cells of t0"),
        (slot_of_a_failed_transfer_kept, "slots", "staging slot"),
        (no_time_limits, "death", "have not ended|still under way"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_without_a_guard_an_invariant_breaks(
    mutation: Callable[[Patch], None], instance: str, complaint: str, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(Caught, match=complaint):
        Search(INSTANCES[instance], 100_000).run()


def test_a_copy_of_a_world_goes_its_own_way_and_has_the_same_key() -> None:
    first = begin(INSTANCES["resume"])
    second = snapshot.copy(first)
    assert snapshot.key(first) == snapshot.key(second)
    while found := events(second):
        second.apply(found[0])
    assert snapshot.key(first) != snapshot.key(second)
    assert first.processes["d"].sides == {}
    assert not second.jobs


def test_the_same_violation_is_raised_with_the_shortest_history(monkeypatch: Patch) -> None:
    source_freed_at_failure(monkeypatch)
    with pytest.raises(Caught) as caught:
        Search(INSTANCES["reuse"], 100_000).run()
    world = begin(INSTANCES["reuse"])
    for event in caught.value.history[:-1]:
        world.apply(event)
    with pytest.raises(Violation, match="gives back pages"):
        world.apply(caught.value.history[-1])

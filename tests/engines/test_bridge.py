"""An engine's own memory and allocator on both sides: what is said from its thread, and what it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from ends_rig import LAYERS, MODEL, Ends, ended, open_ends

from regauge.engines import bridge
from regauge.engines.ended import Ended
from regauge.plan.reference import transfer
from strategies import assert_same


@pytest.fixture(params=["tcp", "shm"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with open_ends(request.param, lease_s=2.0, resume_s=0.5, offer_s=5.0) as made:
        yield made


def test_tables_that_grow_step_by_step_arrive_as_the_reference_says(ends: Ends) -> None:
    src, dst = ends.pools()
    want = dst.copy()
    pages, own = [5, 2, 7, 11], list(range(20, 5, -1))
    transfer(
        src.layout,
        dst.layout,
        src.memory,
        want.memory,
        src.offsets(np.array(pages)),
        want.offsets(np.array(own)),
        (0, 231),
    )
    ends.into.expect("x", ["p.0"], 231, [(own, 0)])
    ends.out.offer("x", ends.peers, 231)
    for first, end in ((0, 100), (100, 200), (200, 231)):
        ends.out.pages("x", [(pages[: -(-end // 64)], 0)])
        for layer in LAYERS:
            ends.out.ready("x", (layer, layer + 1), (first, end))
    ends.out.finish("x", b"token")
    there, here = ended(ends.into), ended(ends.out)
    assert (there.transfer, there.error, there.handover, there.path) == ("x", "", b"token", "REMAP")
    assert (here.error, here.path) == ("", "REMAP")
    assert here.wire_bytes == there.wire_bytes > 0
    assert_same(dst, want)


def test_nothing_is_sent_where_nothing_is_missing(ends: Ends) -> None:
    before = ends.target.slab.array.copy()
    ends.into.expect("x", ["p.0"], 40, [([1, 2, 3], 0)], first=40)
    ends.out.offer("x", ends.peers, 40)
    ends.out.pages("x", [([3], 0)])
    for layer in LAYERS:
        ends.out.ready("x", (layer, layer + 1), (0, 40))
    ends.out.finish("x", b"")
    there = ended(ends.into)
    assert (there.error, there.wire_bytes) == ("", 0)
    assert ended(ends.out).wire_bytes == 0
    assert np.array_equal(ends.target.slab.array, before)


@pytest.mark.parametrize("side", ["out", "into"])
def test_a_cancel_ends_the_transfer_on_both_sides(ends: Ends, side: str) -> None:
    ends.into.expect("x", ["p.0"], 200, [(list(range(13)), 0)])
    ends.out.offer("x", ends.peers, 200)
    ends.out.pages("x", [([0, 1, 2, 3], 0)])
    ends.out.ready("x", (0, 1), (0, 200))
    getattr(ends, side).cancel("x", "not wanted")
    assert "not wanted" in ended(ends.into).error or side == "into"
    assert ended(ends.out).error
    assert not ends.into.ended()  # once


def test_what_prefill_gave_up_before_decode_asked_for_it_is_not_waited_for(ends: Ends) -> None:
    ends.out.offer("x", ends.peers, 200)
    ends.out.cancel("x", "preempted")
    assert ended(ends.out).error == "preempted"
    begun = time.monotonic()
    ends.into.expect("x", ["p.0"], 200, [(list(range(13)), 0)])
    assert "preempted" in ended(ends.into).error
    assert time.monotonic() - begun < 4  # an offer that never comes is waited for 5 s


def test_nobody_there_is_an_error_and_not_a_wait(ends: Ends) -> None:
    ends.out.offer("x", {"d.0": ("127.0.0.1", 1)}, 40)
    ends.out.pages("x", [([0], 0)])
    ends.out.ready("x", (0, 1), (0, 40))
    assert "127.0.0.1:1" in ended(ends.out).error


def test_names_in_use_are_an_error_of_the_second(ends: Ends) -> None:
    ends.into.expect("x", ["p.0"], 40, [([1, 2, 3], 0)])
    ends.into.expect("x", ["p.0"], 40, [([4, 5, 6], 0)])
    assert "is expected already" in ended(ends.into).error


def test_a_load_that_nothing_comes_for_ends_at_once_when_it_is_cancelled() -> None:
    """Prefill died before it offered: an engine that aborts the request gets its blocks back, not after `offer_s`."""
    with open_ends("tcp", offer_s=600.0) as ends:
        ends.into.expect("x", ["p.0"], 40, [([1, 2, 3], 0)])
        ends.into.cancel("x", "the request was aborted")
        assert ended(ends.into) == Ended("x", "the request was aborted", reason="aborted")
        ends.into.expect("x", ["p.0"], 40, [([1, 2, 3], 0)])  # the pages may be lent anew
        ends.into.cancel("x", "again")
        assert ended(ends.into).error == "again"


def test_a_pair_that_is_refused_ends_the_transfer_on_both_sides() -> None:
    other = msgspec.structs.replace(MODEL, states=[msgspec.structs.replace(s, rope=None) for s in MODEL.states])
    with open_ends("tcp", decode_model=other, offer_s=600.0) as ends:
        ends.begin("x")
        assert "rope" in ended(ends.out).error
        assert "no link from p.0: " in (there := ended(ends.into).error)
        assert "rope" in there


def test_the_last_ends_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "KEPT_ENDS", 3)
    with open_ends("tcp") as ends:
        for name in "abcd":
            ends.into.note(Ended(name, "no"))
        ends.into.note(Ended("b", "again"))
        assert ends.into.run(ends.into.end_of("b", 5), 10) == Ended("b", "again")
        assert ends.into.run(ends.into.end_of("d", 0), 10) == Ended("d", "no")
        assert ends.into.run(ends.into.end_of("a", 0), 10) is None
        assert not ends.into.ended(), "the engine has not asked for these"

"""How long a transfer was in each stage: whatever comes when, no stage is below 0, and those from the grant on are its seconds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_cases import FULL, PAGES, checks, receiver, word

from regauge.move import messages as m
from regauge.move.protocol import Check, Delivered, Part, Stages
from regauge.move.receiver import Receiver

GAPS = st.lists(st.floats(0, 2), min_size=8, max_size=8)
CHUNKS = [word(0, (0, 3), (0, 4)), word(1, (0, 3), (4, 8))]


def delivered(made: Receiver, gaps: list[float], *, early: bool, again: bool, start: float = 100.0) -> Delivered:
    """Carry a transfer of two chunks through, each event a gap after the one before."""
    now = start

    def then() -> float:
        nonlocal now
        now += gaps.pop()
        return now

    offer = m.Offer("t", 8)
    if early:
        made.on_message("p", offer, then())
        made.expect("t", ["p"], 8, PAGES, then())
    else:
        made.expect("t", ["p"], 8, PAGES, then())
        made.on_message("p", offer, then())
    for chunk in CHUNKS:
        [check] = made.on_message("p", chunk, then())
        assert isinstance(check, Check)
        if again and chunk.seq == 1:
            made.checked(check, then(), agrees=False)
            [check] = made.on_message("p", chunk, then())
            assert isinstance(check, Check)
        made.checked(check, now)
    [_, done] = made.on_message("p", m.Finish("t", 1, 2, b"first"), then())
    assert isinstance(done, Delivered)
    return done


@given(GAPS, st.booleans(), st.booleans())
def test_stages_are_whole(gaps: list[float], early: bool, again: bool) -> None:
    times = list(gaps)
    done = delivered(receiver(), times, early=early, again=again)
    stages = msgspec.structs.astuple(done.stages)
    assert min(stages) >= 0
    assert sum(stages[2:]) == pytest.approx(done.seconds, abs=1e-9)
    used = gaps[len(times) :]
    between = sum(used[:-1])  # from the first event to the last
    assert sum(stages) == pytest.approx(between, abs=1e-9)
    assert (stages[0] if early else stages[1]) == 0


def test_each_stage_is_what_it_is_called() -> None:
    done = delivered(receiver(), [16.0, 8.0, 4.0, 2.0, 1.0], early=False, again=False)
    assert done.stages == Stages(2.0, 0.0, 4.0, 8.0, 16.0)
    done = delivered(receiver(), [16.0, 8.0, 4.0, 2.0, 1.0], early=True, again=False)
    assert done.stages == Stages(0.0, 2.0, 4.0, 8.0, 16.0)


def test_a_transfer_that_brings_no_chunk_is_all_before_its_first_byte() -> None:
    made = receiver(parts=(Part(0, (0, 1, 2), live=lambda _, tokens: (tokens, tokens)),))
    made.expect("t", ["p"], 8, PAGES, 1.0)
    made.on_message("p", m.Offer("t", 8), 2.0)
    [_, done] = made.on_message("p", m.Finish("t", 1, 0, b""), 5.0)
    assert isinstance(done, Delivered)
    assert done.stages == Stages(1.0, 0.0, 3.0, 0.0, 0.0)


def test_grants_are_counted() -> None:
    made = receiver(parts=FULL)
    made.expect("t", ["p"], 8, PAGES, 0.0)
    made.on_message("p", m.Offer("t", 8), 0.0)
    checks(made, CHUNKS[0])
    assert (made.grants, made.credits, made.credited) == (1, 0, 0), "without flow control all is granted at once"

"""What is kept of transfers: everything that happened, in order, by clocks that agree; bounded whatever comes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from links_rig import both, fill, mark_all

from regauge.errors import TransferFailed
from regauge.move import messages as m
from regauge.move.events import MAX_TEXT, Event, Recorder

TOKENS = 150
WORDS: list[m.AnyMessage] = [
    m.Offer("t", 3), m.Grant("t", 1, [], 0, 5.0), m.Want("t", 1, 10), m.Credit("t", 1, 20), m.Again("t", 1, 2),
    m.Written("t", 1, 2, 0, (0, 1), (0, 3), None, 30, b"01234567"), m.Finish("t", 1, 1, b""), m.Commit("t"),
    m.Abort("t", "why"), m.Fence("t"), m.Fenced("t"), m.Renew("t"), m.Freed(1), m.Refuse(["no"]),
]  # fmt: skip


def of(recorder: Recorder, transfer: str) -> list[Event]:
    [trace] = recorder.of(transfer, "w")
    assert trace.worker == "w"
    assert trace.transfer == transfer
    assert trace.more == 0
    return trace.events


def by_name(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.name == name]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("pair", "kind", "mode"), [("widen", "tcp", "staged"), ("widen", "shm", "fused"), ("direct", "tcp", "mapped")]
)
async def test_a_transfer_is_told_by_both_ends(pair: str, kind: str, mode: str) -> None:
    async with both(pair, kind, mode="auto" if mode == "fused" else mode) as b:
        fill(b.source, 1)
        arriving = b.expect("x", TOKENS)
        sent = await b.offer("x", TOKENS)
        await sent.wait_granted()
        mark_all(sent, TOKENS)
        sent.finish(b"first")
        done, arrived = await sent.done(), await arriving
        here, there = of(b.out.events, "x"), of(b.into.events, "x")
        names = Counter(event.name for event in here), Counter(event.name for event in there)
        chunks = names[0]["gather"]
        assert chunks >= 2
        assert names[0]["write"] in (0, chunks)
        assert (names[0]["write"] == 0) == (arrived.mode == "fused")
        assert names[1]["check"] == chunks
        for end in names:
            assert (end["offer"], end["grant"], end["finish"], end["commit"], end["delivered"]) == (1, 1, 1, 1, 1)
            assert end["written"] == chunks
        assert sum(e.nbytes or 0 for e in by_name(here, "gather")) == done.wire_bytes
        assert sum(e.nbytes or 0 for e in by_name(there, "written")) == arrived.wire_bytes
        covered = {
            (layer, token)
            for e in by_name(there, "check")
            if e.layers and e.tokens
            for layer in range(*e.layers)
            for token in range(*e.tokens)
        }
        assert covered == set(itertools.product(range(3), range(TOKENS)))
        assert all(e.begin_s <= e.end_s for e in (*here, *there))
        for name in ("offer", "want", "written", "finish"):  # one process, one clock
            for cause, effect in zip(by_name(here, name), by_name(there, name), strict=True):
                assert cause.begin_s <= effect.begin_s
                assert (cause.text, effect.text, cause.peer, effect.peer) == ("sent", "taken", "d", "p")
        for name in ("grant", "credit", "commit"):
            for cause, effect in zip(by_name(there, name), by_name(here, name), strict=True):
                assert cause.begin_s <= effect.begin_s


@pytest.mark.anyio
async def test_a_transfer_that_fails_says_why() -> None:
    async with both() as b:
        fill(b.source, 1)
        arriving = b.expect("x", TOKENS)
        sent = await b.offer("x", TOKENS)
        await sent.wait_granted()
        sent.cancel("the client went away")
        with pytest.raises(TransferFailed):
            await arriving
        [failed] = by_name(of(b.into.events, "x"), "failed")
        assert "the client went away" in failed.text
        [abort] = by_name(of(b.into.events, "x"), "abort")
        assert abort.text == "taken: the client went away"
        [failed] = by_name(of(b.out.events, "x"), "failed")
        assert "the client went away" in failed.text


def test_every_word_of_a_transfer_is_kept_and_no_other() -> None:
    recorder = Recorder()
    for word in WORDS:
        recorder.word("p", word, "sent")
    kept = [event.name for event in of(recorder, "t")]
    assert kept == [str(w.__struct_config__.tag) for w in WORDS if getattr(w, "transfer", None) and not isinstance(w, m.Renew)]  # fmt: skip
    [written] = by_name(of(recorder, "t"), "written")
    assert (written.peer, written.epoch, written.seq, written.layers, written.tokens, written.nbytes) == ("p", 1, 2, (0, 1), (0, 3), 30)  # fmt: skip
    assert len(recorder.of("u", "w")) == 0


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 9)), max_size=40))
def test_it_is_bounded_and_what_is_kept_is_whole(runs: list[tuple[str, int]]) -> None:
    recorder, begun = Recorder(most=20, most_of_one=6), dict[str, list[int]]()
    for number, (name, count) in enumerate(runs):
        for _ in range(count):
            recorder.note(name, str(number), float(number))
            begun.setdefault(name, []).append(number)
    kept = {name: trace for name in begun for trace in recorder.of(name, "w")}
    assert sum(len(trace.events) for trace in kept.values()) <= 20 + 6
    for name, trace in kept.items():
        told = [int(event.name) for event in trace.events]
        assert len(told) <= 6
        assert told == sorted(told)
        full = begun[name]
        start = len(full) - len(told) - trace.more  # what came before it was given up, if it ever was
        assert told == full[start : start + len(told)]
    if runs:
        assert runs[-1][0] in kept, "the newest is there"


def test_long_reasons_are_cut() -> None:
    recorder = Recorder()
    recorder.note("t", "failed", 0.0, text="x" * 10_000)
    [event] = of(recorder, "t")
    assert len(event.text) == MAX_TEXT

"""Both ranks of SGLang's backend, over real links in one process: what their schedulers say, poll, and are told."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from ends_rig import Ends as Pair
from ends_rig import open_ends
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regauge.engines import handover
from regauge.engines.bridge import Bridge
from regauge.engines.ended import Ended
from regauge.engines.ends import Ends
from regauge.engines.handover import Handover
from regauge.engines.sglang.callers import Callers
from regauge.engines.sglang.receiving import DecodeRank, Receiving
from regauge.engines.sglang.room import From, To, encode
from regauge.engines.sglang.rooms import RoomsDoor
from regauge.engines.sglang.sending import PrefillRank, Sending, _runs
from regauge.engines.sglang.state import State
from regauge.plan.reference import transfer
from strategies import assert_same

KEY = bytes(range(32))
FIRST = handover.encode(Handover(42, cached=(1, 2, 3)))
DIRECT = encode(From(["p.0"]))
PAGE, OWN_PAGE = 64, 16


@dataclass
class Engines:
    pair: Pair
    prefill: PrefillRank
    decode: DecodeRank
    door: RoomsDoor
    address: str
    """Bootstrap address of prefill."""

    @property
    def to(self) -> str:
        return encode(To(self.pair.peers))

    def ask(self, room: int, tokens: int = 100, *, address: str | None = None) -> tuple[Sending, Receiving]:
        """A request comes to both engines, which know nothing of each other."""
        s = self.prefill.open(room, address or self.address)
        self.prefill.begin(s, tokens)
        return s, self.expect(room, tokens, address=address)

    def expect(self, room: int, tokens: int = 100, *, address: str | None = None) -> Receiving:
        r = self.decode.open(room, address or self.address)
        r.tokens, r.inited = tokens, True
        return r

    def allocate(self, r: Receiving, first: int = 0) -> list[int]:
        until(self, lambda: self.decode.poll(r) is State.WAITING)
        pages = list(range(1, 1 + -(-(r.tokens - first) // OWN_PAGE)))
        self.decode.receive(r, [(pages, first)], first)
        return pages

    def compute(self, s: Sending, chunk: int = PAGE) -> list[int]:
        """As SGLang's scheduler: chunk by chunk, the hand-over with the last."""
        until(self, lambda: self.prefill.poll(s) is State.WAITING)
        s.sending = True
        pages = list(range(2, 2 + -(-s.tokens // PAGE)))
        for first in range(0, s.tokens, chunk):
            end = min(first + chunk, s.tokens)
            new = pages[first // PAGE : -(-end // PAGE)]
            self.prefill.send(s, new, end - first, FIRST if end == s.tokens else None)
        return pages


def until(engines: Engines, condition: Callable[[], bool]) -> None:
    """Poll as SGLang's scheduler does; bounded."""
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "it has not come about"
        for end in (engines.pair.out, engines.pair.into):
            end.run(turn(), 5)


async def turn() -> None:
    """One turn of the links' loop."""


def run_in(end: Bridge, call: Callable[..., object], *given: object) -> None:
    end.post(call, *given)
    end.run(turn(), 5)


@pytest.fixture(scope="module", params=["tcp", "shm"])
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    with open_ends(request.param, resume_s=0.5, offer_s=30.0) as pair:
        config = pair.config
        a, b = pair.source.layout, pair.target.layout
        prefill = PrefillRank(Ends(a, lambda *_: b, out=pair.out, into=None), PAGE, frozenset(), wait_s=30.0)
        door = RoomsDoor(prefill.board, KEY, config, secrets.token_hex(8))
        at = pair.out.run(door.start("127.0.0.1", 0), 5)
        pair.out.post(door.announce, {"p.0": at})

        def over(room: int, reason: str) -> None:
            decode.over(room, reason)

        async def make() -> Callers:
            return Callers(KEY, config, "127.0.0.1", over, asks=True)

        callers = pair.into.run(make(), 5)
        decode = DecodeRank(Ends(b, lambda *_: a, out=None, into=pair.into), callers, pair.peers)
        try:
            yield Engines(pair, prefill, decode, door, f"{at[0]}:{at[1]}")
        finally:
            pair.into.run(callers.close(), 5)
            pair.out.run(door.close(), 5)


rooms = iter(range(1, 1_000_000))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 231), chunk=st.sampled_from([PAGE, 2 * PAGE, 1_024]), direct=st.booleans(),
    cached=st.integers(0, 5), decode_first=st.booleans(),
)  # fmt: skip
def test_what_prefill_computed_arrives_as_the_reference_says(
    engines: Engines, tokens: int, chunk: int, direct: bool, cached: int, decode_first: bool
) -> None:
    room, first = next(rooms), min(cached * OWN_PAGE, (tokens - 1) // OWN_PAGE * OWN_PAGE)
    if decode_first:
        r = engines.expect(room, tokens, address=DIRECT if direct else None)
        own = engines.allocate(r, first)
    s = engines.prefill.open(room, engines.to if direct else engines.address)
    engines.prefill.begin(s, tokens)
    if not decode_first:
        r = engines.expect(room, tokens, address=DIRECT if direct else None)
        assert engines.prefill.poll(s) is State.BOOTSTRAPPING
        own = engines.allocate(r, first)
    src, dst = engines.pair.pools()
    want = dst.copy()
    pages = engines.compute(s, chunk)
    until(engines, lambda: engines.decode.poll(r) is State.SUCCESS)
    until(engines, lambda: engines.prefill.poll(s) is State.SUCCESS)
    transfer(
        src.layout, dst.layout, src.memory, want.memory, src.offsets(np.array(pages)),
        want.offsets(np.array([0] * (first // OWN_PAGE) + own)), (first, tokens),
    )  # fmt: skip
    assert_same(dst, want)
    assert r.handover == Handover(42, cached=(1, 2, 3))
    engines.prefill.forget(s)
    engines.decode.forget(r)
    assert (engines.prefill._rooms, engines.decode._rooms) == ({}, {})
    until(engines, lambda: len(engines.prefill.board) == 0)


def test_a_room_that_is_forgotten_at_once_leaves_the_board(engines: Engines) -> None:
    """SGLang clears a sender in the pass in which it polls its success, ahead of the links' loop."""
    s, r = engines.ask(next(rooms))
    engines.allocate(r)
    engines.compute(s)
    until(engines, lambda: engines.decode.poll(r) is State.SUCCESS)
    ends: list[Ended] = []
    until(engines, lambda: bool(ends.extend(engines.pair.out.ended()) or ends))
    engines.pair.out._ended += ends
    held = threading.Event()
    engines.pair.out.post(held.wait, 10)
    assert engines.prefill.poll(s) is State.SUCCESS
    engines.prefill.forget(s)
    engines.decode.forget(r)
    held.set()
    run_in(engines.pair.out, lambda: None)
    assert len(engines.prefill.board) == 0


def test_prefill_that_is_aborted_tells_decode(engines: Engines) -> None:
    for allocated in (False, True):
        s, r = engines.ask(next(rooms))
        if allocated:
            engines.allocate(r)
            until(engines, lambda s=s: engines.prefill.poll(s) is State.WAITING)  # type: ignore[misc]
            s.sending = True
            engines.prefill.send(s, [2], PAGE)
        engines.prefill.cancel(s, "prefill's request was aborted")
        if not allocated:
            engines.allocate(r)
        until(engines, lambda r=r: engines.decode.poll(r) is State.FAILED)  # type: ignore[misc]
        assert "prefill's request was aborted" in engines.decode.reason(r)
        until(engines, lambda s=s: engines.prefill.poll(s) is State.FAILED)  # type: ignore[misc]
        engines.prefill.forget(s)
        engines.decode.forget(r)


def test_decode_that_gives_up_holds_its_pages_until_nothing_writes_them(engines: Engines) -> None:
    s, r = engines.ask(next(rooms))
    engines.allocate(r)
    until(engines, lambda: engines.prefill.poll(s) is State.WAITING)
    s.sending = True
    engines.prefill.send(s, [2], PAGE)
    engines.decode.abort(r, "decode's request was aborted")
    assert engines.decode.poll(r) in {State.TRANSFERRING, State.FAILED}
    until(engines, lambda: engines.decode.poll(r) is State.FAILED)
    assert engines.decode.quiet(r.room)
    assert "aborted" in engines.decode.reason(r)
    until(engines, lambda: engines.prefill.poll(s) is State.FAILED)
    assert not any(r.name in lent for lent in engines.pair.into._lent)


def test_what_comes_for_an_aborted_request_is_not_used(engines: Engines) -> None:
    s, r = engines.ask(next(rooms))
    engines.allocate(r)
    engines.compute(s)
    ends: list[Ended] = []
    until(engines, lambda: bool(ends.extend(engines.pair.into.ended()) or ends))
    engines.pair.into._ended += ends  # it has come, and the scheduler does not know yet
    engines.decode.abort(r, "its client left")
    assert engines.decode.poll(r) is State.FAILED
    engines.decode.forget(r)
    until(engines, lambda: engines.prefill.poll(s) is State.SUCCESS)
    engines.prefill.forget(s)


def test_a_room_that_decode_gave_up_before_it_had_pages_is_not_computed(engines: Engines) -> None:
    s, r = engines.ask(next(rooms))
    until(engines, lambda: engines.decode.poll(r) is State.WAITING)
    engines.decode.abort(r, "its client left")
    assert engines.decode.poll(r) is State.FAILED
    until(engines, lambda: engines.prefill.poll(s) is State.FAILED)
    assert "its client left" in engines.prefill.reason(s)


def test_prefill_whose_decode_never_comes_gives_up(engines: Engines) -> None:
    s = engines.prefill.open(next(rooms), engines.address)
    engines.prefill.begin(s, 10)
    run_in(engines.pair.out, engines.prefill.board.sweep, time.monotonic() + 60)
    assert engines.prefill.poll(s) is State.FAILED
    assert "no decode engine asked" in engines.prefill.reason(s)


def test_wrong_requests_fail_with_a_reason_and_disturb_no_other(engines: Engines) -> None:
    room = next(rooms)
    s, r = engines.ask(room)
    wrong = [
        (engines.prefill.open(room, engines.address), "has a request here already"),
        (engines.prefill.open(next(rooms), DIRECT), "meant for decode"),
        (engines.prefill.open(next(rooms), "regauge.x"), "no leg of a transfer"),
        (engines.prefill.open(0, engines.address), "bootstrap_room 0"),
    ]
    for bad, reason in wrong:
        engines.prefill.begin(bad, 100)
        assert engines.prefill.poll(bad) is State.FAILED
        assert reason in engines.prefill.reason(bad)
        engines.prefill.forget(bad)
    for worse, reason in [
        (engines.expect(room), "has a request here already"),
        (engines.expect(next(rooms), address=engines.to), "meant for prefill"),
        (engines.expect(0), "bootstrap_room 0"),
        (engines.expect(next(rooms), address="127.0.0.1:1"), "cannot connect"),
        (engines.expect(next(rooms), address="nowhere"), "make no address"),
    ]:
        until(engines, lambda worse=worse: engines.decode.poll(worse) is State.FAILED)  # type: ignore[misc]
        assert reason in engines.decode.reason(worse)
        engines.decode.forget(worse)
    engines.allocate(r)
    engines.compute(s)
    until(engines, lambda: engines.decode.poll(r) is State.SUCCESS)
    until(engines, lambda: engines.prefill.poll(s) is State.SUCCESS)
    engines.prefill.forget(s)
    engines.decode.forget(r)


@pytest.mark.parametrize(
    ("sends", "why"), [([(PAGE, True)], "tokens 0 to 64 of 100"), ([(10, False), (90, True)], "10 to 100")]
)
def test_chunks_that_do_not_make_the_prompt_fail_it(engines: Engines, sends: list[tuple[int, bool]], why: str) -> None:
    s, r = engines.ask(next(rooms))
    engines.allocate(r)
    until(engines, lambda: engines.prefill.poll(s) is State.WAITING)
    s.sending = True
    for tokens, last in sends:
        engines.prefill.send(s, [2], tokens, FIRST if last else None)
    until(engines, lambda: engines.prefill.poll(s) is State.FAILED)
    assert why in engines.prefill.reason(s)
    until(engines, lambda: engines.decode.poll(r) is State.FAILED)
    engines.decode.forget(r)


def test_pages_that_another_ranks_failure_frees_are_read_no_more(engines: Engines) -> None:
    s, r = engines.ask(next(rooms))
    engines.allocate(r)
    engines.compute(s)
    engines.prefill.abandon(s)
    assert engines.prefill.poll(s) in {State.FAILED, State.SUCCESS}  # its end is known
    until(engines, lambda: engines.decode.poll(r) in {State.FAILED, State.SUCCESS})
    engines.prefill.forget(s)
    engines.decode.forget(r)


def test_what_prefill_hands_over_must_be_one(engines: Engines) -> None:
    s, r = engines.ask(next(rooms), 10)
    engines.allocate(r)
    until(engines, lambda: engines.prefill.poll(s) is State.WAITING)
    s.sending = True
    engines.prefill.send(s, [2], 10, b"\xc1")
    until(engines, lambda: engines.decode.poll(r) is State.FAILED)
    assert "hand-over from p.0" in engines.decode.reason(r)
    engines.decode.forget(r)


@given(st.sets(st.integers(0, 20)).map(sorted))
def test_runs_hold_each_layer_once(layers: list[int]) -> None:
    ranges = _runs(layers)
    assert [layer for first, end in ranges for layer in range(first, end)] == layers
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))

"""A worker's half of vLLM's connector, over real links between two ranks in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from regauge.config import TransferConfig
from regauge.engines.bridge import ReceivingEnd, SendingEnd
from regauge.engines.ended import Ended
from regauge.engines.ends import Ends
from regauge.engines.local.kv import allocate
from regauge.engines.vllm.schedule import Blocks, Computed, Drop, Expect, Fail, Finish, Offer, ReceiveParams, SendParams
from regauge.engines.vllm.worker import Rank, Results
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Rope
from regauge.move.bound import Borrowed, Memory
from regauge.plan.reference import transfer
from strategies import Pool, assert_same

KEY = bytes(range(32))
MODEL = attention_model("m", 3, Array(2, 16), rope=Rope(1e4, 16))
OWN, THEIRS = ([3, 1, 2],), ([4, 0, 7],)


@dataclass
class Ranks:
    prefill: Rank
    decode: Rank
    source: Pool
    target: Pool
    to: dict[str, tuple[str, int]]

    def offer(self, request: str, blocks: tuple[list[int], ...], name: str = "t") -> None:
        params = SendParams(name, self.to)
        self.prefill.obey([Offer(request, params, 40), Blocks(request, blocks), Computed(request, (0, 40))])
        self.prefill.saved_all()
        self.prefill.obey([Finish(request, None)])

    def expect(self, request: str, blocks: tuple[list[int], ...], name: str = "t") -> None:
        self.decode.obey([Expect(request, ReceiveParams(name, ["p.0"]), 40, 0, blocks)])


def pool(memory: Memory) -> Pool:
    starts = {r.name: r.base - memory.slab.address for r in memory.layout.regions}
    return Pool(memory.layout, memory.slab.array, starts)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    layouts = [from_short(text, MODEL, pages=12) for text in ("bf16,page=16,hnd", "bf16,page=16,nhd")]
    source, target = (allocate(layout, "kv") for layout in layouts)
    for seed, memory in enumerate((source, target)):
        memory.slab.array[:] = np.random.default_rng(seed).integers(0, 255, memory.slab.nbytes, np.uint8)
    config = TransferConfig(transport="tcp", staging_bytes=1 << 20)
    into = ReceivingEnd("d.0", KEY, Borrowed(target.layout), config)
    out = SendingEnd("p.0", KEY, Borrowed(source.layout), config)
    made = Ranks(
        Rank(Ends(source.layout, lambda *_: layouts[1], out=out, into=None)),
        Rank(Ends(target.layout, lambda *_: layouts[0], out=None, into=into)),
        pool(source), pool(target), {"d.0": into.address},
    )  # fmt: skip
    yield made
    made.prefill.close()
    made.decode.close()
    for memory in (source, target):
        memory.slab.close()


def until(rank: Rank, done: Callable[[set[str], set[str], set[str]], bool]) -> None:
    """Ask for results, as an engine does step by step, until what has come satisfies."""
    sent, received, failed = set(), set(), set()
    limit = time.monotonic() + 20
    while not done(sent, received, failed):
        assert time.monotonic() < limit, (sent, received, failed)
        results = rank.results()
        assert not results.sent & sent, "reported twice"
        assert not results.received & received, "reported twice"
        sent |= results.sent
        received |= results.received
        failed |= results.failed
        end = rank.out or rank.into
        assert end is not None
        end.run(asyncio.sleep(0), 5)


def test_a_name_that_is_taken_fails_the_second_request_and_spares_the_first(ranks: Ranks) -> None:
    """Its words must not be taken for the first's: other blocks would be sent under that name, and their digest would agree."""
    want = ranks.target.copy()
    source, target = ranks.source, ranks.target
    transfer(source.layout, target.layout, source.memory, want.memory,
             source.offsets(np.array(OWN[0])), want.offsets(np.array(THEIRS[0])), (0, 40))  # fmt: skip
    ranks.offer("first", OWN)
    ranks.offer("second", ([5, 6, 8],))
    ranks.expect("first", THEIRS)
    ranks.expect("second", ([9, 10, 11],))
    until(ranks.decode, lambda _, received, failed: (received, failed) == ({"first", "second"}, {"second"}))
    until(ranks.prefill, lambda sent, *_: sent == {"first", "second"})
    assert_same(ranks.target, want)


@pytest.mark.parametrize("handover", [False, True])
def test_decode_has_the_kv_with_the_last_layer_unless_it_wants_the_token(ranks: Ranks, handover: bool) -> None:
    """Prefill samples, and ends its request, after that."""
    params = SendParams("t", ranks.to, handover)
    ranks.expect("r", THEIRS)
    ranks.prefill.obey(
        [Offer("q", params, 40), Blocks("q", OWN), Computed("q", (0, 16), cached=True), Computed("q", (16, 40))]
    )
    for layer in range(MODEL.num_layers):
        ranks.prefill.saved(layer)
    if handover:
        assert ranks.prefill.results() == ranks.decode.results() == Results(set(), set(), set())
        ranks.prefill.obey([Finish("q", 7)])
    until(ranks.decode, lambda _, received, failed: (received, failed) == ({"r"}, set()))
    assert ranks.decode.last is not None
    assert (ranks.decode.last.handover != b"") == handover
    if not handover:
        while ranks.prefill.sent is None:  # the commit's word comes back
            assert ranks.prefill.results().sent == set(), "its blocks are the request's until it ends"
        ranks.prefill.obey([Finish("q", 7)])
    until(ranks.prefill, lambda sent, *_: sent == {"q"})
    assert ranks.prefill.sent is not None
    assert 0 < ranks.prefill.sent.computed < ranks.decode.last.at <= time.monotonic()


def test_what_a_broken_forward_pass_leaves_out_is_not_the_end(ranks: Ranks) -> None:
    """vLLM calls `saved_all` then too."""
    ranks.expect("r", THEIRS)
    ranks.prefill.obey([Offer("q", SendParams("t", ranks.to), 40), Blocks("q", OWN), Computed("q", (0, 40))])
    ranks.prefill.saved(0)
    ranks.prefill.saved_all()
    ranks.prefill.obey([Drop("q", "the engine has failed", report=True)])
    until(ranks.decode, lambda _, received, failed: received == failed == {"r"})


def test_ends_are_told_once_to_whoever_counts_them(ranks: Ranks) -> None:
    ranks.offer("first", OWN)
    ranks.expect("first", THEIRS)
    until(ranks.decode, lambda _, received, __: received == {"first"})
    until(ranks.prefill, lambda sent, *_: sent == {"first"})
    [(role, there)], [(other, here)] = ranks.decode.over(), ranks.prefill.over()
    assert (role, other) == ("decode", "prefill")
    assert there.transfer == here.transfer == "t"
    assert there.wire_bytes == here.wire_bytes > 0
    assert ranks.decode.over() == ranks.prefill.over() == []


def test_what_cannot_come_is_reported_as_received_and_failed(ranks: Ranks) -> None:
    ranks.decode.obey([Fail("r", "no")])
    until(ranks.decode, lambda _, received, failed: received == failed == {"r"})


def test_a_dropped_request_is_reported_once_its_blocks_are_free(ranks: Ranks) -> None:
    ranks.expect("r", THEIRS)
    ranks.decode.obey([Drop("r", "aborted", report=True)])
    until(ranks.decode, lambda _, received, failed: received == failed == {"r"})
    ranks.prefill.obey([Offer("q", SendParams("u", ranks.to), 40), Blocks("q", OWN), Drop("q", "aborted", report=True)])
    until(ranks.prefill, lambda sent, *_: sent == {"q"})
    ranks.prefill.obey([Offer("p", SendParams("v", ranks.to), 40), Drop("p", "preempted", report=False)])
    assert ranks.prefill.results().sent == set()


def test_what_never_reached_the_links_can_be_asked_for_like_the_rest(ranks: Ranks) -> None:
    """A rank that has nothing to send, or that nobody sends to: whoever waits for the transfer's end is told."""
    for rank in (ranks.prefill, ranks.decode):
        rank._ends._concerns = lambda *_, **__: False
    ranks.prefill.obey([Offer("q", SendParams("t", ranks.to), 40)])
    out, into = ranks.prefill.out, ranks.decode.into
    assert out is not None
    assert into is not None
    assert out.run(out.end_of("t", 5), 10) == Ended("t")
    ranks.expect("r", THEIRS)
    assert into.run(into.end_of("t", 5), 10) == Ended("t", "none of p.0 holds what this rank keeps", reason="other")
    until(ranks.decode, lambda _, received, failed: received == failed == {"r"})

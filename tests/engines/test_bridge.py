"""An engine's own memory and allocator on both sides: what is said from its thread, and what it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from regauge.config import TransferConfig
from regauge.engines.bridge import Ended, ReceivingEnd, SendingEnd
from regauge.engines.local.kv import allocate
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Rope
from regauge.move.bound import Borrowed, Memory
from regauge.plan.reference import transfer
from strategies import Pool, assert_same

KEY = bytes(range(32))
MODEL = attention_model("m", 3, Array(2, 16), rope=Rope(1e4, 16))
LAYERS = range(MODEL.num_layers)


@dataclass
class Ends:
    out: SendingEnd
    into: ReceivingEnd
    source: Memory
    target: Memory

    def pools(self) -> tuple[Pool, Pool]:
        a, b = (
            Pool(m.layout, m.slab.array, {r.name: r.base - m.slab.address for r in m.layout.regions})
            for m in (self.source, self.target)
        )
        return a, b

    @property
    def peers(self) -> dict[str, tuple[str, int]]:
        return {"d.0": self.into.address}


@pytest.fixture(params=["tcp", "shm"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    source, target = (
        allocate(from_short(text, MODEL, pages=24), "kv") for text in ("bf16,page=64,hnd", "bf16,page=16,nhd")
    )
    for seed, memory in enumerate((source, target)):
        memory.slab.array[:] = np.random.default_rng(seed).integers(0, 255, memory.slab.nbytes, np.uint8)
    config = TransferConfig(transport=request.param, staging_bytes=1 << 20, lease_s=2.0, resume_s=0.5, offer_s=5.0)
    into = ReceivingEnd("d.0", KEY, Borrowed(target.layout), config)
    out = SendingEnd("p.0", KEY, Borrowed(source.layout), config)
    yield Ends(out, into, source, target)
    out.close()
    into.close()
    for memory in (source, target):
        memory.slab.close()


def ended(end: SendingEnd | ReceivingEnd) -> Ended:
    """The next transfer that ends: an engine asks in its own loop, here a bounded one."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        if found := end.ended():
            [one] = found
            return one
        end._wait(asyncio.sleep(0), 5)  # a turn of the links' loop
    raise AssertionError("nothing has ended")


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


def test_nobody_there_is_an_error_and_not_a_wait(ends: Ends) -> None:
    ends.out.offer("x", {"d.0": ("127.0.0.1", 1)}, 40)
    ends.out.pages("x", [([0], 0)])
    ends.out.ready("x", (0, 1), (0, 40))
    assert "127.0.0.1:1" in ended(ends.out).error


def test_names_in_use_are_an_error_of_the_second(ends: Ends) -> None:
    ends.into.expect("x", ["p.0"], 40, [([1, 2, 3], 0)])
    ends.into.expect("x", ["p.0"], 40, [([4, 5, 6], 0)])
    assert "is expected already" in ended(ends.into).error


def test_a_layout_that_prefill_does_not_know_is_one_transfers_refusal() -> None:
    source = allocate(from_short("bf16,page=64", MODEL, pages=8), "kv")
    other = msgspec.structs.replace(MODEL, states=[msgspec.structs.replace(s, rope=None) for s in MODEL.states])
    target = allocate(from_short("bf16,page=16", other, pages=8), "kv")
    config = TransferConfig(transport="tcp", staging_bytes=1 << 20)
    into, out = (
        ReceivingEnd("d.0", KEY, Borrowed(target.layout), config),
        SendingEnd("p.0", KEY, Borrowed(source.layout), config),
    )
    try:
        out.offer("x", {"d.0": into.address}, 40)
        assert "rope" in ended(out).error
    finally:
        out.close()
        into.close()
        source.slab.close()
        target.slab.close()

"""Both sides of the crossing over real connections: pages arrive as the reference says, and failures lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from regauge.config import TransferConfig
from regauge.engines.local.kv import allocate
from regauge.errors import AuthError, ProtocolError, Refused, RegaugeError, TransferFailed
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Rope
from regauge.move.crossing import Memory
from regauge.move.inbound import InboundLinks
from regauge.move.outbound import OutboundLinks, Outgoing
from regauge.move.pages import PagePool
from regauge.move.shm import ShmTransport
from regauge.move.tcp import TcpTransport
from regauge.move.transport import Transport
from regauge.plan import Judge, check
from regauge.plan.gate import Gate
from regauge.plan.reference import transfer
from strategies import Pool, assert_same

MODEL = attention_model("m", 3, Array(2, 16), rope=Rope(1e4, 16))
KEY = bytes(range(32))
PAIRS = {
    "direct": ("bf16,page=16", "bf16,page=16"),
    "remap-pages": ("bf16,page=64,hnd", "bf16,page=16,nhd"),
    "remap-ratio": ("bf16,page=24", "bf16,page=16,fused"),
    "remap-transposed": ("fp16,page=32,kt", "fp16,page=16"),
    "widen": ("fp8_e4m3,page=64,hnd", "bf16,page=16,nhd"),
    "narrow": ("bf16,page=16", "fp8_e4m3,page=64,hnd,scale=token_head"),
    "rescale": ("fp8_e4m3,scale=token_head", "fp8_e5m2"),
    "whole-numbers": ("bf16,page=16", "int8,page=64,hnd,scale=token_head"),
    "other-bias": ("fp8_e4m3fnuz,page=64,hnd", "fp8_e4m3,page=16"),
}


def transports(kind: str) -> tuple[Transport, Transport]:
    if kind == "shm":
        return ShmTransport(key=KEY, name="p"), ShmTransport(key=KEY, name="d")
    return TcpTransport(key=KEY, name="p"), TcpTransport(key=KEY, name="d")


@dataclass
class Both:
    """A prefill and a decode side in one loop."""

    out: OutboundLinks
    into: InboundLinks
    source: Memory
    target: Memory
    address: tuple[str, int]
    source_pool: PagePool
    freed: list[str] = field(default_factory=list)

    async def offer(self, name: str, tokens: int) -> Outgoing:
        pages = np.array(self.source_pool.lease(name, self.source_pool.pages_for(tokens)), np.int64)

        def free() -> None:
            self.source_pool.release(name)
            self.freed.append(name)

        try:
            return await self.out.start(name, "d", self.address, pages, tokens, free)
        except BaseException:
            free()
            raise

    def expect(self, name: str, tokens: int) -> asyncio.Future:
        self.into.pool.lease(name, self.into.pool.pages_for(tokens))
        return self.into.expect(name, "p", tokens)

    def pools(self) -> tuple[Pool, Pool]:
        """The two memories as the reference sees them."""
        return tuple(
            Pool(m.layout, m.slab.array, {r.name: r.base - m.slab.address for r in m.layout.regions})
            for m in (self.source, self.target)
        )  # type: ignore[return-value]


@contextlib.asynccontextmanager
async def both(
    pair: str = "widen",
    kind: str = "shm",
    *,
    key: bytes = KEY,
    pages: int = 24,
    judges: tuple[Judge, Judge] = (check, check),
    **config: object,
) -> AsyncIterator[Both]:
    a, b = (from_short(text, MODEL, pages=pages) for text in PAIRS[pair])
    source, target = allocate(a, "kv"), allocate(b, "kv")
    settings = TransferConfig(staging_bytes=1 << 20, **config)  # type: ignore[arg-type]
    tp, td = transports(kind)
    for transport, memory in ((tp, source), (td, target)):
        transport.register(memory.slab)
    pool = PagePool(pages, b.groups[0].page_size)
    out = OutboundLinks("p", key, source, tp, settings, judges[0])
    into = InboundLinks("d", KEY, target, td, pool, settings, judges[1])
    address = await into.start("127.0.0.1")
    try:
        yield Both(out, into, source, target, address, PagePool(pages, a.groups[0].page_size))
    finally:
        await out.close()
        await into.close()
        for transport, memory in ((tp, source), (td, target)):
            transport.close()
            memory.slab.close()


def mark_all(sent: Outgoing, tokens: int, *, chunk: int = 100) -> None:
    """As an engine does: prompt chunk by prompt chunk, layer by layer."""
    for start in range(0, tokens, chunk):
        for layer in range(MODEL.num_layers):
            sent.ready((layer, layer + 1), (start, min(start + chunk, tokens)))


async def settle(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that no event announces."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def fill(memory: Memory, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = Pool(memory.layout, memory.slab.array, {r.name: r.base - memory.slab.address for r in memory.layout.regions})
    memory.slab.array[:] = rng.integers(0, 255, memory.slab.nbytes, np.uint8)
    pool.make_scales_positive(rng)


WAYS = [
    *((pair, *way) for pair in PAIRS for way in (("shm", "auto", "fused"), ("shm", "staged", "staged"))),
    *((pair, "tcp", "auto", "staged") for pair in PAIRS if pair not in ("direct", "remap-ratio")),
    *((pair, kind, "mapped", "mapped") for pair in ("direct", "remap-ratio") for kind in ("shm", "tcp")),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("pair", "kind", "mode", "chosen"), WAYS)
async def test_every_kind_of_pair_arrives_as_the_reference_says(pair: str, kind: str, mode: str, chosen: str) -> None:
    async with both(pair, kind, mode=mode) as b:
        fill(b.source, 1)
        fill(b.target, 2)
        src, dst = b.pools()
        want = dst.copy()
        for name, tokens in (("one", 1), ("page", 16), ("more", 17), ("many", 231)):
            arrival = b.expect(name, tokens)
            sent = await b.offer(name, tokens)
            await sent.wait_granted()
            taken = np.array(b.source_pool.owned(name))
            transfer(src.layout, dst.layout, src.memory, want.memory, src.offsets(taken),
                     want.offsets(np.array(b.into.pool.owned(name))), (0, tokens))  # fmt: skip
            mark_all(sent, tokens)
            sent.finish(b"first token")
            arrived = await asyncio.wait_for(arrival, 20)
            done = await sent.done()
            assert arrived.handover == b"first token"
            assert arrived.wire_bytes == done.wire_bytes > 0
            assert b.into.pool.state(name) == "committed"
            assert_same(dst, want)
        assert arrived.mode == chosen
        assert b.freed == ["one", "page", "more", "many"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("kind", "mode", "nbytes"),
    [
        ("shm", "auto", 4096),
        ("shm", "fused", 4096),
        ("shm", "staged", 1 << 20),
        ("shm", "mapped", 1 << 20),
        ("tcp", "auto", 1 << 20),
    ],
)
async def test_slots_are_given_where_they_may_be_needed(kind: str, mode: str, nbytes: int) -> None:
    async with both("direct", kind, mode=mode) as b:
        await b.out.connect("d", b.address)
        staging = b.out._links["d"].writer.staging
        assert staging is not None
        assert staging.slot_bytes == nbytes


@pytest.mark.anyio
@pytest.mark.parametrize("side", [0, 1])
async def test_either_side_refuses_a_pair_that_its_quality_gate_does_not_allow(side: int) -> None:
    judges = [check, check]
    judges[side] = Gate({}, []).check
    async with both(judges=(judges[0], judges[1])) as b:
        with pytest.raises((Refused, ProtocolError), match=r"quality: prefill has .* no quality record is given"):
            await b.offer("x", 20)
    async with both("direct", judges=(judges[0], judges[1])) as b:
        await b.offer("x", 20)


@pytest.mark.anyio
async def test_offer_and_request_may_come_in_either_order_and_interleave() -> None:
    async with both() as b:
        first, second = await b.offer("first", 40), await b.offer("second", 30)
        arrivals = [b.expect("second", 30), b.expect("first", 40)]
        await first.wait_granted()
        await second.wait_granted()
        for layer in range(3):
            first.ready((layer, layer + 1), (0, 40))
            second.ready((layer, layer + 1), (0, 30))
        second.finish(b"2")
        first.finish(b"1")
        assert [(await a).handover for a in arrivals] == [b"2", b"1"]
        await first.done()
        await second.done()
        for name in ("first", "second"):
            b.into.pool.release(name)
        b.into.pool.check_integrity()
        b.source_pool.check_integrity()
        assert (b.into.pool.free, b.source_pool.free) == (24, 24)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_an_abort_on_either_side_tells_the_other_and_frees_all_pages(kind: str) -> None:
    async with both(kind=kind) as b:
        arrival, sent = b.expect("x", 100), await b.offer("x", 100)
        await sent.wait_granted()
        sent.ready((0, 2), (0, 100))
        sent.cancel("the client went away")
        with pytest.raises(TransferFailed, match="the client went away"):
            await arrival
        arrival, sent = b.expect("y", 100), await b.offer("y", 100)
        await sent.wait_granted()
        sent.ready((0, 2), (0, 100))
        b.into.cancel("y", "the request was aborted")
        with pytest.raises(TransferFailed, match="aborted"):
            await arrival
        with pytest.raises(TransferFailed, match="d gave the transfer up"):
            await sent.done()
        await settle(lambda: b.into.pool.free == 24 and b.source_pool.free == 24)
        b.into.pool.check_integrity()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_lost_link_fails_its_transfers_and_a_new_one_works(kind: str) -> None:
    async with both(kind=kind) as b:
        arrival, sent = b.expect("x", 100), await b.offer("x", 100)
        await sent.wait_granted()
        sent.ready((0, 1), (0, 100))
        b.out._links["d"].channel.close()
        with pytest.raises(TransferFailed, match="lost prefill worker p"):
            await arrival
        with pytest.raises(TransferFailed, match="lost the link to d"):
            await sent.done()
        await settle(lambda: b.into.pool.free == 24 and b.source_pool.free == 24)
        arrival, sent = b.expect("y", 10), await b.offer("y", 10)
        await sent.wait_granted()
        mark_all(sent, 10)
        sent.finish(b"")
        await arrival


@pytest.mark.anyio
async def test_a_writer_that_falls_silent_loses_its_lease() -> None:
    async with both(lease_s=2.0) as b:
        arrival, sent = b.expect("x", 100), await b.offer("x", 100)
        await sent.wait_granted()
        if b.out._ticker is not None:
            b.out._ticker.cancel()  # no renewal comes: the process is there, and does nothing
        with pytest.raises(TransferFailed, match="no sign of life from p for 2 s"):
            await asyncio.wait_for(arrival, 20)
        await settle(lambda: b.into.pool.free == 24 and b.source_pool.free == 24)


@pytest.mark.anyio
async def test_a_transfer_nobody_asked_for_ends_at_its_time_limit() -> None:
    async with both(offer_s=0.5) as b:
        sent = await b.offer("x", 10)
        with pytest.raises(TransferFailed, match="did not complete in time"):
            await asyncio.wait_for(sent.done(), 20)
        arrival = b.expect("y", 10)
        with pytest.raises(TransferFailed, match="did not arrive from p in time"):
            await asyncio.wait_for(arrival, 20)
        assert (b.into.pool.free, b.source_pool.free) == (24, 24)


@pytest.mark.anyio
async def test_a_scatter_that_breaks_fails_its_request_and_no_other() -> None:
    async with both("widen", "tcp") as b:
        arrival, sent = b.expect("x", 40), await b.offer("x", 40)
        await sent.wait_granted()
        link = b.into._links["p"]
        whole = link.scatterer.scatter

        def broken(*_: object) -> None:
            raise ValueError("a kernel refused its arguments")

        link.scatterer.scatter = broken  # type: ignore[method-assign, assignment]
        mark_all(sent, 40)
        with pytest.raises(TransferFailed, match="could not be brought into its pages: a kernel refused"):
            await asyncio.wait_for(arrival, 20)
        with pytest.raises(TransferFailed, match="d gave the transfer up"):
            await sent.done()
        link.scatterer.scatter = whole  # type: ignore[method-assign]
        arrival, sent = b.expect("y", 40), await b.offer("y", 40)
        await sent.wait_granted()
        mark_all(sent, 40)
        sent.finish(b"")
        await asyncio.wait_for(arrival, 20)
        b.into.pool.release("y")
        await settle(lambda: b.into.pool.free == 24 and b.source_pool.free == 24)


@pytest.mark.anyio
async def test_a_write_that_breaks_ends_the_link_and_is_told_at_once() -> None:
    async with both("widen", "tcp") as b:
        arrival, sent = b.expect("x", 40), await b.offer("x", 40)
        await sent.wait_granted()

        def broken(*_: object) -> int:
            raise ValueError("a kernel refused its arguments")

        b.out._links["d"].writer.write = broken  # type: ignore[method-assign, assignment]
        mark_all(sent, 40)
        for waiting in (arrival, sent.done()):
            with pytest.raises(TransferFailed, match="lost"):
                await asyncio.wait_for(waiting, 20)
        await settle(lambda: b.into.pool.free == 24 and b.source_pool.free == 24)


@pytest.mark.anyio
async def test_a_decode_side_whose_regions_are_too_small_is_refused() -> None:
    async with both() as b:
        regions = [msgspec.structs.replace(r, nbytes=r.nbytes // 2) for r in b.target.layout.regions]
        b.into._memory = Memory(msgspec.structs.replace(b.target.layout, regions=regions), b.target.slab)
        with pytest.raises(Refused, match=r"region 'k' of the decode layout has \d+ bytes, its pages take \d+"):
            await b.offer("x", 10)


@pytest.mark.anyio
async def test_a_pair_that_is_refused_makes_no_link_and_says_why() -> None:
    async with both() as b:
        unlike = attention_model("m", 3, Array(2, 16), rope=Rope(5e5, 16))
        other = msgspec.structs.replace(b.source.layout, model=unlike)
        b.out._memory = Memory(other, b.source.slab)
        with pytest.raises(RegaugeError, match=r"rope.theta: prefill has 500000.0, decode has 10000.0"):
            await b.offer("x", 10)
        assert b.source_pool.free == 24


@pytest.mark.anyio
async def test_a_peer_without_the_key_makes_no_link() -> None:
    async with both(key=bytes(32)) as b:
        with pytest.raises(AuthError):
            await b.offer("x", 10)


@pytest.mark.anyio
async def test_names_are_checked() -> None:
    async with both() as b:
        with pytest.raises(ProtocolError, match=r"is decode worker 'd', not decode worker 'other'"):
            await b.out.start("x", "other", b.address, np.array([0]), 1, lambda: None)
        b.expect("x", 10)
        sent = await b.offer("x", 11)
        with pytest.raises(TransferFailed, match="p offers 11 tokens, the request has 10"):
            await sent.done()
        assert (b.into.pool.free, b.source_pool.free) == (24, 24)
        first = await b.offer("y", 5)
        with pytest.raises(ProtocolError, match="transfer 'y' is under way already"):
            await b.out.start("y", "d", b.address, np.array([0]), 5, lambda: None)
        arrival = b.expect("y", 5)
        await first.wait_granted()
        mark_all(first, 5)
        first.finish(b"")
        await arrival

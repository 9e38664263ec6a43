"""Both sides of the crossing over real connections: pages arrive as the reference says, and failures lose nothing."""

from __future__ import annotations

import asyncio
from threading import get_ident

import msgspec
import numpy as np
import pytest
from links_rig import PAIRS, both, fill, mark_all, settle

from regauge.errors import AuthError, BoundsError, ProtocolError, Refused, RegaugeError, TransferFailed
from regauge.layout.presets import attention_model
from regauge.layout.spec import Array, Layout, Rope
from regauge.move.bound import Memory
from regauge.move.channel import decode_layout
from regauge.move.crossing import PageTable
from regauge.move.grants import STAGING_GRANT, grant_id
from regauge.plan import Verdict, check
from regauge.plan.gate import Gate
from regauge.plan.reference import transfer
from strategies import assert_same

WAYS = [
    *((pair, *way) for pair in PAIRS for way in (("shm", "auto", "fused"), ("shm", "staged", "staged"))),
    *((pair, "tcp", "auto", "staged") for pair in PAIRS if pair not in ("direct", "remap-ratio")),
    *((pair, kind, "mapped", "mapped") for pair in ("direct", "remap-ratio") for kind in ("shm", "tcp")),
]


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["mapped", "staged"])
async def test_a_peer_can_write_only_what_it_was_granted_and_only_while_it_was(mode: str) -> None:
    async with both("direct", "tcp", mode=mode) as b:
        fill(b.source, 1)
        await b.out.connect("d", b.address)
        data, ours = b.out._links["d"].data.peers[0], b.source.slab.address
        slots = b.out._links["d"].writer.staging
        own = b.target.layout
        await settle(lambda: "p" in b.into._links)
        page = own.regions[0].base

        async def rejected(address: int, nbytes: int, grant: int) -> bool:
            ticket = data.post(np.array([[ours, address, nbytes]], np.int64), 10, grant)
            await asyncio.to_thread(ticket.wait, 10)
            assert ticket.state == "landed" or isinstance(ticket.error, BoundsError)
            return ticket.state != "landed"

        async def none_writes(grants: list[int]) -> bool:
            return all([await rejected(page, 16, grant) for grant in grants])

        names = [0, STAGING_GRANT, *(grant_id("x", epoch) for epoch in range(4))]
        assert await none_writes(names)
        arrival = b.expect("x", 40)
        sent = await b.offer("x", 40)
        await sent.wait_granted()
        free = [at for at in range(own.groups[0].pages) if at not in set(b.pool.owned("x"))]
        stride = own.regions[0].nbytes // own.groups[0].pages // len(own.groups[0].layer_ids)
        assert all([await rejected(page + at * stride, stride, grant) for at in free[:3] for grant in names])
        if mode == "mapped":
            lent = page + b.pool.owned("x")[0] * stride
            assert [grant for grant in names if not await rejected(lent, 16, grant)] == [grant_id("x", 1)]
        else:
            assert await none_writes(names)  # its pages neither: it has slots
            assert not await rejected(slots.address, 16, STAGING_GRANT)
        mark_all(sent, 40)
        sent.finish(b"")
        await arrival
        before = b.target.slab.array.copy()
        assert all([await rejected(page + at * stride, 16, grant) for at in range(4) for grant in names])
        assert np.array_equal(b.target.slab.array, before)


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
                     want.offsets(np.array(b.pool.owned(name))), (0, tokens))  # fmt: skip
            mark_all(sent, tokens)
            sent.finish(b"first token")
            arrived = await asyncio.wait_for(arrival, 20)
            done = await sent.done()
            assert arrived.handover == b"first token"
            assert arrived.wire_bytes == done.wire_bytes > 0
            assert b.pool.state(name) == "committed"
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
        waiting = b.expect("x", 20)
        with pytest.raises((Refused, ProtocolError), match=r"quality: prefill has .* no quality record is given"):
            await b.offer("x", 20)
        for arrival in (waiting, b.expect("later", 20)):  # neither waits for an offer that cannot come
            with pytest.raises(TransferFailed, match=r"no link from p: quality: prefill has"):
                await asyncio.wait_for(arrival, 20)
        assert b.pool.free == 24
        b.out._judge = b.into._judge = check  # as after a restart with another record
        sent = await b.offer("y", 20)
        waiting = b.expect("y", 20)
        mark_all(sent, 20)
        sent.finish(b"")
        await asyncio.wait_for(waiting, 20)
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
            b.pool.release(name)
        b.pool.check_integrity()
        b.source_pool.check_integrity()
        assert (b.pool.free, b.source_pool.free) == (24, 24)


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
        await settle(lambda: b.pool.free == 24 and b.source_pool.free == 24)
        b.pool.check_integrity()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_transfer_outlives_its_link(kind: str) -> None:
    """The link breaks three times, once in the middle of a chunk; what was verified is not sent again."""
    async with both(kind=kind) as b:
        fill(b.source, 1)
        fill(b.target, 2)
        src, dst = b.pools()
        want = dst.copy()
        arrival, sent = b.expect("x", 231), await b.offer("x", 231)
        await sent.wait_granted()
        transfer(src.layout, dst.layout, src.memory, want.memory, src.offsets(np.array(b.source_pool.owned("x"))),
                 want.offsets(np.array(b.pool.owned("x"))), (0, 231))  # fmt: skip
        for layer in range(3):
            sent.ready((layer, layer + 1), (0, 231))
            await settle(lambda: "d" in b.out._links and not b.out._links["d"].closing)
            if layer == 1:
                await settle(lambda: b.into.transfers()[0].legs[0].progress > 0.5)
                before = b.out.transfers()[0].legs[0].wire_bytes
            b.out._links["d"].channel.close()
        sent.finish(b"first token")
        assert (await asyncio.wait_for(arrival, 20)).handover == b"first token"
        done = await sent.done()
        assert_same(dst, want)
        layer_bytes = b.out._links["d"].writer.crossing.layer_bytes(0, 231)
        assert done.wire_bytes <= before + 2 * layer_bytes, "layer 0 and 1 were verified, and were sent again"
        assert done.wire_bytes >= 3 * layer_bytes


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_lost_link_fails_its_transfers_where_none_is_awaited(kind: str) -> None:
    async with both(kind=kind, resume_s=0.0) as b:
        arrival, sent = b.expect("x", 100), await b.offer("x", 100)
        await sent.wait_granted()
        sent.ready((0, 1), (0, 100))
        b.out._links["d"].channel.close()
        with pytest.raises(TransferFailed, match="lost prefill worker p"):
            await arrival
        with pytest.raises(TransferFailed, match="lost the link to d"):
            await sent.done()
        await settle(lambda: b.pool.free == 24 and b.source_pool.free == 24)
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
        await settle(lambda: b.pool.free == 24 and b.source_pool.free == 24)


@pytest.mark.anyio
async def test_a_transfer_nobody_asked_for_ends_at_its_time_limit() -> None:
    async with both(offer_s=0.5) as b:
        sent = await b.offer("x", 10)
        with pytest.raises(TransferFailed, match="did not complete in time"):
            await asyncio.wait_for(sent.done(), 20)
        arrival = b.expect("y", 10)
        with pytest.raises(TransferFailed, match="did not arrive from p in time"):
            await asyncio.wait_for(arrival, 20)
        assert (b.pool.free, b.source_pool.free) == (24, 24)


@pytest.mark.anyio
async def test_a_scatter_that_breaks_fails_its_request_and_no_other() -> None:
    async with both("widen", "tcp") as b:
        arrival, sent = b.expect("x", 40), await b.offer("x", 40)
        await sent.wait_granted()
        link = b.into._links["p"]
        whole = link.checker.check

        def broken(*_: object) -> None:
            raise ValueError("a kernel refused its arguments")

        link.checker.check = broken  # type: ignore[method-assign, assignment]
        mark_all(sent, 40)
        with pytest.raises(TransferFailed, match="could not be brought into its pages: a kernel refused"):
            await asyncio.wait_for(arrival, 20)
        with pytest.raises(TransferFailed, match="d gave the transfer up"):
            await sent.done()
        link.checker.check = whole  # type: ignore[method-assign]
        arrival, sent = b.expect("y", 40), await b.offer("y", 40)
        await sent.wait_granted()
        mark_all(sent, 40)
        sent.finish(b"")
        await asyncio.wait_for(arrival, 20)
        b.pool.release("y")
        await settle(lambda: b.pool.free == 24 and b.source_pool.free == 24)


@pytest.mark.anyio
async def test_a_write_that_breaks_ends_the_link_and_is_told_at_once() -> None:
    async with both("widen", "tcp") as b:
        arrival, sent = b.expect("x", 40), await b.offer("x", 40)
        await sent.wait_granted()

        def broken(*_: object) -> int:
            raise ValueError("a kernel refused its arguments")

        b.out._links["d"].writer.start = broken  # type: ignore[method-assign, assignment]
        mark_all(sent, 40)
        for waiting in (arrival, sent.done()):
            with pytest.raises(TransferFailed, match=r"could not be written: a kernel refused|lost the link to p"):
                await asyncio.wait_for(waiting, 20)
        await settle(lambda: b.pool.free == 24 and b.source_pool.free == 24)


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
async def test_a_peers_layout_is_read_and_judged_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take half a second, in which other links must not stand still."""
    where: list[int] = []

    def read(data: bytes) -> Layout:
        where.append(get_ident())
        return decode_layout(data)

    def judge(prefill: Layout, decode: Layout) -> Verdict:
        where.append(get_ident())
        return check(prefill, decode)

    for side in ("inbound", "outbound"):
        monkeypatch.setattr(f"regauge.move.{side}.decode_layout", read)
    async with both(judges=(judge, judge)) as b:
        await b.out.connect("d", b.address)
    assert len(where) == 4
    assert get_ident() not in where


@pytest.mark.anyio
async def test_a_peer_without_the_key_makes_no_link() -> None:
    async with both(key=bytes(32)) as b:
        with pytest.raises(AuthError):
            await b.offer("x", 10)


@pytest.mark.anyio
async def test_names_are_checked() -> None:
    async with both() as b:
        with pytest.raises(ProtocolError, match=r"is decode worker 'd', not decode worker 'other'"):
            await b.out.start("x", {"other": b.address}, [PageTable(np.array([0]))], 1, lambda: None)
        b.expect("x", 10)
        sent = await b.offer("x", 11)
        with pytest.raises(TransferFailed, match="p offers 11 tokens, the request has 10"):
            await sent.done()
        assert (b.pool.free, b.source_pool.free) == (24, 24)
        first = await b.offer("y", 5)
        with pytest.raises(ProtocolError, match="transfer 'y' is under way already"):
            await b.out.start("y", {"d": b.address}, [PageTable(np.array([0]))], 5, lambda: None)
        arrival = b.expect("y", 5)
        await first.wait_granted()
        mark_all(first, 5)
        first.finish(b"")
        await arrival

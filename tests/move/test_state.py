"""What the transfer layer shows of itself, and what it counts: of real links, while they carry, break and come back."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from test_links import both, mark_all, settle

from regauge.errors import AuthError, PeerLost, ProtocolError, Refused, TransferFailed
from regauge.move.ledger import Ledger
from regauge.move.protocol import Check
from regauge.move.state import PoolState, Totals, pool_states, session_states

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_both_ends_of_a_link_and_its_pages_are_shown(kind: str) -> None:
    async with both(kind=kind) as b:
        assert (b.into.links(), b.out.links()) == ([], [])
        ledger = Ledger()
        arrival, sent = b.expect("x", 100), await b.offer("x", 100)
        for future in (arrival, sent.finished):
            ledger.watch(future)
        await sent.wait_granted()
        sent.ready((0, 1), (0, 100))
        await settle(lambda: b.into.transfers()[0].legs[0].progress > 0)
        [into], [out] = b.into.links(), b.out.links()
        assert (into.peer, into.state, into.path, into.modes) == ("p", "up", "CONVERT", out.modes)
        assert (out.peer, out.state, out.path) == ("d", "up", "CONVERT")
        assert into.session == out.session == b.out._links["d"].data.sessions[0][:8]
        assert 0 <= into.up_s < 20
        slots = b.out._links["d"].writer.terms().slots
        await settle(lambda: b.out.links()[0].free_slots == slots)
        assert (into.resent, into.resumed, into.free_slots) == (0, 0, None)
        assert pool_states([b.pool]) == [PoolState(24, 16, 17, 7, 0, 0)]
        [session] = session_states(b.into._rails)
        assert (session.peer, session.session) == ("p", into.session)
        assert session.nbytes > 0 or kind == "shm"
        sent.ready((1, 3), (0, 100))
        sent.finish(b"")
        got = await arrival
        await sent.done()
        assert pool_states([b.pool])[0].committed == 7
        ledger.read(b.into)
        ledger.read_sent(b.out)
        found, size = ledger.totals(), got.wire_bytes
        assert found == Totals(2, 2 * size, chunks=found.chunks, received=size, grants=1, credits=found.credits,
                               credit_bytes=found.credit_bytes, landed={"CONVERT": size}, sent=size)  # fmt: skip
        assert found.credits >= 1
        assert 0 < found.credit_bytes <= size
        assert got.spans >= found.chunks >= 2, "of the first layer, and of the others"
        assert found.chunks == got.counted.chunks
        stages = msgspec.structs.astuple(got.stages)
        assert min(stages) >= 0
        assert sum(stages[2:]) == pytest.approx(got.seconds)
        assert (b.out.moved.far, b.into.moved.far, b.into.flying()) == (0, 0, 0), "both ends are on this host"
    assert (b.into.links(), b.out.links()) == ([], [])


async def test_a_link_that_broke_is_shown_and_legs_that_went_on_are_counted_once() -> None:
    async with both(kind="tcp") as b:
        ledger = Ledger()
        arrival, sent = b.expect("x", 100), await b.offer("x", 100)
        await sent.wait_granted()
        sent.ready((0, 1), (0, 100))
        await settle(lambda: b.into.transfers()[0].legs[0].progress > 0)
        b.out._links["d"].channel.close()
        await settle(lambda: [link.state for link in b.out.links()] != ["up"])
        assert {link.state for link in b.out.links()} <= {"closing", "relinking"}
        await settle(lambda: [link.state for link in b.out.links()] == ["up"])
        sent.ready((1, 3), (0, 100))
        sent.finish(b"")
        await asyncio.wait_for(arrival, 20)
        [link] = b.into.links()
        assert (link.state, link.resumed, link.resent) == ("up", 1, 0)
        for _ in range(2):
            ledger.read(b.into)
            assert ledger.totals().resumed == 1


async def test_what_ended_links_have_counted_is_kept_however_many_there_were_between_two_readings() -> None:
    async with both(kind="tcp") as b:
        ledger = Ledger()
        arrival, sent = b.expect("x", 100), await b.offer("x", 100)
        await sent.wait_granted()
        for layer in range(2):
            sent.ready((layer, layer + 1), (0, 100))
            await settle(lambda done=(layer + 1) / 3: b.into.transfers()[0].legs[0].progress >= done - 1e-9)
            link = b.out._links["d"]
            link.channel.close()
            await settle(lambda old=link: b.out._links.get("d") not in (None, old))
        sent.ready((2, 3), (0, 100))
        sent.finish(b"")
        await asyncio.wait_for(arrival, 20)
        [link] = b.into.links()
        assert link.resumed == 1
        for _ in range(2):
            ledger.read(b.into)
            assert ledger.totals().resumed == 2
        b.out._links["d"].channel.close()
        await settle(lambda: b.into.links() == [])
        ledger.read(b.into)
        assert ledger.totals().resumed == 2


async def test_a_writer_that_cannot_be_fenced_yet_is_shown_with_its_quarantined_pages() -> None:
    async with both(kind="tcp", resume_s=0.0) as b:
        arrival, sent = b.expect("x", 100), await b.offer("x", 100)
        await sent.wait_granted()
        held = asyncio.Event()
        link = b.into._links["p"]
        link.checks.add(asyncio.create_task(_until(held)))  # a check that takes long: the pages stay in its reach
        b.out._links["d"].channel.close()
        with pytest.raises(TransferFailed):
            await arrival
        assert [x.state for x in b.into.links()] == ["fencing"]
        assert pool_states([b.pool])[0].quarantined == 7
        held.set()
        await settle(lambda: b.pool.free == 24)
        assert b.into.links() == []


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_chunk_that_is_asked_for_again_is_counted_at_its_link() -> None:
    async with both("direct", "tcp", mode="staged") as b:
        ledger = Ledger()
        arrival, sent = b.expect("x", 40), await b.offer("x", 40)
        await sent.wait_granted()
        link = b.into._links["p"]
        check, spoiled = link.checker.check, []

        def spoil(chunk: Check, tables: object) -> tuple[bool, int]:
            if not spoiled:
                spoiled.append(chunk)
                link.staging.array[:] ^= np.uint8(1)  # of a byte that has landed, before it is looked at
            return check(chunk, tables)  # type: ignore[arg-type]

        link.checker.check = spoil  # type: ignore[method-assign]
        mark_all(sent, 40)
        sent.finish(b"")
        await asyncio.wait_for(arrival, 20)
        assert b.into.links()[0].resent == 1
        ledger.read(b.into)
        assert ledger.totals().resent == 1


async def test_failures_are_counted_by_class_on_each_side() -> None:
    async with both() as b:
        into, out = Ledger(), Ledger()
        arrival, sent = b.expect("x", 100), await b.offer("x", 100)
        into.watch(arrival)
        out.watch(sent.finished)
        await sent.wait_granted()
        b.into.cancel("x", "the request was aborted")
        with pytest.raises(TransferFailed):
            await sent.done()
        assert (into.totals().failed, out.totals().failed) == ({"aborted": 1}, {"peer": 1})


def test_a_transfer_that_never_began_is_counted_by_what_it_met() -> None:
    ledger = Ledger()
    for error in (Refused(("fp8",)), AuthError("k"), PeerLost("gone"), ProtocolError("twice")):
        ledger.failed(error)
    assert ledger.totals().failed == {"refused": 2, "link": 1, "other": 1}

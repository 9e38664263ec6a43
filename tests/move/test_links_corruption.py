"""A chunk that is not what was sent is noticed wherever it lies, is sent once more, and harms nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from links_rig import Both, both, fill, mark_all, settle

from regauge.errors import TransferFailed
from regauge.layout.view import component_view, scale_view
from regauge.move.crossing import PageTable
from regauge.move.protocol import Check
from regauge.plan.reference import addresses, transfer
from strategies import Pool, assert_same

WAYS = [
    ("remap-pages", "tcp", "staged"),
    ("narrow", "tcp", "staged"),
    ("direct", "tcp", "mapped"),
    ("remap-ratio", "shm", "mapped"),
    ("remap-pages", "shm", "staged"),
    ("remap-pages", "shm", "fused"),
    ("widen", "shm", "fused"),
]


def spoil(b: Both, transfer_: str, seq: int, times: int) -> list[Check]:
    """Change a byte of one chunk of a transfer after it has landed and before it is checked, so many times."""
    link, spoilt = b.into._links["p"], []
    whole = link.checker.check

    def check(chunk: Check, tables: Sequence[PageTable]) -> tuple[bool, int]:
        if (chunk.transfer, chunk.seq) == (transfer_, seq) and len(spoilt) < times:
            spoilt.append(chunk)
            if chunk.slot is not None:
                link.staging.array[chunk.slot * link.checker._staging.slot_bytes] ^= 0x40
            else:
                b.target.slab.array[place(b, chunk, tables[0])] ^= 0x40
        return whole(chunk, tables)

    link.checker.check = check  # type: ignore[method-assign]
    return spoilt


def place(b: Both, chunk: Check, table: PageTable) -> int:
    """Offset of a byte of a chunk's first element, in decode's pages."""
    _, target = b.pools()
    group = target.layout.groups[0]
    component = group.components[0]
    layers = (group.layer_ids[chunk.layers[0]],)
    at = addresses(
        component_view(group, component), group, target.offsets(table.pages), np.array(chunk.tokens[:1]), layers
    )
    return int(at.flat[0])


@pytest.mark.anyio
@pytest.mark.parametrize(("pair", "kind", "mode"), WAYS)
async def test_a_spoilt_chunk_is_sent_once_more(pair: str, kind: str, mode: str) -> None:
    async with both(pair, kind, mode=mode) as b:
        fill(b.source, 1)
        fill(b.target, 2)
        src, dst = b.pools()
        want = dst.copy()
        arrival, sent = b.expect("x", 231), await b.offer("x", 231)
        await sent.wait_granted()
        spoilt = spoil(b, "x", 0, 1)
        transfer(src.layout, dst.layout, src.memory, want.memory, src.offsets(np.array(b.source_pool.owned("x"))),
                 want.offsets(np.array(b.pool.owned("x"))), (0, 231))  # fmt: skip
        mark_all(sent, 231)
        await settle(lambda: any(leg.resent for t in b.into.transfers() for leg in t.legs))
        sent.finish(b"first token")
        arrived = await asyncio.wait_for(arrival, 20)
        done = await sent.done()
        assert len(spoilt) == 1
        assert arrived.mode == mode
        assert arrived.wire_bytes == done.wire_bytes
        assert_same(dst, want)


@pytest.mark.anyio
@pytest.mark.parametrize(("pair", "kind", "mode"), WAYS[1::2])
async def test_a_chunk_that_is_spoilt_twice_fails_its_transfer_and_no_other(pair: str, kind: str, mode: str) -> None:
    async with both(pair, kind, mode=mode) as b:
        fill(b.source, 1)
        fill(b.target, 2)
        src, dst = b.pools()
        bad, good = b.expect("bad", 100), b.expect("good", 100)
        sent = {name: await b.offer(name, 100) for name in ("bad", "good")}
        for each in sent.values():
            await each.wait_granted()
        spoilt, want = spoil(b, "bad", 0, 2), dst.copy()
        pages = {name: np.array(b.pool.owned(name)) for name in sent}
        transfer(src.layout, dst.layout, src.memory, want.memory, src.offsets(np.array(b.source_pool.owned("good"))),
                 want.offsets(pages["good"]), (0, 100))  # fmt: skip
        for layer in range(3):
            for each in sent.values():
                each.ready((layer, layer + 1), (0, 100))
        for each in sent.values():
            each.finish(b"")
        with pytest.raises(TransferFailed, match="chunk 0 from p arrived corrupted twice"):
            await asyncio.wait_for(bad, 20)
        with pytest.raises(TransferFailed, match="d gave the transfer up"):
            await asyncio.wait_for(sent["bad"].done(), 20)
        assert len(spoilt) == 2
        await asyncio.wait_for(good, 20)
        await asyncio.wait_for(sent["good"].done(), 20)
        await settle(lambda: b.pool.state("bad") is None)
        got = dst.copy()
        for pool in (got, want):
            blank(pool, pages["bad"])
        assert_same(got, want)
        b.pool.release("good")
        b.pool.check_integrity()
        b.source_pool.check_integrity()
        assert (b.pool.free, b.source_pool.free) == (24, 24)


def blank(pool: Pool, pages: np.ndarray) -> None:
    """Make whatever some pages hold zero."""
    (group,) = pool.layout.groups
    tokens = np.arange(len(pages) * group.page_size)
    for c in group.components:
        views = [component_view(group, c)] + ([scale_view(group, c)] if c.scale is not None and c.scale.at else [])
        for view in views:
            at = addresses(view, group, pool.offsets(pages), tokens, group.layer_ids)
            pool.memory[at[..., None] + np.arange(view.itemsize)] = 0

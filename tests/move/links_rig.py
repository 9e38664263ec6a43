"""A prefill and a decode side of one rank each, joined by real connections in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from regauge.config import TransferConfig
from regauge.engines.local.kv import allocate
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Rope
from regauge.move.bound import Memory
from regauge.move.crossing import PageTable
from regauge.move.inbound import InboundLinks
from regauge.move.outbound import OutboundLinks
from regauge.move.outgoing import Outgoing
from regauge.move.pages import PagePool
from regauge.move.transports import open_rails
from regauge.plan import Judge, check
from strategies import Pool

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


@dataclass
class Both:
    """A prefill and a decode side in one loop."""

    out: OutboundLinks
    into: InboundLinks
    source: Memory
    target: Memory
    address: tuple[str, int]
    source_pool: PagePool
    pool: PagePool
    freed: list[str] = field(default_factory=list)

    async def offer(self, name: str, tokens: int) -> Outgoing:
        pages = np.array(self.source_pool.lease(name, self.source_pool.pages_for(tokens)), np.int64)

        def free() -> None:
            self.source_pool.release(name)
            self.freed.append(name)

        try:
            return await self.out.start(name, {"d": self.address}, [PageTable(pages)], tokens, free)
        except BaseException:
            free()
            raise

    def expect(self, name: str, tokens: int) -> asyncio.Future:
        self.pool.lease(name, self.pool.pages_for(tokens))
        return self.into.expect(name, ["p"], tokens)

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
    settings = TransferConfig(transport=kind, staging_bytes=1 << 20, **config)  # type: ignore[arg-type]
    near, far = open_rails(settings, key=KEY, name="p"), open_rails(settings, key=KEY, name="d")
    for rails, memory in ((near, source), (far, target)):
        rails.register(memory.slab)
    pool = PagePool(pages, b.groups[0].page_size)
    out = OutboundLinks("p", key, source, near, settings, judges[0])
    into = InboundLinks("d", KEY, target, far, [pool], settings, judges[1])
    address = await into.start("127.0.0.1")
    try:
        yield Both(out, into, source, target, address, PagePool(pages, a.groups[0].page_size), pool)
    finally:
        await out.close()
        await into.close()
        for rails, memory in ((near, source), (far, target)):
            rails.close()
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

"""Several prefill and decode ranks in one event loop, with real connections between all that share something."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from regauge.config import TransferConfig
from regauge.layout.spec import Group, Layout, Region
from regauge.layout.view import region_sizes
from regauge.move.bound import Memory
from regauge.move.conformance import catalogue
from regauge.move.conformance.pools import LENGTH, PREFIX, Pool, generator, random_pool, spread, tokens_of
from regauge.move.conformance.suite import Source, first_difference, source
from regauge.move.crossing import PageTable
from regauge.move.inbound import InboundLinks
from regauge.move.incoming import Arrival
from regauge.move.memory import Slab
from regauge.move.outbound import OutboundLinks
from regauge.move.outgoing import Outgoing
from regauge.move.pages import PagePool
from regauge.move.transports import open_rails
from regauge.plan.ranks import crossings, leg
from regauge.plan.stripes import owned

KEY = bytes(range(32))
NAME = "request"
CHUNKS = ((PREFIX, 100), (100, 151), (151, LENGTH))
"""Prompt chunks that prefill computes after the prefix which decode has."""


def seat(pool: Pool, name: str) -> tuple[Pool, Memory]:
    """Return the pool in a slab of its own, and the memory that this is."""
    size = len(pool.memory)
    slab = Slab(size, name)
    slab.array[:size] = pool.memory
    sizes = region_sizes(pool.layout)
    regions = [Region(region, sizes[region], slab.address + base) for region, base in pool.bases.items()]
    layout = msgspec.structs.replace(pool.layout, regions=regions)
    return Pool(layout, slab.array[:size], pool.bases, pool.tables), Memory(layout, slab)


def lease(layout: Layout, group: Group, rng: np.random.Generator, *, late: bool) -> tuple[PagePool, int]:
    """Return a group's page pool in which `NAME` has leased scattered pages, and the token that they begin with.

    Window layers hold the pages of their live window only; `late`: every group only those of the tokens that are sent.
    """
    if group.kind == "recurrent":
        origin, count = 0, 1
    else:
        start = tokens_of(layout, group, PREFIX if late else 0)[0] if layout.shard.cp_size == 1 else 0
        origin = start // group.page_size * group.page_size
        held = int(owned(layout.shard, np.arange(LENGTH)).sum()) - origin
        count = -(-held // group.page_size)
    pool = PagePool(group.pages, group.page_size)
    for page in range(group.pages):
        pool.lease(f"page {page}", 1)
    for page in 1 + rng.permutation(group.pages - 1):  # page 0 stays another's
        pool.release(f"page {page}")
    pool.lease(NAME, count)
    return pool, origin


def roomy(layout: Layout) -> Layout:
    """Return the layout with pages for the whole request and another's, whatever the pool was given."""
    needs = [4 if g.kind == "recurrent" else -(-LENGTH // g.page_size) + 2 for g in layout.groups]
    groups = [msgspec.structs.replace(g, pages=max(g.pages, n)) for g, n in zip(layout.groups, needs, strict=True)]
    return msgspec.structs.replace(layout, groups=groups)


@dataclass
class Decode:
    """One decode rank."""

    name: str
    links: InboundLinks
    pool: Pool
    wanted: Pool
    origins: list[int]
    peers: list[int] = field(default_factory=list)
    """Prefill ranks that send something to it."""
    address: tuple[str, int] = ("", 0)

    def expect(self, peers: Sequence[str] | None = None) -> asyncio.Future[Arrival]:
        names = [f"p{i}" for i in self.peers] if peers is None else peers
        return self.links.expect(NAME, names, LENGTH, first=PREFIX, origins=self.origins)


@dataclass
class Prefill:
    """One prefill rank."""

    name: str
    links: OutboundLinks
    pool: Pool
    freed: int = 0

    async def offer(self, peers: Sequence[Decode]) -> Outgoing:
        def free() -> None:
            self.freed += 1

        tables = [PageTable(table, origin) for table, origin in self.pool.tables]
        return await self.links.start(NAME, {d.name: d.address for d in peers}, tables, LENGTH, free)

    def compute(self, sent: Outgoing) -> None:
        """As an engine does: prompt chunk by prompt chunk, layer by layer, those of its own stage."""
        own = sorted({layer for group in self.pool.layout.groups for layer in group.layer_ids})
        for tokens in CHUNKS:
            for layer in own:
                sent.ready((layer, layer + 1), tokens)
        sent.finish(b"first token of " + self.name.encode())


@dataclass
class Ranks:
    prefill: list[Prefill]
    decode: list[Decode]

    def of(self, sender: int) -> list[Decode]:
        """Decode ranks that a prefill rank sends something to."""
        return [d for d in self.decode if sender in d.peers]

    async def carry(self) -> list[Arrival]:
        """Send the request from all ranks to all ranks; return what arrived."""
        arrivals = [d.expect() for d in self.decode]

        async def send(i: int, rank: Prefill) -> None:
            if not (peers := self.of(i)):
                return
            sent = await rank.offer(peers)
            await sent.wait_granted()
            assert sent.first == PREFIX
            rank.compute(sent)
            await sent.done()

        async with asyncio.timeout(60):
            await asyncio.gather(*(send(i, rank) for i, rank in enumerate(self.prefill)))
            return list(await asyncio.gather(*arrivals))

    def difference(self) -> str:
        """Say where a decode rank's memory is not as the reference says; empty: nowhere."""
        got, wanted = [d.pool for d in self.decode], [d.wanted for d in self.decode]
        pairs = crossings([p.pool.layout for p in self.prefill], [d.pool.layout for d in self.decode])
        return first_difference(got, wanted, pairs)


@contextlib.asynccontextmanager
async def ranks(prefill: str, decode: str, kind: str, *, seed: int = 0, **config: object) -> AsyncIterator[Ranks]:
    """Two forms of the conformance catalogue as `model form`: all their ranks, with one request's KV cache on prefill."""
    sides = [catalogue.build(catalogue.Entry(*text.split(" ", 1))) for text in (prefill, decode)]
    async with joined(source(prefill, sides[0], seed), sides[1], kind, seed=seed, **config) as out:
        yield out


@contextlib.asynccontextmanager
async def joined(
    from_: Source, decode: Sequence[Layout], kind: str, *, seed: int, **config: object
) -> AsyncIterator[Ranks]:
    records = any(group.kind == "recurrent" for layout in decode for group in layout.groups)  # one of 2 MiB in a slot
    settings = TransferConfig(transport=kind, staging_bytes=(64 if records else 8) << 20, **config)  # type: ignore[arg-type]
    async with contextlib.AsyncExitStack() as stack:
        out = Ranks([], [])
        for i, given in enumerate(from_.pools):
            pool, memory = seat(given, f"p{i}")
            stack.callback(memory.slab.close)
            sending = stack.enter_context(open_rails(settings, key=KEY, name=f"p{i}"))
            sending.register(memory.slab)
            links = OutboundLinks(f"p{i}", KEY, memory, sending, settings)
            out.prefill.append(Prefill(f"p{i}", links, pool))
        for j, layout in enumerate(decode):
            rng = generator(seed, "decode", str(j))
            pool, memory = seat(random_pool(roomy(layout), rng, decode=True), f"d{j}")
            stack.callback(memory.slab.close)
            late = bool(rng.integers(2)) and layout.shard.cp_size == 1
            leased = [lease(pool.layout, group, rng, late=late) for group in pool.layout.groups]
            tables = tuple((np.array(pages.owned(NAME), np.int64), origin) for pages, origin in leased)
            pool = Pool(pool.layout, pool.memory, pool.bases, tables)
            wanted = pool.copy()
            spread(from_.everything, wanted, PREFIX)
            receiving = stack.enter_context(open_rails(settings, key=KEY, name=f"d{j}"))
            receiving.register(memory.slab)
            into = InboundLinks(f"d{j}", KEY, memory, receiving, [pages for pages, _ in leased], settings)
            rank = Decode(f"d{j}", into, pool, wanted, [origin for _, origin in leased])
            rank.peers = [i for i, told in enumerate(from_.told) if leg(told, pool.layout).lanes]
            rank.address = await into.start("127.0.0.1")
            stack.push_async_callback(into.close)
            out.decode.append(rank)
        for sender in out.prefill:
            stack.push_async_callback(sender.links.close)
        yield out

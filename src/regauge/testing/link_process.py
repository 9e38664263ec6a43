"""A prefill or decode rank without an engine, in a process of its own: `python -m regauge.testing.link_process`.

The first line of stdin is a `Role`; every further one is an order, JSON with an `id` that its answer repeats. What happens by itself
is told in lines without an `id`. Pages hold patterns that tell who wrote them: a page that nobody has leased the pattern of
`FOREIGN`, and so it is written the moment it is freed, as if somebody else had it now; a page of prefill the pattern of its number.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from regauge.config import TransferConfig
from regauge.errors import RegaugeError, TransferFailed
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array
from regauge.move.bound import Memory, bind, slab_bytes
from regauge.move.crossing import PageTable, Posted
from regauge.move.inbound import InboundLinks
from regauge.move.incoming import Arrival
from regauge.move.memory import Slab
from regauge.move.outbound import OutboundLinks
from regauge.move.pages import PagePool
from regauge.move.protocol import Write
from regauge.move.rails import Rails
from regauge.move.transports import open_rails

FOREIGN = 1
"""Seed of the pattern of pages that a transfer must not touch."""
REACH_S = 0.001
"""Pause between two looks at how far a transfer has come."""


class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the process is."""

    role: Literal["prefill", "decode"]
    name: str
    key: str
    """Hexadecimal."""
    pages: int
    layers: int
    heads: int
    dim: int
    """A page has 16 tokens: 128 x layers x heads x dim bytes in all."""
    seed: int
    """Of the pattern of prefill's pages."""
    transfer: TransferConfig
    port: int = 0
    """Where decode listens; 0: anywhere."""


class Pages:
    """The pages of one pool as bytes, with patterns."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._views = []
        for region in memory.layout.regions:
            start = region.base - memory.slab.address
            self._views.append(memory.slab.array[start : start + region.nbytes].reshape(count, -1).view(np.uint64))

    def write(self, pages: Iterable[int], seed: int) -> None:
        """Give each page the pattern of its number."""
        for page in pages:
            for i, view in enumerate(self._views):
                view[page] = _pattern(view.shape[1], seed, page, i)

    def wrong(self, pages: Sequence[int], seed: int, numbers: Sequence[int]) -> list[int]:
        """Return those pages that do not hold the pattern of the number given for them."""
        return [
            page
            for page, number in zip(pages, numbers, strict=True)
            if any(
                not np.array_equal(v[page], _pattern(v.shape[1], seed, number, i)) for i, v in enumerate(self._views)
            )
        ]


def _pattern(words: int, seed: int, page: int, region: int) -> npt.NDArray[np.uint64]:
    """Return words no two of which are alike within 2^64 of a seed: a page, a region and a place differ in all of them."""
    first = np.uint64((seed * 0x9E3779B97F4A7C15 + (page << 40) + (region << 36)) % 2**64)
    out: npt.NDArray[np.uint64] = (first + np.arange(words, dtype=np.uint64)) * np.uint64(0xD6E8FEB86659FD93)
    return out


class Rank(abc.ABC):
    """What both roles have in common."""

    def __init__(self, role: Role, memory: Memory, rails: Rails) -> None:
        self.role = role
        self.memory = memory
        self.rails = rails
        self.pages = Pages(memory, role.pages)
        self.pool = PagePool(role.pages, memory.layout.groups[0].page_size)
        self.leased: dict[str, list[int]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.orders: dict[str, Callable[..., Any]] = {"state": self.state, "lose_link": self.lose_link}

    async def start(self) -> dict[str, object]:
        """Begin; return what the parent needs to know."""
        return {}

    @abc.abstractmethod
    async def close(self) -> None:
        """End all links."""

    @abc.abstractmethod
    def links(self) -> InboundLinks | OutboundLinks:
        """Return this side's links."""

    def lease(self, name: str, tokens: int) -> list[int]:
        """Lease pages for a transfer."""
        self.leased[name] = self.pool.lease(name, self.pool.pages_for(tokens))
        return self.leased[name]

    def lose_link(self) -> None:
        """Break the control connections, as a network does."""
        for link in self.links()._links.values():
            link.channel.close()

    def state(self) -> dict[str, object]:
        """Return what is in use: pages, transfers, descriptors, threads, shared segments, processes started, resident memory."""
        self.pool.check_integrity()
        maps = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
        children = [path.read_text("ascii").split() for path in Path("/proc/self/task").glob("*/children")]
        status = dict(x.split(":", 1) for x in Path("/proc/self/status").read_text("ascii").splitlines() if ":" in x)
        return {
            "free": self.pool.free,
            "transfers": len(self.links().transfers()),
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
            "segments": sum("/memfd:" in line for line in maps),
            "processes": sum(map(len, children)),
            "rss_kib": int(status["VmRSS"].split()[0]),
        }

    def spawn(self, work: Any) -> None:
        """Run a coroutine beside the others."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class DecodeRank(Rank):
    """Expects transfers; gives pages that it gets back to somebody else at once."""

    def __init__(self, role: Role, memory: Memory, rails: Rails) -> None:
        super().__init__(role, memory, rails)
        key = bytes.fromhex(role.key)
        self.inbound = InboundLinks(role.name, key, memory, rails, [self.pool], role.transfer)
        self.inbound.on_release = self.freed
        self.pages.write(range(role.pages), FOREIGN)
        self.orders |= {
            "expect": self.expect,
            "take": self.take,
            "cancel": self.inbound.cancel,
            "foreign": self.foreign,
        }

    async def start(self) -> dict[str, object]:
        """Listen."""
        return {"address": await self.inbound.start("127.0.0.1", self.role.port)}

    async def close(self) -> None:
        """End all links."""
        await self.inbound.close()

    def links(self) -> InboundLinks:
        """Return this side's links."""
        return self.inbound

    def expect(self, name: str, peers: list[str], tokens: int, reach: float | None = None, keep: bool = False) -> None:
        """Wait for a transfer, and tell when it has come as far as `reach`. `keep`: until `take`; else its pages go at once."""
        self.lease(name, tokens)
        future = self.inbound.expect(name, peers, tokens)
        self.spawn(self._ended(name, future, keep=keep))
        if reach is not None:
            self.spawn(self._reach(name, future, reach))

    async def _ended(self, name: str, future: asyncio.Future[Arrival], *, keep: bool) -> None:
        try:
            arrived = await future
        except TransferFailed as error:
            tell(event="ended", transfer=name, delivered=False, reason=str(error))
            return
        if not keep:
            self.take(name)
        tell(event="ended", transfer=name, delivered=True, reason=arrived.mode)

    async def _reach(self, name: str, future: asyncio.Future[Arrival], reach: float) -> None:
        while not future.done():
            mine = [leg for t in self.inbound.transfers() if t.transfer == name for leg in t.legs]
            if mine and mine[0].state == "granted" and mine[0].progress >= reach:
                break
            await asyncio.sleep(REACH_S)
        tell(event="reached", transfer=name)

    def take(self, name: str, source: list[int] | None = None, seed: int = 0) -> list[int]:
        """Return those pages of a transfer that do not hold prefill's pages, and free all."""
        pages = self.pool.owned(name)
        wrong = [] if source is None else self.pages.wrong(pages, seed, source)
        self.pool.release(name)
        self.freed()
        return wrong

    def freed(self) -> None:
        """Give pages that are free again to somebody else."""
        for name in [name for name in self.leased if self.pool.state(name) is None]:
            self.pages.write(self.leased.pop(name), FOREIGN)

    def foreign(self) -> list[int]:
        """Return the pages that no transfer has leased and that are not as their owner left them."""
        mine = {page for pages in self.leased.values() for page in pages}
        others = [page for page in range(self.role.pages) if page not in mine]
        return self.pages.wrong(others, FOREIGN, others)


class PrefillRank(Rank):
    """Offers transfers, and computes them at once."""

    def __init__(self, role: Role, memory: Memory, rails: Rails) -> None:
        super().__init__(role, memory, rails)
        key = bytes.fromhex(role.key)
        self.outbound = OutboundLinks(role.name, key, memory, rails, role.transfer)
        self.pages.write(range(role.pages), role.seed)
        self.orders |= {"send": self.send, "cancel": self.cancel}
        self.sent: dict[str, Any] = {}

    async def close(self) -> None:
        """End all links."""
        await self.outbound.close()

    def links(self) -> OutboundLinks:
        """Return this side's links."""
        return self.outbound

    def send(
        self,
        name: str,
        peers: dict[str, list[Any]],
        tokens: int,
        pace_s: float = 0.0,
        strike: tuple[int, float, int, bool] | None = None,
    ) -> list[int]:
        """Offer a transfer and compute it once it is granted, a layer each `pace_s` seconds; return its pages.

        `strike`: number of a write, seconds after its beginning, and the signal that this process group then gets, or this
        process alone.
        """
        pages = self.lease(name, tokens)
        there = {peer: (host, port) for peer, (host, port) in peers.items()}
        self.spawn(self._send(name, there, tokens, pace_s, strike))
        return pages

    async def _send(
        self,
        name: str,
        peers: dict[str, tuple[str, int]],
        tokens: int,
        pace_s: float,
        strike: tuple[int, float, int, bool] | None,
    ) -> None:
        tables = [PageTable(np.array(self.leased[name], np.int64))]
        try:
            try:
                out = await self.outbound.start(name, peers, tables, tokens, lambda: self._free(name))
            except RegaugeError:
                self._free(name)
                raise
            self.sent[name] = out
            await out.wait_granted()
            if strike is not None:
                self._arm(next(iter(peers)), *strike)
            for layer in range(self.role.layers):
                out.ready((layer, layer + 1), (0, tokens))
                await asyncio.sleep(pace_s)
            out.finish(name.encode())
            await out.done()
        except RegaugeError as error:
            tell(event="ended", transfer=name, delivered=False, reason=str(error))
        else:
            tell(event="ended", transfer=name, delivered=True, reason="")
        finally:
            self.sent.pop(name, None)

    def _arm(self, peer: str, number: int, after_s: float, signal_: int, alone: bool) -> None:
        writer, numbers = self.outbound._links[peer].writer, itertools.count()
        whole = writer.start

        def start(chunk: Write, tables: Sequence[PageTable], deadline_s: float) -> Posted:
            due = next(numbers) == number
            timer = threading.Timer(after_s, os.kill if alone else os.killpg, (os.getpid(), signal_))
            at_once = writer.modes[chunk.pair] == "fused"  # else the bytes move once it has been posted
            if due and at_once:
                timer.start()
            posted = whole(chunk, tables, deadline_s)
            if due and not at_once:
                timer.start()
            return posted

        writer.start = start  # type: ignore[method-assign]

    def _free(self, name: str) -> None:
        self.pool.release(name)
        del self.leased[name]

    def cancel(self, name: str, reason: str) -> None:
        """Give a transfer up."""
        if name in self.sent:
            self.sent[name].cancel(reason)


def tell(**facts: object) -> None:
    """Write a line to the parent."""
    print(json.dumps(facts), flush=True)


async def serve(rank: Rank, orders: asyncio.StreamReader) -> None:
    """Obey until stdin ends."""
    tell(id=0, answer=await rank.start(), at=time.monotonic())
    while line := await orders.readline():
        order = json.loads(line)
        number, verb = order.pop("id"), order.pop("do")
        try:
            tell(id=number, answer=rank.orders[verb](**order))
        except RegaugeError as error:
            tell(id=number, error=f"{verb}: {error}")
    await rank.close()


async def main() -> None:
    """Be what the first line of stdin says."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40), logger_factory=structlog.PrintLoggerFactory(sys.stderr)
    )
    orders = asyncio.StreamReader(limit=16 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    role = msgspec.json.decode(await orders.readline(), type=Role)
    model = attention_model("endings", role.layers, Array(role.heads, role.dim))
    layout = from_short("bf16,page=16,page-first", model, pages=role.pages)
    key = bytes.fromhex(role.key)
    with Slab(slab_bytes(layout), "kv") as slab, open_rails(role.transfer, key=key, name=role.name) as rails:
        memory = Memory(bind(layout, slab), slab)
        rails.register(slab)
        rank = (DecodeRank if role.role == "decode" else PrefillRank)(role, memory, rails)
        await serve(rank, orders)


if __name__ == "__main__":
    asyncio.run(main())

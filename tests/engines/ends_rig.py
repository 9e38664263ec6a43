"""An engine's two ends in one process: its own memory and allocator on both sides, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from regauge.config import TransferConfig
from regauge.engines.bridge import ReceivingEnd, SendingEnd
from regauge.engines.ended import Ended
from regauge.engines.local.kv import allocate
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Model, Rope
from regauge.move.bound import Borrowed, Memory
from strategies import Pool

KEY = bytes(range(32))
MODEL = attention_model("m", 3, Array(2, 16), rope=Rope(1e4, 16))
LAYERS = range(MODEL.num_layers)


@dataclass
class Ends:
    out: SendingEnd
    into: ReceivingEnd
    source: Memory
    target: Memory
    config: TransferConfig

    def pools(self) -> tuple[Pool, Pool]:
        a, b = (
            Pool(m.layout, m.slab.array, {r.name: r.base - m.slab.address for r in m.layout.regions})
            for m in (self.source, self.target)
        )
        return a, b

    @property
    def peers(self) -> dict[str, tuple[str, int]]:
        return {"d.0": self.into.address}

    def begin(self, name: str, tokens: int = 40) -> None:
        """Expect and offer a transfer, and say where it lies; none of it is ready."""
        self.into.expect(name, ["p.0"], tokens, [(list(range(-(-tokens // 16))), 0)])
        self.out.offer(name, self.peers, tokens)
        self.out.pages(name, [(list(range(-(-tokens // 64))), 0)])

    def complete(self, name: str, tokens: int = 40, *, first: int = 0) -> None:
        """Layers from `first` on are ready."""
        for layer in LAYERS[first:]:
            self.out.ready(name, (layer, layer + 1), (0, tokens))
        self.out.finish(name, b"token")


@contextlib.contextmanager
def open_ends(transport: str, *, decode_model: Model = MODEL, **config: object) -> Iterator[Ends]:
    source, target = (
        allocate(from_short(text, model, pages=24), "kv")
        for text, model in (("bf16,page=64,hnd", MODEL), ("bf16,page=16,nhd", decode_model))
    )
    for seed, memory in enumerate((source, target)):
        memory.slab.array[:] = np.random.default_rng(seed).integers(0, 255, memory.slab.nbytes, np.uint8)
    settings = TransferConfig(transport=transport, staging_bytes=1 << 20, **config)  # type: ignore[arg-type]
    into = ReceivingEnd("d.0", KEY, Borrowed(target.layout), settings)
    out = SendingEnd("p.0", KEY, Borrowed(source.layout), settings)
    try:
        yield Ends(out, into, source, target, settings)
    finally:
        out.close()
        into.close()
        for memory in (source, target):
            memory.slab.close()


def soon(end: SendingEnd | ReceivingEnd, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, as an engine does in its own loop: here a bounded one."""
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "it has not come about"
        end.run(asyncio.sleep(0), 5)  # a turn of the links' loop


def ended(end: SendingEnd | ReceivingEnd) -> Ended:
    """The next transfer that ends."""
    found: list[Ended] = []
    soon(end, lambda: bool(found.extend(end.ended()) or found))
    [one] = found
    return one

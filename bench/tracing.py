"""What it costs that the events of each transfer are kept (`regauge.move.events`), which is always on.

    python bench/tracing.py [--rounds N] [--transfers N] [--json]

`event`: nanoseconds of one event and of one word of the protocol, into a recorder that is full. `transfer`: CPU seconds of a whole transfer, both ends in
this process over shared memory, once with the recorder and once with one that keeps nothing, in turn; the bundled model's shape, a prompt of 512 tokens that
is ready layer by layer, so that there are many events for few bytes (the worst case that a deployment has). The ratio is of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import statistics
import time
from typing import Any

import numpy as np
import structlog

from harness import print_table, write_json
from regauge.move import messages as m
from regauge.move.bound import Memory
from regauge.move.crossing import PageTable
from regauge.move.events import MOST_EVENTS, Recorder
from regauge.move.inbound import InboundLinks
from regauge.move.outbound import OutboundLinks
from regauge.move.pages import PagePool
from transfer import MODELS, allocate, config, opened, shuffled

TOKENS = 512
LAYERS = MODELS["smollm2-135m"].num_layers
WORD = m.Written("t", 1, 2, 0, (0, 1), (0, 64), None, 4_096, b"01234567")


class Silent(Recorder):
    """Keeps nothing."""

    def note(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def word(self, *_: Any) -> None:
        """Do nothing."""

    def checked(self, *_: Any) -> None:
        """Do nothing."""


def event_ns(count: int = 200_000) -> tuple[float, float]:
    """Return nanoseconds of an event and of a word."""
    recorder = Recorder()
    names = [f"t{n}" for n in range(MOST_EVENTS // 400)]
    for n in range(MOST_EVENTS + 1):
        recorder.note(names[n % len(names)], "full", 0.0)
    begun = time.perf_counter()
    for n in range(count):
        recorder.note(names[n % len(names)], "step", 0.0, 1.0)
    between = time.perf_counter()
    for _ in range(count):
        recorder.word("p", WORD, "sent")
    return 1e9 * (between - begun) / count, 1e9 * (time.perf_counter() - between) / count


class Pair:
    """Both ends in this process."""

    def __init__(
        self, out: OutboundLinks, into: InboundLinks, pools: tuple[PagePool, PagePool], address: tuple[str, int]
    ) -> None:
        self.out, self.into, self.address = out, into, address
        self.source, self.target = pools
        self.count = 0

    async def transfer(self) -> None:
        """One request's KV, layer by layer."""
        self.count += 1
        name = f"t{self.count}"
        self.target.lease(name, self.target.pages_for(TOKENS))
        arrival = self.into.expect(name, ["p"], TOKENS)
        pages = PageTable(np.array(self.source.lease(name, self.source.pages_for(TOKENS)), np.int64))
        sent = await self.out.start(name, {"d": self.address}, [pages], TOKENS, lambda: self.source.release(name))
        await sent.wait_granted()
        for layer in range(LAYERS):
            sent.ready((layer, layer + 1), (0, TOKENS))
            await asyncio.sleep(0)
        sent.finish(b"")
        await sent.done()
        await arrival
        self.target.release(name)


async def measured(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return CPU seconds of a transfer, by whether events are kept, round by round."""
    found: dict[str, list[float]] = {"kept": [], "not kept": []}
    async with contextlib.AsyncExitStack() as stack:
        pairs = {}
        for name, kind in (("kept", Recorder), ("not kept", Silent)):
            key = secrets.token_bytes(32)
            memories: list[Memory] = [allocate(text, options) for text in ("fp8_e4m3,page=64,hnd", "bf16,page=16")]
            rails = []
            for side, memory in zip("pd", memories, strict=True):
                stack.callback(memory.slab.close)
                rails.append(stack.enter_context(opened(options, key, side, memory)))
            pools = shuffled(memories[0]), shuffled(memories[1])
            into = InboundLinks("d", key, memories[1], rails[1], [pools[1]], config(options), events=kind())
            address = await into.start("127.0.0.1")
            out = OutboundLinks("p", key, memories[0], rails[0], config(options), events=kind())
            stack.push_async_callback(into.close)
            stack.push_async_callback(out.close)
            pairs[name] = Pair(out, into, pools, address)
            for _ in range(3):
                await pairs[name].transfer()
        for round_ in range(options.rounds):
            for name in sorted(pairs, reverse=bool(round_ % 2)):
                begun = time.process_time()
                for _ in range(options.transfers):
                    await pairs[name].transfer()
                found[name].append((time.process_time() - begun) / options.transfers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transfers", type=int, default=10, help="of a round, each way")
    parser.add_argument("--json", action="store_true", help="also write bench/out/tracing.json")
    options = parser.parse_args()
    options.transport, options.tokens, options.model, options.set = "shm", TOKENS, "smollm2-135m", []
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    note, word = event_ns()
    times = asyncio.run(measured(options))
    kept, not_kept = (statistics.median(times[name]) for name in ("kept", "not kept"))
    row = {
        "event ns": note, "word ns": word, "kept, CPU ms a transfer": 1e3 * kept, "not kept": 1e3 * not_kept,
        "more %": 100 * (kept / not_kept - 1),
    }  # fmt: skip
    print_table([row])
    if options.json:
        write_json("tracing", row)


if __name__ == "__main__":
    main()

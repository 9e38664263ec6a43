"""How much of a transfer a prefill hides: what is left of it when the prefill is over, against the whole transfer's time alone.

    python bench/overlap.py [--rounds N] [--tokens N] [--transport tcp|shm] [--paced] [--only TEXT] [--set NAME=VALUE] [--json]

The bundled model's real prefill, by the local engine as `regauge serve` runs it: in this process, in its thread, in steps of 256 tokens, each
layer announced when it has been computed. The decode side is a process of its own (`transfer.py`) that takes the KV and does not decode. Each
round: the same pages as one transfer with the engine idle (`alone`), then prefills with their transfers:

    after layer   the transfer is told that nothing more comes as soon as the event loop hears of the last layer of the last step: from when
                  the engine's thread had computed that layer to the commit. The engine computes its head meanwhile.
    after token   as served: the transfer ends with the first token. From when the event loop has it to the commit; all before is prefill.

`--paced`: instead of the engine, a clock that takes 2, 4 and 16 times as long as the transfer takes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import sys
import time
from collections.abc import AsyncIterator
from os import getloadavg

import numpy as np
import structlog

from harness import print_table, write_json
from regauge.config import BUNDLED_MODEL, EngineConfig, cache_dir
from regauge.engines.local.kv import PagedKV
from regauge.engines.local.model import LocalModel
from regauge.engines.local.prepare import prepare
from regauge.engines.local.scheduler import Output, Request, Scheduler
from regauge.engines.local.thread import EngineThread
from regauge.serve.wire import SamplingParams
from transfer import MODELS, OURS, PAIRS, WARM, Bench, linked

GEOMETRY = "smollm2-135m"
FACTORS = (2, 4, 16)


class Stamped(EngineThread):
    """The engine, with a clock on its own thread."""

    last = 0.0
    """When the layer before was computed."""

    def _on_layer(self, request_id: str, layer: int, start: int, count: int) -> None:
        self.last = time.perf_counter()
        super()._on_layer(request_id, layer, start, count)


class Prefills:
    """Prefills with their transfers, on one link."""

    def __init__(self, bench: Bench, model: LocalModel) -> None:
        self.bench = bench
        config = EngineConfig()
        store = PagedKV(
            bench.memory,
            dtype=model.dtype,
            max_new=config.chunk_tokens + config.max_batch,
            max_context=config.max_context,
        )
        self.engine = Stamped(Scheduler(model, store, config))
        self.prefill: list[float] = []
        self.after_layer: list[float] = []
        self.after_token: list[float] = []

    async def run(self, *, at_layer: bool) -> AsyncIterator[None]:
        """One prompt: its KV crosses while it is computed. `at_layer`: the transfer ends with the last layer, not the first token."""
        bench, tokens = self.bench, self.bench.options.tokens
        bench.expect()
        yield
        out, table = await bench.begin()
        loop = asyncio.get_running_loop()
        first: asyncio.Future[Output] = loop.create_future()
        computed: asyncio.Future[float] = loop.create_future()
        last = MODELS[GEOMETRY].num_layers - 1

        def mark(layer: int, start: int, count: int) -> None:
            out.ready((layer, layer + 1), (start, start + count))
            if layer == last and start + count == tokens:
                computed.set_result(self.engine.last)

        prompt = tuple(np.random.default_rng(bench.count).integers(100, 40_000, tokens).tolist())
        request = Request(
            out.transfer, prompt, SamplingParams(max_tokens=2, temperature=0.0), table.pages, prefill_only=True
        )
        begun = time.perf_counter()
        await self.engine.add(request, first.set_result, mark)
        if at_layer:
            when = await computed
            await bench.end(out)
            self.after_layer.append(time.perf_counter() - when)
            self.prefill.append(when - begun)
        output = await first
        if output.error is not None:
            raise output.error
        if not at_layer:
            self.after_token.append(await bench.end(out))

    def clear(self) -> None:
        """Forget what was measured."""
        for times in (self.prefill, self.after_layer, self.after_token):
            times.clear()


async def real(options: argparse.Namespace, name: str) -> list[dict[str, object]]:
    source, target, _ = PAIRS[name]
    model = LocalModel(prepare(BUNDLED_MODEL, cache_dir()), EngineConfig().threads)
    async with linked(options, source, target) as bench:
        prefills = Prefills(bench, model)
        try:
            for round_ in range(options.rounds + WARM):
                await bench.measure("alone", functools.partial(bench.transfer, 0))
                await bench.measure("prefill", functools.partial(prefills.run, at_layer=True))
                await bench.measure("served", functools.partial(prefills.run, at_layer=False))
                if round_ < WARM:
                    bench.seconds.clear()
                    prefills.clear()
        finally:
            prefills.engine.stop()
        alone, left = statistics.median(bench.seconds["alone"]), statistics.median(prefills.after_layer)
        return [
            row(options, name, bench, "engine", alone, statistics.median(prefills.prefill), left)
            | {"after token ms": statistics.median(prefills.after_token) * 1e3}
        ]


async def paced(options: argparse.Namespace, name: str) -> list[dict[str, object]]:
    source, target, _ = PAIRS[name]
    async with linked(options, source, target) as bench:
        left: dict[int, list[float]] = {factor: [] for factor in FACTORS}
        for round_ in range(options.rounds + WARM):
            await bench.measure("alone", functools.partial(bench.transfer, 0))
            if round_ < WARM:
                bench.seconds.clear()
                continue
            alone = statistics.median(bench.seconds["alone"])
            for factor in FACTORS:
                await bench.measure("paced", functools.partial(bench.transfer, 256, factor * alone))
                left[factor].append(bench.after[-1])
        alone = statistics.median(bench.seconds["alone"])
        return [
            row(options, name, bench, f"{factor} x alone", alone, factor * alone, statistics.median(left[factor]))
            for factor in FACTORS
        ]


def row(
    options: argparse.Namespace, name: str, bench: Bench, prefill: str, alone: float, took: float, left: float
) -> dict[str, object]:
    hidden = 100 * (1 - left / alone)
    return {
        "pair": name,
        "transport": options.transport,
        "tokens": options.tokens,
        "MiB": bench.wire_bytes >> 20,
        "alone ms": alone * 1e3,
        "prefill": prefill,
        "prefill ms": took * 1e3,
        "after layer ms": left * 1e3,
        "hidden %": hidden,
        "target": 90,
        "met": "yes" if hidden >= 90 else "no",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--transport", choices=OURS, default="tcp")
    parser.add_argument("--paced", action="store_true", help="a clock instead of the engine")
    parser.add_argument("--only", default="", help="run only pairs whose name contains this")
    parser.add_argument("--set", action="append", default=[], help="a setting of [transfer], as mode=staged")
    parser.add_argument("--json", action="store_true", help="also write bench/out/overlap.json")
    options = parser.parse_args()
    options.model = GEOMETRY
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(30), logger_factory=structlog.PrintLoggerFactory(sys.stderr)
    )
    work = paced if options.paced else real
    rows = [each for name in PAIRS if options.only in name for each in asyncio.run(work(options, name))]
    print_table(rows)
    print(f"load {getloadavg()[0]:.1f}")
    if options.json:
        print(write_json("overlap", rows))


if __name__ == "__main__":
    main()

"""The crossing does not change an answer: greedy output over DIRECT and REMAP equals the engine's own, token for token.

Two workers as the product runs them (links, protocol, layer-wise chunks), over real prompts from one token to 1,500, against the same
engine with one pool and no transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pydoc_data.topics import topics

import numpy as np
import pytest

from regauge.blocks import BLOCK_TOKENS
from regauge.config import BUNDLED_MODEL, EngineConfig, ServeConfig, TransferConfig, cache_dir
from regauge.engines.local.kv import PagedKV, allocate
from regauge.engines.local.model import LocalModel
from regauge.engines.local.prepare import prepare
from regauge.engines.local.sampling import SamplingParams
from regauge.engines.local.scheduler import Request, Scheduler
from regauge.layout import files
from regauge.layout.presets import from_short, load_model, with_pages
from regauge.move.transports import open_rails
from regauge.serve import wire
from regauge.serve.text import Tokenizer
from regauge.serve.worker import DecodeWorker, PrefillWorker, RefusalError

LENGTHS = (1, 2, 15, 16, 17, 24, 25, 48, 49, 63, 64, 65, 97, 128, 129, 200, 256, 257, 700, 1500)
ANSWER = 12
CONFIG = EngineConfig(pool_tokens=4096)
PAIRS = {
    "direct": ("bf16,page=16", "bf16,page=16", "shm"),
    "page 64 HND to page 16 NHD": ("bf16,page=64,hnd", "bf16,page=16,nhd", "tcp"),
    "page 24 to 16": ("bf16,page=24", "bf16,page=16", "tcp"),
    "split to fused": ("bf16,page=16,split", "bf16,page=16,fused,page-first", "shm"),
}
pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(prepare(BUNDLED_MODEL, cache_dir()), threads=2)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Real English: the reference topics that come with Python."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())[:60_000]
    tokens = Tokenizer.load(prepare(BUNDLED_MODEL, cache_dir())).encode(text)
    return [tuple(tokens[at * 37 : at * 37 + n]) for at, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(model: LocalModel, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """The control: one engine, one bf16 pool, no transfer."""
    memory = allocate(with_pages(from_short("bf16,page=16", load_model(BUNDLED_MODEL)), CONFIG.pool_tokens))
    try:
        store = PagedKV(
            memory, dtype=model.dtype, max_new=CONFIG.chunk_tokens + CONFIG.max_batch, max_context=CONFIG.max_context
        )
        scheduler, answers = Scheduler(model, store, CONFIG), []
        for index, prompt in enumerate(prompts):
            scheduler.add(Request(str(index), prompt, greedy(), np.arange(memory.layout.groups[0].pages)))
            answers.append([])
            while scheduler.has_work:
                answers[-1] += [output.token for output in scheduler.step()]
        return answers
    finally:
        memory.slab.close()


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)


@contextlib.asynccontextmanager
async def workers(
    model: LocalModel, prefill: str, decode: str, kind: str
) -> AsyncIterator[tuple[PrefillWorker, DecodeWorker]]:
    config = ServeConfig(
        prefill=CONFIG, decode=CONFIG, transfer=TransferConfig(transport="tcp" if kind == "tcp" else "shm")
    )
    base, key = load_model(BUNDLED_MODEL), bytes(32)
    layouts = {"p": with_pages(from_short(prefill, base), 4096), "d": with_pages(from_short(decode, base), 4096)}
    memories = {name: allocate(layout) for name, layout in layouts.items()}
    rails = {name: open_rails(config.transfer, key=key, name=name) for name in "pd"}
    for name, each in rails.items():
        each.register(memories[name].slab)

    def described(name: str, peers: dict[str, tuple[str, int]]) -> wire.WorkerSpec:
        return wire.WorkerSpec(
            config=config, name=name, role="prefill" if name == "p" else "decode", model_folder="", model_name=BUNDLED_MODEL,
            layout=files.encode(layouts[name], format="json"), token="t", key=key.hex(), port=0, control_port=0, peers=peers)  # fmt: skip

    d = DecodeWorker(described("d", {}), memories["d"], model, rails["d"])
    address = await d.links.start("127.0.0.1")
    p = PrefillWorker(described("p", {"d": address}), memories["p"], model, rails["p"])
    try:
        yield p, d
    finally:
        for worker in (p, d):
            await worker.close()
            await worker.links.close()
        for name, each in rails.items():
            each.close()
            memories[name].slab.close()


async def ask(
    p: PrefillWorker, d: DecodeWorker, name: str, prompt: tuple[int, ...]
) -> tuple[tuple[list[int], wire.TransferEvent], wire.Prefilled]:
    events: asyncio.Queue[wire.Event] = asyncio.Queue()
    job = asyncio.create_task(d.generate(wire.Generate(name, f"t-{name}", list(prompt), greedy(), ["p"]), events))
    said = await p.prefill(wire.Prefill(name, f"t-{name}", list(prompt), greedy(), p.spec.peers))
    await job
    found = [events.get_nowait() for _ in range(events.qsize())]
    transfer, end = found[0], found[-1]
    assert isinstance(transfer, wire.TransferEvent), transfer
    assert isinstance(end, wire.FinishEvent), end
    assert end.completion_tokens == ANSWER
    return ([event.token for event in found if isinstance(event, wire.TokenEvent)], transfer), said


@pytest.mark.anyio
@pytest.mark.parametrize("pair", PAIRS)
async def test_the_answer_is_the_engines_own(
    pair: str, model: LocalModel, prompts: list[tuple[int, ...]], alone: list[list[int]]
) -> None:
    prefill, decode, kind = PAIRS[pair]
    async with workers(model, prefill, decode, kind) as (p, d):
        for index, (prompt, want) in enumerate(zip(prompts, alone, strict=True)):
            (got, transfer), _ = await ask(p, d, str(index), prompt)
            assert got == want, f"prompt of {len(prompt)} tokens"
            assert transfer.path == ("DIRECT" if pair == "direct" else "REMAP")
        for worker in (p, d):
            worker.pool.check_integrity()
            assert worker.cache.available == worker.pool.pages


@pytest.mark.anyio
@pytest.mark.parametrize("pair", ["page 64 HND to page 16 NHD", "page 24 to 16"])
async def test_the_answer_after_a_cached_beginning_is_the_engines_own(
    pair: str, model: LocalModel, prompts: list[tuple[int, ...]], alone: list[list[int]]
) -> None:
    """Each prompt after a part of it, and again; several at once, in a pool that has no room for all of them."""
    few = [i for i, prompt in enumerate(prompts) if len(prompt) in (129, 257, 700)]
    prefill, decode, kind = PAIRS[pair]
    async with workers(model, prefill, decode, kind) as (p, d):
        unit = math.lcm(p.pool.page_size, BLOCK_TOKENS)

        async def asked(name: str, index: int) -> int:
            prompt = prompts[index]
            (got, _), said = await ask(p, d, name, prompt)
            assert got == alone[index], f"prompt of {len(prompt)} tokens, {said.cached_tokens} of them cached"
            assert said.cached_tokens + said.computed_tokens == len(prompt)
            assert said.cached_tokens % unit == 0
            return said.cached_tokens

        for index in few:
            prompt = prompts[index]
            part = min(len(prompt) * 2 // 3, len(prompt) - 1)
            await ask(p, d, f"{index} in part", prompt[:part])
            assert await asked(f"{index} once", index) == part // unit * unit
            assert await asked(f"{index} again", index) == (len(prompt) - 1) // unit * unit
        blocker = "all but a few pages"
        await p.admission.lease(blocker, p.pool.pages - p.pool.pages_for(1_000))
        hits = await asyncio.gather(*(asked(f"{index} at once {n}", index) for n in range(2) for index in few))
        assert any(hits)
        p.admission.release(blocker)
        for worker in (p, d):
            worker.pool.check_integrity()
            assert worker.cache.available == worker.pool.pages
        assert p.cache.events.seq > 0
        assert d.cache.events.seq == 0


@pytest.mark.anyio
async def test_a_stream_comes_to_an_end_whatever_breaks(
    model: LocalModel, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> tuple[int, str]:
        raise LookupError("nobody thought of this")

    async with workers(model, *PAIRS["direct"]) as (p, d):
        monkeypatch.setattr(d, "_decode", broken)
        events: asyncio.Queue[wire.Event] = asyncio.Queue()
        job = asyncio.create_task(d.generate(wire.Generate("x", "t", list(prompts[2]), greedy(), ["p"]), events))
        await p.prefill(wire.Prefill("x", "t", list(prompts[2]), greedy(), p.spec.peers))
        await job
        *_, end = [events.get_nowait() for _ in range(events.qsize())]
        assert end == wire.ErrorEvent("engine_failed", "nobody thought of this", "d")
        assert d.cache.available == d.pool.pages
        with pytest.raises(RefusalError, match="token_ids is empty"):
            d.admit("y", 0, 1)

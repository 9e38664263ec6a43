"""Workers of our own in the test's process, on a tiny model: real engines, links, pools and receipts, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from regauge import keys
from regauge.config import EngineConfig, Role, ServeConfig, TransferConfig
from regauge.config_planes import PlanesConfig
from regauge.engines.local.kv import PagedKV, allocate
from regauge.engines.local.model import LocalModel
from regauge.engines.local.scheduler import Request, Scheduler
from regauge.layout import files
from regauge.layout.presets import from_short, load_model, with_pages
from regauge.move.transports import open_rails
from regauge.serve import signing, wire
from regauge.serve.local_worker import LocalWorker
from regauge.serve.ports import consecutive_ports
from regauge.testing.tiny_models import tiny_model

CONFIG = EngineConfig(pool_tokens=1024, max_context=512, chunk_tokens=64, max_batch=8)
NO_PLANES = PlanesConfig()
PLAIN = "fp32,page=16,nhd"
TAG = wire.MeterTag("acme", prefill="p", decode="d", route="test")
LONG = tuple(np.random.default_rng(1).integers(3, 500, 150).tolist())


@cache
def model() -> LocalModel:
    return LocalModel(tiny_model("tiny-llama"), threads=1)


def sampling(**more: Any) -> wire.SamplingParams:
    return wire.SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **more})


@contextlib.asynccontextmanager
async def workers(
    tmp_path: Path, named: dict[str, tuple[Role, str]], config: EngineConfig = CONFIG, planes: PlanesConfig = NO_PLANES
) -> AsyncIterator[dict[str, LocalWorker]]:
    """Start workers: name -> role and layout. Keys and journals are under `tmp_path`."""
    serve = ServeConfig(prefill=config, decode=config, transfer=TransferConfig(transport="tcp"), planes=planes)
    base = load_model(str(tiny_model("tiny-llama")))
    first = consecutive_ports(len(named), "127.0.0.1")
    addresses = {name: ("127.0.0.1", first + i) for i, name in enumerate(named)}
    signed = signing.prepare(tmp_path / "keys", [], named)
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for name, (role, short) in named.items():
            layout = with_pages(from_short(short, base), config.pool_tokens)
            memory = allocate(layout, f"kv-{name}")
            stack.callback(memory.slab.close)
            rails = open_rails(serve.transfer, key=bytes(32), name=name)
            stack.callback(rails.close)
            rails.register(memory.slab)
            spec = wire.WorkerSpec(
                config=serve, name=name, role=role, model_folder="", model_name="tiny", layout=files.encode(layout, format="json"),
                token="t", key=bytes(32).hex(), port=0, control_port=addresses[name][1],
                peers={n: a for n, a in addresses.items() if named[n][0] == "decode"} if role == "prefill" else {},
                signing_key=str(signed[name]), state=str(tmp_path))  # fmt: skip
            found[name] = LocalWorker(spec, memory, model(), rails)
            stack.push_async_callback(found[name].close)
            await found[name].start()
        yield found


def receivers(worker: LocalWorker) -> dict[str, tuple[str, int]]:
    return {worker.spec.name: ("127.0.0.1", worker.spec.control_port)}


async def decode(worker: LocalWorker, body: wire.Generate) -> list[wire.Event]:
    events: asyncio.Queue[wire.Event] = asyncio.Queue()
    await worker.decode.start(body, worker.decode.generate(body, events))
    return [events.get_nowait() for _ in range(events.qsize())]


async def ask(
    p: LocalWorker, d: LocalWorker, name: str, prompt: Sequence[int], params: wire.SamplingParams, **more: Any
) -> tuple[list[wire.Event], wire.Prefilled]:
    """One request over both workers."""
    more = {"meter": TAG, **more}
    one = wire.Generate(name, f"t-{name}", list(prompt), params, [p.spec.name], **more)
    two = wire.Prefill(name, f"t-{name}", list(prompt), params, receivers(d), **more)
    decoding = asyncio.create_task(decode(d, one))
    said = await p.prefill.start(two, p.prefill.prefill(two))
    return await decoding, said


def tokens(events: Sequence[wire.Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, wire.TokenEvent)]


def end(events: Sequence[wire.Event]) -> wire.FinishEvent:
    assert isinstance(events[-1], wire.FinishEvent), events[-1]
    return events[-1]


def alone(prompt: Sequence[int], params: wire.SamplingParams) -> list[int]:
    """The control: one engine, one pool, no transfer, no cache."""
    memory = allocate(with_pages(from_short(PLAIN, load_model(str(tiny_model("tiny-llama")))), CONFIG.pool_tokens))
    try:
        store = PagedKV(
            memory, dtype=model().dtype, max_new=CONFIG.chunk_tokens + CONFIG.max_batch, max_context=CONFIG.max_context
        )
        scheduler = Scheduler(model(), store, CONFIG)
        scheduler.add(Request("alone", tuple(prompt), params, np.arange(memory.layout.groups[0].pages)))
        answer: list[int] = []
        while scheduler.has_work:
            answer += [output.token for output in scheduler.step()]
        return answer
    finally:
        memory.slab.close()


def trust(tmp_path: Path) -> Path:
    return tmp_path / "keys" / signing.TRUST


def gateway_key(tmp_path: Path) -> Any:
    return keys.load_private(signing.prepare(tmp_path / "keys", ["gw"], [])["gw"])

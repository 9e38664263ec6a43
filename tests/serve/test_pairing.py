"""The pair's path, as the gateway comes to know it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from serve_rig import WAIT_S
from standing import listening

from regauge.engines import status
from regauge.layout import files
from regauge.layout.presets import from_short, load_model
from regauge.layout.spec import Layout
from regauge.move.state import Totals, WorkerState
from regauge.observe import Metrics
from regauge.serve import wire
from regauge.serve.pairing import UNKNOWN, Pairing
from regauge.serve.workers import Workers

pytestmark = pytest.mark.anyio
KEY = bytes(range(32))


def short(text: str, model: str = "smollm2-135m-instruct") -> Layout:
    return from_short(text, load_model(model))


class Telling:
    """The status of a rank whose layout is known after so many questions."""

    def __init__(self, layout: Layout, after: int) -> None:
        self.layout, self.left = layout, after

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {status.token(KEY)}"
        self.left -= 1
        if self.left >= 0:
            return web.json_response({"error": "not yet"}, status=404)
        state = WorkerState("d.0", "decode", 7, 0.0, [], [], [], [], Totals(delivered=3))
        told = status.Status("d.0", "vllm", "0", msgspec.Raw(files.encode(self.layout, format="json")), [state])
        return web.Response(body=msgspec.json.encode(told))


@asynccontextmanager
async def telling(layout: Layout, after: int = 0) -> AsyncIterator[Workers]:
    async with listening([web.get(status.STATUS_PATH, Telling(layout, after).answer)]) as url:
        ranks = [wire.RankAddress("d.0", ("127.0.0.1", 1), url)]
        workers = Workers.connect(
            [wire.WorkerAddress("p", "prefill", "http://127.0.0.1:1"), wire.WorkerAddress("d", "decode", url, ranks, "vllm")],
            "token", Metrics.create("test"), key=KEY,
        )  # fmt: skip
        workers.decode.up = True
        try:
            yield workers
        finally:
            for worker in workers.both():
                await worker.client.close()


@pytest.mark.parametrize(
    ("decode", "path", "text"),
    [("fp32,page=64,nhd", "REMAP", "page size 16 -> 64"), ("bf16,page=16,nhd", "CONVERT", "dtype float32 -> bfloat16")],
)
async def test_a_layout_that_an_engine_tells_decides(decode: str, path: str, text: str) -> None:
    async with telling(short(decode)) as workers, asyncio.timeout(WAIT_S):
        pairing = Pairing(workers, wire.VerdictInfo(UNKNOWN), {"p": short("fp32,page=16,nhd")})
        assert not pairing.refused
        await pairing.learn()
        assert (pairing.verdict.path, pairing.refused) == (path, False)
        assert text in pairing.verdict.text
        assert (await workers.decode.client.debug(1, None)).totals.delivered == 3


async def test_a_pair_that_cannot_be_is_refused_by_name() -> None:
    async with telling(short("fp32,page=16,nhd", "qwen3-8b")) as workers, asyncio.timeout(WAIT_S):
        pairing = Pairing(workers, wire.VerdictInfo(UNKNOWN), {"p": short("fp32,page=16,nhd")})
        await pairing.learn()
        assert pairing.refused
        assert "model.name" in pairing.verdict.text


async def test_it_asks_again_until_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.serve.pairing._PERIOD_S", 0.0)
    async with telling(short("fp32,page=16,nhd"), after=3) as workers, asyncio.timeout(WAIT_S):
        pairing = Pairing(workers, wire.VerdictInfo(UNKNOWN), {"p": short("fp32,page=16,nhd")})
        await pairing.learn()
        assert pairing.verdict.path == "DIRECT"


async def test_a_verdict_from_the_start_is_not_asked_for() -> None:
    async with telling(short("fp32,page=16,nhd"), after=1_000) as workers, asyncio.timeout(WAIT_S):
        pairing = Pairing(workers, wire.VerdictInfo("DIRECT", "alike"))
        await pairing.learn()
        assert pairing.verdict == wire.VerdictInfo("DIRECT", "alike")

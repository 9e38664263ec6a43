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
from regauge.serve.fleet import dialer
from regauge.serve.pairing import REFUSED, UNKNOWN, Pairs
from regauge.serve.workers import HealthPolicy, Worker

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
async def telling(layout: Layout, after: int = 0) -> AsyncIterator[Worker]:
    async with listening([web.get(status.STATUS_PATH, Telling(layout, after).answer)]) as url:
        address = wire.WorkerAddress("d", "decode", url, [wire.RankAddress("d.0", ("127.0.0.1", 1), url)], "vllm")
        worker = Worker(dialer("token", "m", KEY)(address), Metrics.create("test"), HealthPolicy())
        try:
            yield worker
        finally:
            await worker.client.close()


@pytest.mark.parametrize(
    ("decode", "path", "text"),
    [("fp32,page=64,nhd", "REMAP", "page size 16 -> 64"), ("bf16,page=16,nhd", "CONVERT", "dtype float32 -> bfloat16")],
)
async def test_a_layout_that_an_engine_tells_decides(decode: str, path: str, text: str) -> None:
    async with telling(short(decode)) as worker, asyncio.timeout(WAIT_S):
        pairs = Pairs({"p": short("fp32,page=16,nhd")})
        assert (pairs.verdict("p", "d").path, pairs.knows("p"), pairs.knows("d")) == (UNKNOWN, True, False)
        assert await pairs.ask(worker)
        assert pairs.verdict("p", "d").path == path
        assert text in pairs.verdict("p", "d").text
        assert (await worker.client.debug(1, None)).totals.delivered == 3


async def test_a_pair_that_cannot_be_is_refused_by_name() -> None:
    async with telling(short("fp32,page=16,nhd", "qwen3-8b")) as worker, asyncio.timeout(WAIT_S):
        pairs = Pairs({"p": short("fp32,page=16,nhd")})
        assert await pairs.ask(worker)
        assert pairs.verdict("p", "d").path == REFUSED
        assert "model.name" in pairs.verdict("p", "d").text


async def test_a_worker_that_does_not_know_yet_is_asked_again() -> None:
    async with telling(short("fp32,page=16,nhd"), after=1) as worker, asyncio.timeout(WAIT_S):
        pairs = Pairs({"p": short("fp32,page=16,nhd")})
        assert not await pairs.ask(worker)
        assert not pairs.knows("d")
        assert await pairs.ask(worker)
        assert pairs.verdict("p", "d").path == "DIRECT"


def test_a_verdict_from_the_start_holds_for_the_workers_of_the_start_alone() -> None:
    """It may have been found with more than layouts: a quality record, say."""
    one, other = short("fp32,page=16,nhd"), short("bf16,page=16,nhd")
    pairs = Pairs({"p": one, "d": other}, wire.VerdictInfo("CONVERT", "by a record"))
    assert pairs.verdict("p", "d").text == "by a record"
    pairs.learn("d-2", one)
    assert pairs.verdict("p", "d-2").path == "DIRECT"
    pairs.forget("d")
    pairs.learn("d", one)
    assert pairs.verdict("p", "d").path == "DIRECT"


def test_the_wire_has_the_narrower_sides_bytes() -> None:
    pairs = Pairs({"p": short("fp32,page=16,nhd"), "d": short("bf16,page=16,nhd")})
    assert pairs.wire_bytes("p", "d") == 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, dim, bytes
    assert pairs.wire_bytes("p", "x") is None

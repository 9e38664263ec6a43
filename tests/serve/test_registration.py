"""Workers register at a gateway, serve, drain and leave while it runs; nobody else can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from serve_rig import MODEL, TOKEN, WAIT_S, EchoWorker, Rig, open_rig

from regauge.errors import ConfigError
from regauge.layout import files
from regauge.layout.presets import from_short, load_model, with_pages
from regauge.serve.registration import PATH, SKEW_S, Desk, Shelf, keep_registered, sign, signed
from regauge.serve.registry import Entry, Joined, Left
from regauge.serve.text import Tokenizer

KEY = bytes(range(32))
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def entry(worker: EchoWorker, **fields: object) -> Entry:
    return Entry(msgspec.structs.replace(worker.address, token=TOKEN), instance="1", **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def registered(rig: Rig, worker: EchoWorker) -> AsyncIterator[None]:
    keeping = asyncio.create_task(keep_registered(rig.base, KEY, entry(worker), 1.0))
    try:
        yield
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


@pytest.fixture
async def rig(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Rig]:
    desk = Desk(Shelf(tmp_path / "workers", 3), KEY, 2.0, 3, taken={"own-0"})
    async with open_rig(tokenizer, pools=[desk]) as opened:
        yield opened


async def known(rig: Rig, count: int, *, up: bool = True) -> None:
    """Wait until the gateway knows so many workers, all of them up."""
    async with asyncio.timeout(WAIT_S):
        while True:
            _, body, _ = await rig.get("/ready")
            if len(body["workers"]) == count and all(worker["up"] == up for worker in body["workers"]):
                return


async def call(
    rig: Rig, body: bytes, *, method: str = "POST", path: str = PATH, header: str | None = None, query: str = ""
) -> int:
    headers = {"Authorization": sign(KEY, method, path, body, time.time()) if header is None else header}
    async with rig.client.request(method, rig.base + path + query, data=body, headers=headers) as answer:
        return answer.status


@pytest.mark.anyio
async def test_workers_join_and_leave_while_the_gateway_runs(rig: Rig) -> None:
    status, body, _ = await rig.post("/v1/chat/completions", CHAT)
    assert (status, "no decode worker is known" in body["error"]["message"]) == (503, True)
    async with registered(rig, rig.prefill):
        async with registered(rig, rig.decode):
            await known(rig, 2)
            status, body, _ = await rig.post("/v1/chat/completions", CHAT)
            assert status == 200, body
        await known(rig, 1)
        assert (await rig.post("/v1/chat/completions", CHAT))[0] == 503
    await known(rig, 0)


@pytest.mark.anyio
async def test_a_worker_that_drains_gets_nothing_new_and_ends_what_it_has(rig: Rig) -> None:
    async with registered(rig, rig.prefill):
        assert await call(rig, msgspec.json.encode(entry(rig.decode, lease_s=60.0))) == 200
        await known(rig, 2)
        rig.decode.hold = asyncio.Event()
        running = asyncio.create_task(rig.post("/v1/chat/completions", CHAT))
        await asyncio.wait_for(rig.decode.arrivals.get(), WAIT_S)
        assert await call(rig, msgspec.json.encode(entry(rig.decode, lease_s=60.0, draining=True))) == 200
        async with asyncio.timeout(WAIT_S):
            while (await rig.get("/ready"))[0] != 503:
                pass
        assert (await rig.post("/v1/chat/completions", CHAT))[0] == 503
        rig.decode.hold.set()
        status, body, _ = await running
        assert status == 200, body
        assert await call(rig, msgspec.json.encode(entry(rig.decode, lease_s=60.0))) == 200
        async with asyncio.timeout(WAIT_S):
            while (await rig.get("/ready"))[0] != 200:
                pass
        assert (await rig.post("/v1/chat/completions", CHAT))[0] == 200


@pytest.mark.anyio
async def test_who_does_not_hold_the_key_is_refused(rig: Rig) -> None:
    body = msgspec.json.encode(entry(rig.decode))
    now = time.time()
    for header in (
        "", "Bearer x", f"Bearer {TOKEN}", sign(bytes(32), "POST", PATH, body, now), sign(KEY, "POST", PATH, body + b" ", now),
        sign(KEY, "DELETE", PATH, body, now), sign(KEY, "POST", PATH, body, now - 2 * SKEW_S), sign(KEY, "POST", PATH, body, now + 2 * SKEW_S),
    ):  # fmt: skip
        assert await call(rig, body, header=header) == 401
    assert await call(rig, body) == 200
    assert await call(rig, b"", method="DELETE", path=f"{PATH}/decode-0", header="", query="?instance=1") == 401
    await known(rig, 1)


@pytest.mark.anyio
async def test_what_cannot_be_a_worker_is_refused(rig: Rig) -> None:
    own = msgspec.structs.replace(rig.decode.address, name="own-0")
    assert await call(rig, msgspec.json.encode(Entry(own))) == 409
    assert await call(rig, b"{}") == 400
    assert await call(rig, b" " * 300_000) == 413
    for n in range(4):
        address = msgspec.structs.replace(rig.prefill.address, name=f"w{n}")
        assert await call(rig, msgspec.json.encode(Entry(address))) == (200 if n < 3 else 429)
    assert await call(rig, b"", method="DELETE", path=f"{PATH}/w0", query="?instance=other") == 200
    await known(rig, 3, up=False)  # whoever is there has another name
    assert await call(rig, b"", method="DELETE", path=f"{PATH}/w0") == 200
    await known(rig, 2, up=False)


@pytest.mark.anyio
async def test_the_layout_that_a_worker_tells_gives_the_path(rig: Rig) -> None:
    base = load_model("smollm2-135m-instruct")
    for worker, short in ((rig.prefill, "fp8_e4m3,page=64,hnd"), (rig.decode, "bf16,page=16,nhd")):
        layout = files.encode(with_pages(from_short(short, base), 1_024), format="json").decode()
        assert await call(rig, msgspec.json.encode(entry(worker, layout=layout))) == 200
    await known(rig, 2)
    _, body, _ = await rig.get("/version")
    assert body["verdict"]["path"] == "CONVERT"


@pytest.mark.anyio
async def test_gateway_processes_share_what_one_of_them_was_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    worker = EchoWorker("decode-0", "decode", tokenizer, {})
    now = [1_000.0]
    shelves = [Shelf(tmp_path, 2, lambda: now[0]) for _ in range(2)]
    told = Desk(shelves[1], KEY, 2.0, 2).watch()
    assert await anext(told) == []
    shelves[0].put(entry(worker), 5.0)
    assert await anext(told) == [Joined(entry(worker))]
    now[0] += 4
    shelves[0].put(entry(worker), 5.0)
    now[0] += 4
    assert shelves[1].entries() == [entry(worker)]
    now[0] += 2
    assert await anext(told) == [Left("decode-0", "it has left, or its lease has ended")]
    assert shelves[0].entries() == []
    await told.aclose()


def test_a_shelf_is_bounded_and_reads_what_is_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    shelf = Shelf(tmp_path, 1)
    shelf.put(entry(EchoWorker("a", "prefill", tokenizer, {})), 9.0)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600  # it holds a token
    with pytest.raises(ConfigError, match="there are 1 workers already"):
        shelf.put(entry(EchoWorker("b", "prefill", tokenizer, {})), 9.0)
    (tmp_path / "a.json").write_bytes(b"{")
    assert shelf.entries() == []


def test_a_signature_is_of_one_call() -> None:
    made = sign(KEY, "POST", PATH, b"x", 1_000.0)
    assert signed(made, KEY, "POST", PATH, b"x", 1_000.0 + SKEW_S)
    assert not signed(made, KEY, "POST", PATH, b"x", 1_001.0 + SKEW_S)
    assert not signed(made.replace("time=1", "time=2"), KEY, "POST", PATH, b"x", 2_000.0)
    assert not signed(None, KEY, "POST", PATH, b"x", 1_000.0)

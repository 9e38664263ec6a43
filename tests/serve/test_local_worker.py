"""A whole worker: who computes what, which requests it takes, what it says of its load, and what it signs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from worker_rig import (
    LONG,
    PLAIN,
    TAG,
    alone,
    ask,
    decode,
    end,
    gateway_key,
    receivers,
    sampling,
    tokens,
    trust,
    workers,
)

from regauge.config import EngineConfig
from regauge.meter import receipt as r
from regauge.meter.reconcile import Arrival, reconcile
from regauge.serve import wire
from regauge.serve.core import RefusalError
from regauge.serve.local_worker import LocalWorker
from regauge.serve.server import listen
from regauge.serve.worker_process import _Server, routes

PAIRS = {
    "DIRECT": (PLAIN, PLAIN),
    "REMAP": ("fp32,page=64,hnd", "fp32,page=16,nhd"),
    "CONVERT": ("fp8_e4m3,page=64,hnd", "bf16,page=16,nhd"),
}
PAIR = {"p": ("prefill", PLAIN), "d": ("decode", PLAIN)}
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]
SAMPLED = {"temperature": 1.0, "frequency_penalty": 0.4, "min_tokens": 9, "top_p": 0.95, "logprobs": 2}


def verified(tmp_path: Path, *lines: str) -> list[r.Receipt]:
    trusted = r.load_trust(trust(tmp_path))
    return [trusted.check(r.decode(line.encode())).receipt for line in lines]


@pytest.mark.parametrize("path", PAIRS)
async def test_both_sides_sign_the_same_tokens_bytes_and_digest(tmp_path: Path, path: str) -> None:
    prefill, decoder = PAIRS[path]
    async with workers(tmp_path, {"p": ("prefill", prefill), "d": ("decode", decoder)}) as w:
        for number in (0, 1):  # the second prompt begins in the cache: all of it crosses all the same
            events, said = await ask(w["p"], w["d"], f"r{number}", LONG, sampling())
            p, d = verified(tmp_path, said.receipt, end(events).receipt)
            assert p.digest == d.digest != ""
            assert p.wire_bytes == d.wire_bytes
            assert list(p.wire_bytes or {}) == [path]
            assert (p.transferred, p.converted) == (150, 150 if path == "CONVERT" else 0)
            assert (p.cached, p.computed) == ((0, 150), (128, 22))[number]
            assert (said.cached_tokens, said.computed_tokens) == (p.cached, p.computed)
            assert d.generated == end(events).completion_tokens == 12
            word = r.Receipt(
                request=f"r{number}", side="gateway", by="gw", tenant="acme", model="tiny", route="test", prefill="p", decode="d",
                began_us=p.began_us, ended_us=d.ended_us, outcome="complete", prompt=150, cached=p.cached,
                computed=p.computed, generated=12)  # fmt: skip
            r.sign(word, gateway_key(tmp_path))
            entry = reconcile([Arrival(p), Arrival(d), Arrival(word)])
            assert (entry.status, entry.differences) == ("agreed", ())
        assert [len(each.core.notary.since(0, 9).lines) for each in w.values()] == [2, 2]


async def test_decode_computes_a_prompt_itself_and_finds_it_in_its_cache_next_time(tmp_path: Path) -> None:
    tag = wire.MeterTag("acme", decode="d")
    async with workers(tmp_path, {"d": ("decode", PLAIN)}) as w:
        for number, cached in enumerate((0, 128)):
            events = await decode(
                w["d"], wire.Generate(f"r{number}", f"t{number}", list(LONG), sampling(), [], meter=tag)
            )
            assert not [event for event in events if isinstance(event, wire.TransferEvent)]
            assert tokens(events) == alone(LONG, sampling())
            firsts = [event.cached_tokens for event in events if isinstance(event, wire.TokenEvent)][:2]
            assert firsts == [cached, None], "known before anybody can end it"
            [word] = verified(tmp_path, end(events).receipt)
            assert (word.cached, word.computed, word.prompt) == (cached, 150 - cached, 150)
            assert (word.transferred, word.wire_bytes, word.prefill, word.generated) == (0, {}, "", 12)
        health = w["d"].health()
        assert health.computes
        assert health.prefill_tokens_per_s > 0
        assert health.tpot_s > 0
        assert health.cache_seq > 0
        assert health.receipts == 2
        assert health.free_pages == health.pages


@pytest.mark.parametrize("done", [1, 5, 10])
@pytest.mark.parametrize("how", ["transfer", "alone", "cached"])
async def test_a_sampled_answer_is_gone_on_with_as_if_nothing_had_happened(tmp_path: Path, how: str, done: int) -> None:
    params = sampling(**SAMPLED)
    async with workers(tmp_path, PAIR) as w:
        before, _ = await ask(w["p"], w["d"], "r", LONG, params)
        whole = tokens(before)
        first = next(event for event in before if isinstance(event, wire.TokenEvent))
        assert first.seed is not None
        assert [event.seed for event in before if isinstance(event, wire.TokenEvent)][1:] == [None] * 11
        known = sampling(**SAMPLED, seed=first.seed)
        more = {"generated": whole[:done], "meter": wire.MeterTag("acme", "p", "d", resumes="r")}
        if how == "transfer":
            after, said = await ask(w["p"], w["d"], "again", LONG, known, **more)
            assert said.cached_tokens + said.computed_tokens == 150 + done
        else:
            if how == "cached":  # the text may be there up to all but its last token
                await decode(w["d"], wire.Generate("x", "tx", list(LONG), known, [], generated=whole[:done]))
            after = await decode(w["d"], wire.Generate("again", "ta", list(LONG), known, [], **more))
        assert tokens(after) == whole[done:]
        assert (end(after).prompt_tokens, end(after).completion_tokens) == (150 + done, 12 - done)
        assert end(after).reason == "length"
        [word] = verified(tmp_path, end(after).receipt)
        assert (word.resumes, word.prompt, word.generated) == ("r", 150 + done, 12 - done)
        with pytest.raises(RefusalError, match="generated has all 12 tokens"):
            await decode(w["d"], wire.Generate("full", "tf", list(LONG), known, [], generated=whole))


async def test_a_worker_takes_up_the_other_role_and_gives_up_its_own(tmp_path: Path) -> None:
    async with workers(tmp_path, PAIR | {"q": ("prefill", PLAIN)}) as w:
        p, q = w["p"], w["q"]
        assert (q.health().roles, q.health().computes, q.health().nics) == (["prefill"], False, [])
        with pytest.raises(RefusalError, match="q takes no decode requests now"):
            await decode(q, wire.Generate("r", "t", list(LONG), sampling(), []))
        health = q.take(["decode"])
        assert (health.status, health.role, health.roles, health.computes) == ("ok", "prefill", ["decode"], True)
        assert len(health.nics) == 1
        events, _ = await ask(p, q, "r1", LONG, sampling())  # over a link that it had no need of before
        assert tokens(events) == alone(LONG, sampling())
        body = wire.Prefill("r2", "t2", list(LONG), sampling(), receivers(w["d"]))
        with pytest.raises(RefusalError, match="q takes no prefill requests now") as refused:
            q.prefill.start(body, q.prefill.prefill(body))
        assert refused.value.code == "draining"
        q.take(["prefill", "decode"])
        events, _ = await ask(q, w["d"], "r3", LONG, sampling())
        assert tokens(events) == alone(LONG, sampling())
        assert q.take([]).status == "draining"


async def test_requests_under_way_end_well_though_their_role_is_given_up(tmp_path: Path) -> None:
    async with workers(tmp_path, PAIR) as w:
        events: asyncio.Queue[wire.Event] = asyncio.Queue()
        body = wire.Generate("r", "t", list(LONG), sampling(max_tokens=40), [])
        job = w["d"].decode.start(body, w["d"].decode.generate(body, events))
        assert isinstance(await events.get(), wire.TokenEvent)
        assert w["d"].take([]).running == 1
        await job
        assert sum(isinstance(events.get_nowait(), wire.TokenEvent) for _ in range(events.qsize())) == 39


async def test_what_waits_is_told_in_tokens(tmp_path: Path) -> None:
    async with workers(tmp_path, PAIR) as w:
        p = w["p"]
        assert (p.health().queued_tokens, p.health().prefill_tokens_per_s, p.health().slots) == (0, 0, 8)
        await p.core.admission.lease("all", p.core.pool.pages)
        asked = asyncio.create_task(ask(p, w["d"], "r", LONG, sampling()))
        while not p.core.admission.waiting:  # noqa: ASYNC110  # the first steps of its task
            await asyncio.sleep(0)
        assert (p.health().queued_tokens, p.health().waiting, w["d"].health().queued_tokens) == (150, 1, 0)
        p.core.admission.release("all")
        await asked
        await asyncio.sleep(0)  # the jobs' own callbacks
        health = p.health()
        assert (health.queued_tokens, health.waiting) == (0, 0)
        assert health.prefill_tokens_per_s > 0


async def test_a_request_that_is_aborted_leaves_a_receipt_of_what_it_came_to(tmp_path: Path) -> None:
    async with workers(tmp_path, PAIR) as w:
        d, events = w["d"], asyncio.Queue[wire.Event]()
        body = wire.Generate(
            "r", "t", list(LONG), sampling(max_tokens=300), [], meter=wire.MeterTag("acme", decode="d")
        )
        d.decode.start(body, d.decode.generate(body, events))
        await events.get()
        assert await d.core.abort("r")
        rest = [events.get_nowait() for _ in range(events.qsize())]
        assert isinstance(rest[-1], wire.ErrorEvent)
        assert rest[-1].code == "aborted"
        line = d.core.notary.line("r")
        assert rest[-1].receipt == line
        [word] = verified(tmp_path, line)
        assert (word.outcome, word.generated, word.computed) == ("cancelled", 1 + len(tokens(rest)), 150)
        assert not await d.core.abort("r")
        assert d.health().free_pages == d.health().pages


async def test_a_transfer_that_fails_leaves_receipts_that_charge_nothing(tmp_path: Path) -> None:
    """Decode has another prompt than prefill."""
    async with workers(tmp_path, PAIR) as w:
        one = wire.Generate("r", "t", list(LONG[:-1]), sampling(), ["p"], meter=TAG)
        two = wire.Prefill("r", "t", list(LONG), sampling(), receivers(w["d"]), meter=TAG)
        decoding = asyncio.create_task(decode(w["d"], one))
        with pytest.raises(Exception, match="offers 150 tokens, the request has 149"):
            await w["p"].prefill.start(two, w["p"].prefill.prefill(two))
        *_, failed = await decoding
        assert isinstance(failed, wire.ErrorEvent)
        p, d = verified(tmp_path, w["p"].core.notary.line("r"), failed.receipt)
        assert (p.outcome, p.transferred, p.computed, d.outcome, d.generated) == ("failed", 0, 0, "failed", 0)


@contextlib.asynccontextmanager
async def served(worker: LocalWorker) -> AsyncIterator[Callable[..., Awaitable[tuple[int, Any]]]]:
    """Serve a worker's internal API on loopback; yield how it is called."""
    sock = listen("127.0.0.1", 0)
    server = _Server(uvicorn.Config(Starlette(routes=routes(worker)), log_config=None, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer t"}) as session:

        async def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
            async with session.request(method, url + path, json=body) as answer:
                lines = (await answer.read()).splitlines()
                return answer.status, [msgspec.json.decode(line) for line in lines]

        yield call
    server.should_exit = True
    await serving


async def test_the_internal_api(tmp_path: Path) -> None:
    async with workers(tmp_path, PAIR) as w, served(w["d"]) as call:
        assert await call("GET", "/internal/receipts") == (200, [{"lines": [], "next": 0}])
        tag = {"tenant": "acme", "decode": "d"}
        body = {"request_id": "r", "transfer_id": "t", "token_ids": LONG, "sampling": {"max_tokens": 3}, "prefill": []}
        status, events = await call("POST", "/internal/generate", body | {"meter": tag})
        assert (status, events[-1]["type"]) == (200, "finish")
        line = events[-1]["receipt"]
        assert await call("GET", "/internal/receipts?since=0&limit=5") == (200, [{"lines": [line], "next": 1}])
        assert await call("DELETE", "/internal/requests/r") == (200, [{"found": False, "receipt": line}])
        for query in ("since=-1", "since=x", "limit=0", "limit=1001", "since=" + "9" * 40):
            status, [error] = await call("GET", f"/internal/receipts?{query}")
            assert (status, error["code"]) == (400, "bad_request")
            assert "must be a whole number from" in error["message"]
        for wrong in ({"roles": ["both"]}, {"roles": ["decode"] * 3}, {}):
            assert (await call("POST", "/internal/role", wrong))[0] == 400
        status, [health] = await call("POST", "/internal/role", {"roles": ["prefill"]})
        assert (status, health["roles"], health["role"]) == (200, ["prefill"], "decode")
        status, [error] = await call("POST", "/internal/generate", body)
        assert (status, error["code"]) == (503, "draining")
        for field, value in (("tenant", "x" * 257), ("route", "a\nb")):
            status, [error] = await call("POST", "/internal/generate", body | {"meter": tag | {field: value}})
            assert (status, error["code"]) == (400, "bad_request")
        status, [error] = await call("POST", "/internal/prefill", body | {"prefill": None})
        assert status == 400
        two = {k: v for k, v in body.items() if k != "prefill"} | {"decode": {}, "meter": tag, "request_id": "r2"}
        status, [error] = await call("POST", "/internal/prefill", two)
        assert (status, error["code"]) == (400, "bad_request")
        [word] = verified(tmp_path, error["receipt"])
        assert (word.side, word.outcome, word.computed) == ("prefill", "failed", 0)


async def test_without_a_tag_there_is_no_receipt(tmp_path: Path) -> None:
    async with workers(tmp_path, PAIR, EngineConfig(pool_tokens=1024, max_context=512, prefix_cache=False)) as w:
        events, said = await ask(w["p"], w["d"], "r", LONG, sampling(), meter=None)
        assert (said.receipt, end(events).receipt, w["d"].core.notary.count) == ("", "", 0)
        assert said.computed_tokens == 150


async def test_its_speed_is_known_before_the_first_request_and_nothing_else_is_left_of_that(tmp_path: Path) -> None:
    async with workers(tmp_path, {"p": ("prefill", PLAIN)}) as w:
        before = w["p"].health()
        assert before.prefill_tokens_per_s == 0
        await w["p"].core.measure()
        told = w["p"].health()
        assert told.prefill_tokens_per_s > 0
        assert told.tpot_s > 0
        assert (told.free_pages, told.cache_seq, told.running) == (before.free_pages, before.cache_seq, 0)

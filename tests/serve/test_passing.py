"""Clients' own bodies at a gateway whose workers are all of one engine with an API: passed on, tried again, metered, refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from engine_stand import Engine, usage
from otlp_collector import collector, values
from serve_rig import MODEL, WAIT_S, Rig, open_rig
from standing import listening

from regauge.config import LimitsConfig
from regauge.config_gateway import GatewayConfig
from regauge.serve import wire
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "tools": TOOLS,
    "max_tokens": 5,
}


@dataclass
class World:
    prefill: Engine
    decode: Engine
    rig: Rig


@asynccontextmanager
async def world(tokenizer: Tokenizer, **more: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        engines, at = {"prefill": Engine(), "decode": Engine()}, {}
        for role, engine in engines.items():
            url = await stack.enter_async_context(listening(engine.routes()))
            ranks = [wire.RankAddress(f"{role}.0", ("127.0.0.1", 9_000))]
            at[f"{role}_at"] = wire.WorkerAddress(role, role, url, ranks, "vllm")  # type: ignore[arg-type]
        limits = LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=0)
        rig = await stack.enter_async_context(open_rig(tokenizer, limits=limits, **at, **more))
        yield World(engines["prefill"], engines["decode"], rig)


async def test_what_only_the_engine_knows_goes_on_to_it(tokenizer: Tokenizer) -> None:
    async with world(tokenizer) as at:
        at.prefill.answer = {"usage": usage(3)}
        status, body, headers = await at.rig.post(CHAT, {**ASK, "not_yet_known": [1]}, X_Request_Id="mine")
        assert (status, body["choices"], body["usage"]) == (200, at.decode.answer["choices"], usage(3))
        assert (headers["x-request-id"], headers["content-type"].partition(";")[0]) == ("mine", "application/json")
        assert headers["x-regauge-route"]
        for engine in (at.prefill, at.decode):
            assert (engine.asked[0]["tools"], engine.asked[0]["not_yet_known"]) == (TOOLS, [1])
        assert at.rig.sample("regauge_prompt_tokens_total") == 9
        assert at.rig.sample("regauge_completion_tokens_total") == 2


async def test_a_stream_as_the_engine_wrote_it(tokenizer: Tokenizer) -> None:
    async with world(tokenizer) as at:
        at.decode.stream = [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b"data: [DONE]\n\n"]
        async with at.rig.client.post(at.rig.base + CHAT, json={**ASK, "stream": True}) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            assert await answer.read() == b"".join(at.decode.stream)


async def test_responses(tokenizer: Tokenizer) -> None:
    async with world(tokenizer) as at:
        at.decode.answer = {
            "id": "resp_1",
            "object": "response",
            "output": [],
            "usage": {"input_tokens": 9, "output_tokens": 2},
        }
        async with openai.AsyncOpenAI(base_url=at.rig.base + "/v1", api_key="none", max_retries=0) as client:
            answer = await client.responses.create(model=MODEL, input="hello")
            assert answer.id == "resp_1"
            with pytest.raises(openai.BadRequestError, match="no answer is kept"):
                await client.responses.create(model=MODEL, input="hello", previous_response_id="resp_1")
        assert at.decode.asked[0]["input"] == "hello"
        status, body, _ = await at.rig.post("/v1/responses", {"model": "gpt-9", "input": "x"})
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_without_such_engines_there_are_no_responses(rig: Rig) -> None:
    status, body, _ = await rig.post("/v1/responses", {"model": MODEL, "input": "x"})
    assert (status, body["error"]["code"]) == (501, "not_implemented")
    assert "all vLLM, or all SGLang" in body["error"]["message"]


async def test_a_prefill_that_fails_is_made_good_unseen(tokenizer: Tokenizer) -> None:
    async with world(tokenizer) as at:
        at.prefill.status, at.decode.gate = 500, asyncio.Event()
        asking = asyncio.create_task(at.rig.post(CHAT, ASK))
        await at.rig.until(lambda: len(at.decode.asked) == 2)
        at.decode.gate.set()
        status, body, _ = await asking
        assert (status, body["usage"]) == (200, usage(8)), "decode's own count, of a prompt that it computed"
        assert "kv_transfer_params" in at.decode.asked[0]
        assert "kv_transfer_params" not in at.decode.asked[1]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_the_engines_refusal_is_the_answer(tokenizer: Tokenizer, path: str) -> None:
    async with world(tokenizer) as at:
        for engine in (at.prefill, at.decode):
            engine.status, engine.more = 400, {"x-own": "1"}
            engine.answer = {"error": {"message": "no such tool"}}
        for stream in (False, True):
            status, body, headers = await at.rig.post(path, {**ASK, "stream": stream})
            assert (status, body, headers["x-own"]) == (400, at.decode.answer, "1")


async def test_what_many_caches_are_needed_for_is_the_gateways_own(tokenizer: Tokenizer) -> None:
    """Several answers are several requests; with what the gateway does not know, decode does it alone."""
    async with world(tokenizer) as at:
        await at.rig.post(CHAT, {**ASK, "n": 2})
        assert (at.prefill.asked, at.decode.asked[0]["n"]) == ([], 2)
        assert "kv_transfer_params" not in at.decode.asked[0]


async def test_a_stream_that_breaks_ends_in_an_error(tokenizer: Tokenizer) -> None:
    async with world(tokenizer) as at:
        at.decode.stream, at.decode.breaks = [b'data: {"choices":[]}\n\n'], True
        async with at.rig.client.post(at.rig.base + CHAT, json={**ASK, "stream": True}) as answer:
            first, last = (await answer.read()).removesuffix(b"\n\n").split(b"\n\n")
        assert first == b'data: {"choices":[]}'
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_unavailable"
        async with at.rig.client.post(at.rig.base + "/v1/messages", json={**ASK, "stream": True}) as answer:
            last = (await answer.read()).removesuffix(b"\n\n").split(b"\n\n")[-1]
        name, data = last.split(b"\n")
        assert (name, json.loads(data[6:])["type"]) == (b"event: error", "error")


async def test_a_client_that_leaves_ends_it_at_the_engines(tokenizer: Tokenizer) -> None:
    async with world(tokenizer) as at:
        at.decode.stream, at.decode.hangs = [b'data: {"choices":[]}\n\n'], True
        async with at.rig.client.post(at.rig.base + CHAT, json={**ASK, "stream": True}) as answer:
            await answer.content.readany()
        await asyncio.wait_for(at.decode.gone.wait(), WAIT_S)
        await at.rig.until(lambda: at.rig.sample("regauge_requests_in_flight") == 0)


async def test_engines_are_told_whose_prefixes_are_whose(tokenizer: Tokenizer) -> None:
    async with world(tokenizer, rules=GatewayConfig(isolate_prefixes=True)) as at:
        at.prefill.answer = {"usage": usage(3)}
        for own in ({}, {"cache_salt": "default"}, {"cache_salt": "other"}):
            assert (await at.rig.post(CHAT, {**ASK, **own}))[0] == 200
        salts = [asked["cache_salt"] for asked in at.decode.asked]
        assert salts == [asked["cache_salt"] for asked in at.prefill.asked]
        assert (salts[0], len(set(salts))) == ("default", 3), "a client's own salt never is another's"
        seen = len(at.decode.asked)
        await at.rig.post("/v1/messages", {**ASK, "tools": []})  # no salt goes with it: the gateway asks for tokens
        assert [asked["cache_salt"] for asked in at.decode.asked[seen:]] == ["default"]
        assert "messages" not in at.decode.asked[-1]


async def test_a_passed_requests_spans_and_those_of_its_engines_are_one_trace(tokenizer: Tokenizer) -> None:
    async with collector() as taken:
        async with world(tokenizer, otlp=taken.url) as at:
            at.prefill.answer = {"usage": usage(3)}
            await at.rig.post(CHAT, ASK, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
            at.decode.status, at.decode.answer = 400, {"error": {"message": "no such tool"}}
            await at.rig.post(CHAT, ASK)
        top, refused = taken.named("request")
        attempt, _ = taken.named("attempt")
        assert (top.trace_id.hex(), top.parent_span_id.hex(), attempt.parent_span_id) == (
            "a" * 32,
            "b" * 16,
            top.span_id,
        )
        for engine in (at.prefill, at.decode):
            assert engine.headers[0]["traceparent"] == f"00-{'a' * 32}-{attempt.span_id.hex()}-01"
        assert values(top.attributes)["gen_ai.usage.output_tokens"] == 2
        assert values(refused.attributes)["error.type"] == "400"
        assert "no such tool" in refused.status.message

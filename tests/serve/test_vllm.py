"""The gateway's dialect for vLLM, over HTTP against a stand-in that answers as vLLM 0.32 does (`tests/real_vllm` has the real one)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from serve_rig import MODEL, TOKEN, WAIT_S, Rig, open_rig
from standing import listening

from regauge.engines.local.sampling import SamplingParams
from regauge.engines.vllm.schedule import ReceiveParams, SendParams
from regauge.errors import ProtocolError
from regauge.serve import wire
from regauge.serve.connection import WorkerError, WorkerLost
from regauge.serve.text import Tokenizer
from regauge.serve.vllm import VllmClient

pytestmark = pytest.mark.anyio

RANKS = [wire.RankAddress("d.0", ("127.0.0.1", 9_000)), wire.RankAddress("d.1", ("127.0.0.1", 9_001))]


class Stand:
    """Answers `/v1/completions` with what it is given; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.ids: list[str | None] = []
        self.events: list[Any] = []
        self.whole: Any = {}
        self.status = 200
        self.gone = asyncio.Event()
        self.model = "m"
        self.hold = False
        self.awaits: asyncio.Event | None = None
        """Nothing is generated on KV from outside before this."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        body = await request.json()
        self.asked.append(body)
        self.ids.append(request.headers.get("x-request-id"))
        if not body.get("stream") or self.status != 200:
            return web.json_response(self.whole, status=self.status)
        if "kv_transfer_params" in body and self.awaits is not None:
            await self.awaits.wait()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for event in self.events:
                data = event if isinstance(event, str) else json.dumps(event)
                await response.write(f"data: {data}\n\n".encode())
            if self.hold:
                await asyncio.sleep(WAIT_S)
        except (asyncio.CancelledError, ConnectionResetError):
            self.gone.set()
            raise
        return response

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})


@asynccontextmanager
async def standing() -> AsyncIterator[tuple[Stand, str]]:
    stand = Stand()
    routes = [
        web.post("/v1/completions", stand.complete),
        web.get("/health", stand.health),
        web.get("/v1/models", stand.models),
    ]
    async with listening(routes) as url:
        yield stand, url


@asynccontextmanager
async def connected(role: Any = "decode") -> AsyncIterator[tuple[Stand, VllmClient]]:
    async with standing() as (stand, url):
        client = VllmClient(wire.WorkerAddress("d", role, url, RANKS, "vllm"), TOKEN, "m")
        try:
            yield stand, client
        finally:
            await client.close()


def generate(*senders: str, **sampling: Any) -> wire.Generate:
    return wire.Generate("r", "t", [5, 6], SamplingParams(**{"max_tokens": 4, **sampling}), list(senders))


def soon() -> float:
    return asyncio.get_running_loop().time() + WAIT_S


def chunk(*tokens: int, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "choices": [{"index": 0, "text": "", "token_ids": list(tokens), "finish_reason": finish, **more}],
    }


async def test_a_stream_of_ids_becomes_events() -> None:
    async with connected() as (stand, client):
        stand.events = [chunk(7), chunk(8, 9), chunk(2, finish="stop"), "[DONE]"]
        found = [event async for event in client.generate(generate("p.0", "p.1"), soon(), {"traceparent": "x"})]
        assert found == [*(wire.TokenEvent(t) for t in (7, 8, 9, 2)), wire.FinishEvent("stop", 2, 4)]
        asked = stand.asked[0]
        assert (asked["prompt"], asked["stream"], asked["return_token_ids"]) == ([5, 6], True, True)
        assert msgspec.convert(asked["kv_transfer_params"]["regauge"], ReceiveParams).from_ == ["p.0", "p.1"]
        assert stand.ids == ["r"]


async def test_every_sampling_parameter_is_said() -> None:
    """What is left out vLLM takes from the model's generation_config.json."""
    async with connected() as (stand, client):
        stand.events = [chunk(1, finish="length")]
        body = generate(
            temperature=0.5, top_k=3, min_p=0.25, seed=(1 << 64) - 1, stop_token_ids=(7,), ignore_eos=True, min_tokens=2
        )
        assert [e async for e in client.generate(body, soon(), {})][-1] == wire.FinishEvent("length", 2, 1)
        asked = stand.asked[0]
        assert {name: asked[name] for name in ("temperature", "top_k", "min_p", "seed", "stop_token_ids", "min_tokens")} == {
            "temperature": 0.5, "top_k": 3, "min_p": 0.25, "seed": -1, "stop_token_ids": [7], "min_tokens": 2}  # fmt: skip
        assert (asked["ignore_eos"], asked["repetition_penalty"], asked["top_p"]) == (True, 1.0, 1.0)
        assert "kv_transfer_params" not in asked  # nobody sends: vLLM computes the prompt


async def test_log_probabilities_come_by_id_and_likeliest_first() -> None:
    async with connected() as (stand, client):
        given = {
            "tokens": ["token_id:7"],
            "token_logprobs": [-0.5],
            "top_logprobs": [{"token_id:9": -1.0, "token_id:7": -0.5, "token_id:8": -1.0}],
        }
        stand.events = [chunk(7, finish="length", logprobs=given)]
        first, _ = [e async for e in client.generate(generate("p", logprobs=2), soon(), {})]
        assert first == wire.TokenEvent(7, -0.5, [(7, -0.5), (8, -1.0)])


@pytest.mark.parametrize(
    "events",
    [
        [chunk(7), {"error": {"message": "the load failed", "type": "x", "code": 500}}, "[DONE]"],
        [chunk(7), chunk(finish="abort")],
        [chunk(7, finish="error")],
    ],
    ids=["event", "abort", "error"],
)
async def test_an_error_in_the_stream_is_the_workers(events: list[Any]) -> None:
    async with connected() as (stand, client):
        stand.events = events
        with pytest.raises(WorkerError):
            assert [e async for e in client.generate(generate("p"), soon(), {})]


async def test_a_stream_that_breaks_off_is_a_death() -> None:
    async with connected() as (stand, client):
        stand.events = [chunk(7)]
        with pytest.raises(WorkerLost, match="before its finish reason"):
            assert [e async for e in client.generate(generate("p"), soon(), {})]


@pytest.mark.parametrize(
    "event",
    [
        "{",
        '{"choices": 3}',
        chunk(7, logprobs={"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}),
    ],
)
async def test_what_is_no_answer_is_said(event: Any) -> None:
    async with connected() as (stand, client):
        stand.events = [event]
        with pytest.raises(ProtocolError):
            assert [e async for e in client.generate(generate("p", logprobs=1), soon(), {})]


async def test_a_reader_that_goes_away_closes_the_connection() -> None:
    async with connected() as (stand, client):
        stand.events, stand.hold = [chunk(7)], True
        async with aclosing(client.generate(generate("p"), soon(), {})) as events:
            assert await anext(events) == wire.TokenEvent(7)
        async with asyncio.timeout(WAIT_S):
            await stand.gone.wait()


def prefill() -> wire.Prefill:
    to = {rank.name: rank.control for rank in RANKS if rank.control}
    return wire.Prefill("r", "t", [5, 6], SamplingParams(max_tokens=9, min_tokens=3, logprobs=0), to, handover=False)


async def test_prefill_asks_for_one_token_and_says_where_it_goes() -> None:
    async with connected("prefill") as (stand, client):
        stand.whole = {
            "choices": [{"index": 0, "text": "", "token_ids": [7], "finish_reason": "length",
                         "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:7": -0.5}]}}],
            "usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
        }  # fmt: skip
        done = await client.prefill(prefill(), soon(), {})
        assert (done.first_token, done.computed_tokens, done.cached_tokens, done.logprob, done.top) == (
            7,
            1,
            1,
            -0.5,
            [],
        )
        asked = stand.asked[0]
        assert (asked["max_tokens"], asked["min_tokens"]) == (1, 1)
        sent = msgspec.convert(asked["kv_transfer_params"]["regauge"], SendParams)
        assert sent == SendParams("t", {"d.0": ("127.0.0.1", 9_000), "d.1": ("127.0.0.1", 9_001)}, False)


async def test_a_prefill_that_did_not_send_is_a_failed_transfer() -> None:
    async with connected("prefill") as (stand, client):
        stand.whole = {
            "choices": [{"index": 0, "text": "", "token_ids": [7], "finish_reason": "length"}],
            "kv_transfer_params": {"regauge": {"error": "kv_transfer_params.regauge: no"}},
        }
        with pytest.raises(WorkerError, match=r"transfer_params.*: no") as caught:
            await client.prefill(prefill(), soon(), {})
        assert caught.value.event.code == "transfer_failed"


@pytest.mark.parametrize(
    ("status", "code"), [(400, "bad_request"), (401, "unauthorized"), (429, "queue_full"), (500, "engine_failed"), (503, "draining")]
)  # fmt: skip
async def test_refusals_keep_vllms_words(status: int, code: str) -> None:
    async with connected() as (stand, client):
        stand.status, stand.whole = status, {"error": {"message": "because", "type": "x", "code": status}}
        with pytest.raises(WorkerError, match="because") as caught:
            assert [e async for e in client.generate(generate("p"), soon(), {})]
        assert caught.value.event.code == code


async def test_another_model_is_not_ours() -> None:
    async with connected() as (stand, client):
        assert (await client.health(WAIT_S)).model == "m"
        stand.model = "other"
        with pytest.raises(WorkerLost, match="it serves other, not m: start it with --served-model-name m"):
            await client.health(WAIT_S)
        stand.status = 503
        with pytest.raises(WorkerError):
            await client.health(WAIT_S)


@asynccontextmanager
async def pair(tokenizer: Tokenizer, **options: Any) -> AsyncIterator[tuple[Stand, Rig]]:
    """A gateway before a prefill worker of our own and a decode worker that is vLLM."""
    async with standing() as (stand, url):
        stand.model = MODEL
        text = tokenizer.encode("all is well")
        stand.events = [*(chunk(token) for token in text), chunk(finish="length")]
        async with open_rig(
            tokenizer, decode_at=wire.WorkerAddress("d", "decode", url, RANKS, "vllm"), **options
        ) as rig:
            await rig.until(lambda: rig.sample("regauge_worker_up", worker="d", role="decode") == 1)
            yield stand, rig


BODY = {"model": MODEL, "prompt": "how is it?", "max_tokens": 20}


async def test_a_pair_of_engines_is_one_endpoint(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as (stand, rig):
        status, body, _ = await rig.post("/v1/completions", BODY)
        assert (status, body["choices"][0]["text"]) == (200, "all is well")
        assert stand.asked[0]["kv_transfer_params"]["regauge"]["from"] == ["prefill-0"]
        sent = rig.prefill.prefills[0]
        assert sent.decode == {"d.0": ("127.0.0.1", 9_000), "d.1": ("127.0.0.1", 9_001)}
        assert sent.transfer_id == stand.asked[0]["kv_transfer_params"]["regauge"]["transfer"]
        assert not sent.handover
        assert rig.sample("regauge_prefill_bypassed_total") == 0
        events = await rig.stream(
            "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        )
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "all is well"


@pytest.mark.parametrize("how", ["refuses", "dies"])
async def test_decode_goes_on_alone_where_prefill_fails(tokenizer: Tokenizer, how: str) -> None:
    async with pair(tokenizer) as (stand, rig):
        stand.awaits = asyncio.Event()  # the KV never comes
        if how == "refuses":
            rig.prefill.refuse = wire.ErrorEvent("engine_failed", "out of order", "prefill-0")
        else:
            rig.prefill.die_after = 0
        status, body, _ = await rig.post("/v1/completions", BODY)
        assert (status, body["choices"][0]["text"], len(stand.asked)) == (200, "all is well", 2)
        assert "kv_transfer_params" not in stand.asked[1]
        assert rig.sample("regauge_prefill_bypassed_total") == 1


async def test_without_a_prefill_worker_the_pair_is_degraded_and_serves(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer, prefill_up=False) as (stand, rig):
        assert (await rig.get("/ready"))[:2][1]["status"] == "degraded"
        status, body, _ = await rig.post("/v1/completions", BODY)
        assert (status, body["choices"][0]["text"], len(stand.asked)) == (200, "all is well", 1)


async def test_prefill_may_answer_after_decode(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as (stand, rig):
        rig.prefill.hold = asyncio.Event()  # vLLM's answer to prefill may come after decode's first token
        asking = asyncio.create_task(rig.post("/v1/completions", BODY))
        await rig.prefill.arrivals.get()
        await rig.until(lambda: bool(stand.asked))
        rig.prefill.hold.set()
        status, body, _ = await asking
        assert (status, body["choices"][0]["text"], len(stand.asked)) == (200, "all is well", 1)

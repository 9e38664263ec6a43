"""The gateway's dialect for SGLang, over HTTP against a stand-in that answers as SGLang 0.5.23 does (`tests/real_mixed` has the real one)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from serve_rig import MODEL, TOKEN, WAIT_S, Rig, open_rig
from standing import listening

from regauge.config import LimitsConfig
from regauge.engines.local.sampling import SamplingParams
from regauge.engines.sglang import room
from regauge.errors import ProtocolError
from regauge.serve import wire
from regauge.serve.connection import WorkerError, WorkerLost
from regauge.serve.sglang import SglangClient
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio

RANKS = [wire.RankAddress("d.0", ("127.0.0.1", 9_000)), wire.RankAddress("d.1", ("127.0.0.1", 9_001))]
TRANSFER = room.transfer(17)


class Stand:
    """Answers `/generate` with what it is given; notes what it was asked, and what was aborted."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.aborts: asyncio.Queue[str] = asyncio.Queue()
        self.events: list[Any] = []
        self.whole: Any = {}
        self.status = 200
        self.model, self.mode = "m", "decode"
        self.hold = False
        self.awaits: Callable[[], asyncio.Event | None] = lambda: None
        """What a stream waits for before its first event."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        body = await request.json()
        self.asked.append(body)
        if not body.get("stream") or self.status != 200:
            return web.json_response(self.whole, status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if (gate := self.awaits()) is not None:
            await gate.wait()
        for event in self.events:
            await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        if self.hold:
            await asyncio.sleep(WAIT_S)
        return response

    async def abort(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        self.aborts.put_nowait((await request.json())["rid"])
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"served_model_name": self.model, "disaggregation_mode": self.mode, "model_path": "x"})


@asynccontextmanager
async def standing() -> AsyncIterator[tuple[Stand, str]]:
    stand = Stand()
    routes = [
        web.post("/generate", stand.generate),
        web.post("/abort_request", stand.abort),
        web.get("/ready", stand.ready),
        web.get("/model_info", stand.info),
    ]
    async with listening(routes) as url:
        yield stand, url


@asynccontextmanager
async def connected(role: Any = "decode") -> AsyncIterator[tuple[Stand, SglangClient]]:
    async with standing() as (stand, url):
        client = SglangClient(wire.WorkerAddress("d", role, url, RANKS, "sglang"), TOKEN, "m")
        try:
            yield stand, client
        finally:
            await client.close()


def generate(**sampling: Any) -> wire.Generate:
    return wire.Generate("r", TRANSFER, [5, 6], SamplingParams(**{"max_tokens": 4, **sampling}), ["p.0", "p.1"])


def soon() -> float:
    return asyncio.get_running_loop().time() + WAIT_S


def out(*tokens: int, total: int | None = None, finish: Any = None, **meta: Any) -> dict[str, Any]:
    """One event: as cumulative streams have it, unless `total` is more than its tokens."""
    told = {"id": "r.", "finish_reason": finish, "prompt_tokens": 2, "cached_tokens": 0, **meta}
    return {"text": "", "output_ids": list(tokens), "meta_info": {"completion_tokens": total or len(tokens), **told}}


STOP = {"type": "stop", "matched": 2}
LENGTH = {"type": "length", "length": 2}


@pytest.mark.parametrize(
    "events",
    [
        [out(7), out(7, 8, 9), out(7, 8, 9, 2, finish=STOP), "[DONE]"],
        [out(7), out(8, 9, total=3), out(2, total=4, finish=STOP), "[DONE]"],
        [out(7), out(8, 9, 2, total=4), out(total=4, finish=STOP), "[DONE]"],
        [out(7, 8, 9, 2, finish=STOP), "[DONE]"],
    ],
    ids=["all so far", "the new ones", "an end of its own", "at once"],
)
async def test_a_stream_of_ids_becomes_events(events: list[Any]) -> None:
    async with connected() as (stand, client):
        stand.events = events
        found = [event async for event in client.generate(generate(), soon(), {"traceparent": "x"})]
        assert found == [*(wire.TokenEvent(t) for t in (7, 8, 9, 2)), wire.FinishEvent("stop", 2, 4)]
        asked = stand.asked[0]
        assert (asked["input_ids"], asked["stream"], asked["return_logprob"]) == ([5, 6], True, False)
        assert asked["bootstrap_room"] == 17
        assert room.decode(asked["bootstrap_host"]) == room.From(["p.0", "p.1"])
        assert stand.aborts.empty()


async def test_every_sampling_parameter_is_said() -> None:
    """What is left out SGLang takes from its --preferred-sampling-params."""
    async with connected() as (stand, client):
        stand.events = [out(1, finish=LENGTH)]
        body = generate(temperature=1e-6, top_k=0, min_p=0.25, seed=(1 << 64) - 1, stop_token_ids=(7,), min_tokens=2)
        assert [e async for e in client.generate(body, soon(), {})][-1] == wire.FinishEvent("length", 2, 1)
        assert stand.asked[0]["sampling_params"] == {
            "max_new_tokens": 4, "min_new_tokens": 2, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.25,
            "sampling_seed": -1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "stop": [], "stop_token_ids": [7], "ignore_eos": False, "n": 1,
        }  # fmt: skip


@pytest.mark.parametrize("incremental", [False, True])
async def test_log_probabilities_come_likeliest_first(incremental: bool) -> None:
    async with connected() as (stand, client):
        first, second = [-0.5, 7, None], [None, 8, None]
        tops = [[[-1.0, 9, None], [-0.5, 7, None], [-1.0, 8, None]], [[-0.25, 3, None], [None, 8, None]]]
        one = out(7, output_token_logprobs=[first], output_top_logprobs=tops[:1])
        keep = slice(1, None) if incremental else slice(None)
        two = out(*[7, 8][keep], total=2, finish=LENGTH, output_token_logprobs=[first, second][keep],
                  output_top_logprobs=tops[keep])  # fmt: skip
        stand.events = [one, two]
        found = [e async for e in client.generate(generate(logprobs=2), soon(), {})][:-1]
        lowest = wire.LOWEST_LOGPROB
        assert found == [
            wire.TokenEvent(7, -0.5, [(7, -0.5), (8, -1.0)]),
            wire.TokenEvent(8, lowest, [(3, -0.25), (8, lowest)]),
        ]
        assert (stand.asked[0]["return_logprob"], stand.asked[0]["top_logprobs_num"]) == (True, 2)


async def test_a_first_token_whose_hand_over_has_no_log_probability_is_left_to_prefills_answer() -> None:
    async with connected() as (stand, client):
        stand.events = [out(7, finish=LENGTH, output_token_logprobs=[[None, 7, None]], output_top_logprobs=[[[0.0, 0, None]]])]  # fmt: skip
        assert (await anext(client.generate(generate(logprobs=1), soon(), {}))) == wire.TokenEvent(7)


async def test_stop_tokens_end_an_answer_that_ignores_the_models_own() -> None:
    """SGLang ignores both."""
    async with connected() as (stand, client):
        stand.events, stand.hold = [out(7), out(7, 9, 8, 3)], True
        body = generate(ignore_eos=True, stop_token_ids=(9,))
        found = [e async for e in client.generate(body, soon(), {})]
        assert found == [wire.TokenEvent(7), wire.TokenEvent(9), wire.FinishEvent("stop", 2, 2)]
        assert await stand.aborts.get() == "r."


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (out(7, 8, finish={"type": "abort", "message": "Aborted", "status_code": None}), "aborted"),
        (out(finish={"type": "abort", "message": "Decode transfer failed for request rank=0 ... KVTransferError(bootstrap_room=17): "
                     "digest exceeds the maximum", "status_code": 500}), "transfer_failed"),
        (out(finish={"type": "abort", "message": "out of order", "status_code": 500}), "engine_failed"),
        (out(finish={"type": "abort", "message": "The request queue is full.", "status_code": 503}), "queue_full"),
        ({"error": {"message": "Duplicate request ID detected: r.", "code": 400}}, "duplicate_request"),
        ({"error": {"message": "The input (9 tokens) is longer than the model's context length (8 tokens).", "code": 400}}, "prompt_too_large"),
    ],
)  # fmt: skip
async def test_an_error_in_the_stream_is_the_workers(event: Any, code: str) -> None:
    async with connected() as (stand, client):
        stand.events = [out(7), event, "[DONE]"]
        with pytest.raises(WorkerError) as caught:
            assert [e async for e in client.generate(generate(), soon(), {})]
        assert caught.value.event.code == code


async def test_a_stream_that_breaks_off_is_a_death() -> None:
    async with connected() as (stand, client):
        stand.events = [out(7)]
        with pytest.raises(WorkerLost, match="before its finish reason"):
            assert [e async for e in client.generate(generate(), soon(), {})]


@pytest.mark.parametrize(
    "event", ["{", '{"output_ids": 3}', out(7, 8, total=5), out(7, 8, output_token_logprobs=[[-1.0, 7, None]])]
)
async def test_what_is_no_answer_is_said(event: Any) -> None:
    async with connected() as (stand, client):
        stand.events = [event]
        with pytest.raises(ProtocolError):
            assert [e async for e in client.generate(generate(logprobs=0), soon(), {})]


async def test_an_abort_names_one_request_alone() -> None:
    """SGLang aborts all whose id begins so: r-1 must not take r-10 with it."""
    async with connected() as (stand, client):
        stand.events, stand.hold = [out(7)], True
        async with aclosing(client.generate(generate(), soon(), {})) as events:
            await anext(events)
        assert (await client.abort("r")).found
        rid = await stand.aborts.get()
        assert rid == stand.asked[0]["rid"]
        assert not "r0.".startswith(rid)


def prefill() -> wire.Prefill:
    to = {rank.name: rank.control for rank in RANKS if rank.control}
    return wire.Prefill("r", TRANSFER, [5, 6], SamplingParams(max_tokens=9, min_tokens=3, logprobs=0), to)


async def test_prefill_is_told_where_it_goes() -> None:
    async with connected("prefill") as (stand, client):
        stand.whole = out(7, finish=LENGTH, cached_tokens=1, output_token_logprobs=[[-0.5, 7, None]])
        done = await client.prefill(prefill(), soon(), {})
        assert (done.first_token, done.computed_tokens, done.cached_tokens, done.logprob, done.top) == (7, 1, 1, -0.5, [])  # fmt: skip
        asked = stand.asked[0]
        assert (asked["bootstrap_room"], asked["rid"], asked.get("stream")) == (17, "r.", None)
        ranks = {"d.0": ("127.0.0.1", 9_000), "d.1": ("127.0.0.1", 9_001)}
        assert room.decode(asked["bootstrap_host"]) == room.To(ranks)


async def test_a_prefill_that_was_aborted_is_no_answer() -> None:
    """SGLang answers 200."""
    async with connected("prefill") as (stand, client):
        stand.whole = out(finish={"type": "abort", "message": "Abort in waiting queue", "status_code": None})
        with pytest.raises(WorkerError, match="Abort in waiting queue") as caught:
            await client.prefill(prefill(), soon(), {})
        assert caught.value.event.code == "aborted"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("status", "code"), [(400, "bad_request"), (401, "unauthorized"), (429, "queue_full"), (500, "engine_failed"), (503, "draining")]
)  # fmt: skip
async def test_refusals_keep_sglangs_words(status: int, code: str, nested: bool) -> None:
    async with connected() as (stand, client):
        problem: dict[str, Any] = {"object": "error", "message": "because", "type": "x", "code": status}
        stand.status, stand.whole = status, {"error": {"message": "because"}} if nested else problem
        with pytest.raises(WorkerError, match="because") as caught:
            assert [e async for e in client.generate(generate(), soon(), {})]
        assert caught.value.event.code == code


async def test_a_bare_word_is_a_refusal_too() -> None:
    async with connected() as (stand, client):
        stand.status, stand.whole = 401, {"error": "Unauthorized"}
        with pytest.raises(WorkerError, match="Unauthorized"):
            await client.prefill(prefill(), soon(), {})


async def test_another_model_or_mode_is_not_ours() -> None:
    async with connected() as (stand, client):
        assert (await client.health(WAIT_S)).model == "m"
        stand.model = "other"
        with pytest.raises(WorkerLost, match="it serves other, not m: start it with --served-model-name m"):
            await client.health(WAIT_S)
        stand.model, stand.mode = "m", "null"
        with pytest.raises(WorkerLost, match="start it with --disaggregation-mode decode"):
            await client.health(WAIT_S)
        stand.status = 503
        with pytest.raises(WorkerError):
            await client.health(WAIT_S)


@asynccontextmanager
async def pair(tokenizer: Tokenizer, **options: Any) -> AsyncIterator[tuple[Stand, Rig]]:
    """A gateway before a prefill worker of our own and a decode worker that is SGLang."""
    async with standing() as (stand, url):
        stand.model = MODEL
        text = tokenizer.encode("all is well")
        stand.events = [out(*text, finish=LENGTH), "[DONE]"]
        at = wire.WorkerAddress("d", "decode", url, RANKS, "sglang")
        async with open_rig(tokenizer, decode_at=at, **options) as rig:
            await rig.until(lambda: rig.sample("regauge_worker_up", worker="d", role="decode") == 1)
            yield stand, rig


BODY = {"model": MODEL, "prompt": "how is it?", "max_tokens": 20}


async def test_a_pair_of_engines_is_one_endpoint(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as (stand, rig):
        status, body, _ = await rig.post("/v1/completions", BODY)
        assert (status, body["choices"][0]["text"]) == (200, "all is well")
        assert room.decode(stand.asked[0]["bootstrap_host"]) == room.From(["prefill-0"])
        sent = rig.prefill.prefills[0]
        assert sent.decode == {"d.0": ("127.0.0.1", 9_000), "d.1": ("127.0.0.1", 9_001)}
        assert room.room(sent.transfer_id) == stand.asked[0]["bootstrap_room"]
        assert sent.handover


async def test_decode_is_told_at_once_that_prefill_failed_and_the_request_begins_again(tokenizer: Tokenizer) -> None:
    limits = LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=WAIT_S)
    async with pair(tokenizer, limits=limits) as (stand, rig):
        never = asyncio.Event()  # the KV of the first attempt never comes
        stand.awaits = lambda: never if len(stand.asked) == 1 else None
        rig.prefill.die_after, rig.prefill.recovers = 0, True
        status, body, _ = await rig.post("/v1/completions", BODY)
        async with asyncio.timeout(WAIT_S):
            assert await stand.aborts.get() == stand.asked[0]["rid"]
        assert (status, body["choices"][0]["text"], len(stand.asked)) == (200, "all is well", 2)
        assert stand.asked[0]["rid"] != stand.asked[1]["rid"]
        assert stand.asked[0]["bootstrap_room"] != stand.asked[1]["bootstrap_room"]
        assert rig.sample("regauge_retries_total") == 1

"""One try of a client's own body on two engines, over HTTP against stand-ins that answer as vLLM 0.32 and SGLang 0.5.23 do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from engine_stand import Engine, usage
from serve_rig import TOKEN, WAIT_S
from standing import listening

from regauge.engines.sglang import room
from regauge.errors import ProtocolError
from regauge.serve import wire
from regauge.serve.connection import RequestTimeout, WorkerError, WorkerLost
from regauge.serve.engine_client import EngineClient
from regauge.serve.passage import MAX_REFUSAL, Passage, Refused
from regauge.serve.passthrough import ROUTES, read
from regauge.serve.sglang import SglangClient
from regauge.serve.vllm import VllmClient

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
CLIENTS: dict[str, type[EngineClient]] = {"vllm": VllmClient, "sglang": SglangClient}
TRANSFER = room.transfer(17)


class Pair:
    """Two engines of one kind, and passages over them."""

    def __init__(self, prefill: Engine, decode: Engine, clients: tuple[EngineClient, EngineClient]) -> None:
        self.prefill, self.decode = prefill, decode
        self.clients = clients
        self.dropped: list[tuple[str, str]] = []

    def passage(self, path: str = CHAT, *, alone: bool = False, limit_s: float = WAIT_S, **fields: Any) -> Passage:
        asked = read(ROUTES[path], json.dumps({"model": "m", **fields}).encode())
        return Passage(
            asked=asked, request_id="r1", transfer_id=TRANSFER, prefill=None if alone else self.clients[0], decode=self.clients[1],
            deadline=asyncio.get_running_loop().time() + limit_s, headers={"traceparent": "00-x"},
            drop=lambda client, name: self.dropped.append((client.role, name)),
        )  # fmt: skip


@asynccontextmanager
async def pair(engine: str = "vllm") -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        engines, clients = (Engine(), Engine()), []
        for role, each, ranks in (("prefill", engines[0], ["p.0"]), ("decode", engines[1], ["d.0"])):
            url = await stack.enter_async_context(listening(each.routes()))
            named = [wire.RankAddress(rank, ("127.0.0.1", 9_000)) for rank in ranks]
            client = CLIENTS[engine](wire.WorkerAddress(role, role, url, named, engine), TOKEN, "m")
            stack.push_async_callback(client.close)
            clients.append(client)
        yield Pair(*engines, (clients[0], clients[1]))


async def all_of(passage: Passage, got: bytearray | None = None) -> bytes:
    """Return the answer; `got` has what came of it, also where it breaks."""
    got = bytearray() if got is None else got

    async def deliver(piece: bytes) -> None:
        got.extend(piece)

    await passage.run(deliver)
    return bytes(got)


@asynccontextmanager
async def first_of(passage: Passage) -> AsyncIterator[bytes]:
    """Yield the first piece of an answer, and leave the passage there: as where its client goes."""
    pieces: asyncio.Queue[bytes] = asyncio.Queue()
    running = asyncio.create_task(passage.run(pieces.put))
    try:
        yield await asyncio.wait_for(pieces.get(), WAIT_S)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TEXT = [chunk(choices=[{"delta": {"content": piece}}]) for piece in ("a", " b")]
END = [chunk(choices=[], usage=usage(8)), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("engine", CLIENTS)
async def test_a_whole_answer(engine: str) -> None:
    async with pair(engine) as both:
        both.prefill.answer = {"choices": [], "usage": usage(3)}
        passage = both.passage(tools=[{"type": "function"}])
        body = json.loads(await all_of(passage))
        assert body == {"id": "x", "choices": [{"text": "a b"}], "usage": usage(3)}
        assert passage.head is not None
        assert (passage.head.status, passage.head.headers["content-type"]) == (200, "application/json; charset=utf-8")
        assert passage.usage is not None
        assert (passage.usage.prompt_tokens, passage.cached_tokens, passage.whole) == (9, 3, True)
        assert both.dropped == []
        assert both.prefill.asked[0]["tools"] == both.decode.asked[0]["tools"] == [{"type": "function"}]
        for asked in (both.prefill.headers[0], both.decode.headers[0]):
            assert (asked["traceparent"], asked["x-request-id"]) == ("00-x", "r1")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("engine", CLIENTS)
async def test_each_leg_is_told_its_part(engine: str, path: str) -> None:
    async with pair(engine) as both:
        await all_of(both.passage(path))
        prefill, decode = both.prefill.asked[0], both.decode.asked[0]
        if engine == "vllm":
            assert prefill["kv_transfer_params"]["regauge"]["to"] == {"d.0": ["127.0.0.1", 9_000]}
            assert decode["kv_transfer_params"]["regauge"]["from"] == ["p.0"]
        else:
            assert room.decode(prefill["bootstrap_host"]) == room.To({"d.0": ("127.0.0.1", 9_000)})
            assert room.decode(decode["bootstrap_host"]) == room.From(["p.0"])


async def test_a_stream_goes_on_as_it_comes() -> None:
    async with pair() as both:
        both.decode.stream = [TEXT[0]]
        both.decode.hangs = True
        passage = both.passage(stream=True)
        async with first_of(passage) as first:
            assert first == TEXT[0], "before the next is there"
            assert (passage.first is not None, passage.ended) == (True, None)
        await asyncio.wait_for(both.decode.gone.wait(), WAIT_S)
        assert both.dropped == [("prefill", "r1"), ("decode", "r1")]


@pytest.mark.parametrize("wanted", [False, True])
async def test_usage_at_a_streams_end(wanted: bool) -> None:
    async with pair() as both:
        both.prefill.answer = {"usage": usage(3)}
        both.decode.stream = [*TEXT, *END]
        passage = both.passage(stream=True, **({"stream_options": {"include_usage": True}} if wanted else {}))
        got = await all_of(passage)
        assert both.decode.asked[0]["stream_options"] == {"include_usage": True}
        events = got.split(b"\n\n")
        assert [event + b"\n\n" for event in events[:2]] == TEXT
        if wanted:
            assert json.loads(events[2][6:])["usage"] == usage(3)
        assert (len(events), events[-2]) == (4 + wanted, b"data: [DONE]")
        assert passage.usage is not None
        assert (passage.usage.completion_tokens, passage.usage.prompt_tokens_details.cached_tokens) == (2, 3)
        assert passage.whole


async def test_a_stream_of_messages() -> None:
    async with pair() as both:
        both.prefill.answer = {"usage": {"input_tokens": 6, "cache_read_input_tokens": 3, "output_tokens": 1}}
        start = {
            "type": "message_start",
            "message": {"usage": {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 0}},
        }
        delta = {
            "type": "message_delta",
            "delta": {},
            "usage": {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 2},
        }
        both.decode.stream = [
            f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in (start, delta)
        ]
        passage = both.passage("/v1/messages", stream=True, max_tokens=5)
        assert (await all_of(passage)).count(b'"cache_read_input_tokens":3') == 2
        assert passage.usage is not None
        assert (passage.usage.prompt_tokens, passage.usage.completion_tokens) == (9, 2)
        assert "x-override-rid" in both.decode.headers[0]


async def test_decode_alone() -> None:
    async with pair() as both:
        passage = both.passage(alone=True)
        assert json.loads(await all_of(passage))["usage"] == usage(8), "its own count is right"
        assert (both.prefill.asked, passage.whole) == ([], True)
        assert "kv_transfer_params" not in both.decode.asked[0]


@pytest.mark.parametrize("engine", CLIENTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_client_did_wrong_it_is_told_in_the_engines_words(engine: str, stream: bool) -> None:
    async with pair(engine) as both:
        for each in (both.prefill, both.decode):
            each.status, each.answer = 400, {"error": {"message": "no such tool", "code": 400}}
            each.more = {"x-own": "1", "set-cookie": "a=b", "connection": "x-hop", "x-hop": "1"}
        passage = both.passage(stream=stream)
        with pytest.raises(Refused, match="no such tool") as caught:
            await all_of(passage)
        refused = caught.value
        assert (refused.clients, refused.head.status, json.loads(refused.body)) == (True, 400, both.decode.answer)
        assert dict(refused.head.headers) == {"content-type": "application/json; charset=utf-8", "x-own": "1"}
        assert (passage.head, len(both.dropped)) == (None, 2)


async def test_an_error_is_cut() -> None:
    async with pair() as both:
        both.decode.status, both.decode.answer = 422, {"error": {"message": "x" * MAX_REFUSAL}}
        with pytest.raises(Refused) as caught:
            await all_of(both.passage())
        assert len(caught.value.body) == MAX_REFUSAL


@pytest.mark.parametrize("status", [401, 429, 500, 503])
async def test_what_is_the_engines_fault_is_for_another_try(status: int) -> None:
    async with pair() as both:
        both.decode.status = status
        with pytest.raises(WorkerError) as caught:
            await all_of(both.passage())
        assert isinstance(caught.value, Refused)
        assert not caught.value.clients
        assert caught.value.role == "decode"


async def test_prefill_that_fails_ends_decode_before_its_first_byte() -> None:
    async with pair() as both:
        both.prefill.status, both.prefill.answer = 500, {"error": {"message": "out of luck"}}
        both.decode.gate = asyncio.Event()
        passage = both.passage(stream=True)
        with pytest.raises(WorkerError, match="out of luck") as caught:
            await all_of(passage)
        assert (caught.value.role, passage.head) == ("prefill", None)
        await asyncio.wait_for(both.decode.gone.wait(), WAIT_S)


async def test_a_leg_that_vllm_could_not_take_is_a_failed_transfer() -> None:
    async with pair() as both:
        both.prefill.answer = {"kv_transfer_params": {"regauge": {"error": "no such rank"}}}
        both.decode.gate = asyncio.Event()
        with pytest.raises(WorkerError, match="no such rank") as caught:
            await all_of(both.passage())
        assert caught.value.event.code == "transfer_failed"


async def test_a_death_is_the_cause_of_a_refusal() -> None:
    async with pair() as both:
        both.prefill.breaks = True
        both.decode.status, both.decode.answer = 500, {"error": {"message": "transfer"}}
        with pytest.raises(WorkerLost) as caught:
            await all_of(both.passage())
        assert caught.value.role == "prefill"


async def test_where_decode_goes_on_prefill_may_fail() -> None:
    """As where it had all of the prompt: nothing is sent, and prefill's answer is for nobody."""
    async with pair() as both:
        both.prefill.status, both.prefill.answer = 500, {}
        both.decode.stream = [*TEXT, *END]
        passage = both.passage(stream=True, stream_options={"include_usage": True})
        got = await all_of(passage)
        assert json.loads(got.split(b"\n\n")[2][6:])["usage"] == usage(8)
        assert (passage.cached_tokens, passage.whole, len(both.dropped)) == (None, False, 2)


async def test_decode_that_dies_in_its_stream() -> None:
    async with pair() as both:
        both.decode.stream, both.decode.breaks = [*TEXT], True
        passage, got = both.passage(stream=True), bytearray()
        with pytest.raises(WorkerLost):
            await all_of(passage, got)
        assert got == b"".join(TEXT)
        assert (passage.head is not None, passage.whole) == (True, False)


async def test_an_empty_stream_is_no_answer() -> None:
    async with pair() as both:
        with pytest.raises(ProtocolError, match="answered with nothing"):
            await all_of(both.passage(stream=True))


async def test_an_event_without_end_is_not_gathered() -> None:
    async with pair() as both:
        both.decode.stream = [b"data: " + b"x" * (1 << 19)] * 3
        with pytest.raises(ProtocolError, match="an event of over"):
            await all_of(both.passage(stream=True))


async def test_a_time_limit() -> None:
    async with pair() as both:
        both.decode.gate = both.prefill.gate = asyncio.Event()
        with pytest.raises(RequestTimeout):
            await all_of(both.passage(limit_s=0.05))
        assert len(both.dropped) == 2


async def test_sglang_is_asked_to_drop_what_it_was_asked_for() -> None:
    async with pair("sglang") as both:
        both.decode.stream, both.decode.hangs = [*TEXT], True
        passage = both.passage("/v1/responses", stream=True)
        async with first_of(passage):
            pass
        for client, (_, name) in zip(both.clients, both.dropped, strict=True):
            await client.abort(name)
        for engine in (both.prefill, both.decode):
            assert await engine.aborts.get() == engine.asked[0]["request_id"] == "resp_r1."

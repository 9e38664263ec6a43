"""A server is measured by what its streams really bring, and refused where it does not answer as asked. The server here answers by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from regauge.engines.streaming import Endpoint, ask, models
from regauge.engines.timed_server import TimedServer, together
from regauge.errors import ConfigError, EngineError

Reply = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
PIECE = {"choices": [{"text": "x", "finish_reason": None}]}
END = {"choices": [{"text": "", "finish_reason": "length"}]}


def _usage(prompt: int, cached: int = 0) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}},
    }


async def _stream(request: web.Request, *chunks: object) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for chunk in chunks:
        text = chunk if isinstance(chunk, str) else json.dumps(chunk)
        await reply.write(f"data: {text}\n\n".encode())
    return reply


async def _with(reply: Reply, use: Callable[[aiohttp.ClientSession, Endpoint], Awaitable[Any]]) -> Any:
    async def completions(request: web.Request) -> web.StreamResponse:
        return await reply(request, await request.json())

    async def names(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", names)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    [(_, port)] = [address[:2] for address in runner.addresses]
    try:
        async with aiohttp.ClientSession() as session:
            return await use(session, Endpoint(f"http://127.0.0.1:{port}", "m", "secret"))
    finally:
        await runner.cleanup()


def _ask(reply: Reply) -> Any:
    return asyncio.run(_with(reply, lambda session, to: ask(session, to, [5, 6, 7], 3)))


def test_an_answer_has_a_time_for_each_token_and_what_the_server_counted() -> None:
    asked: list[tuple[str | None, dict[str, Any]]] = []

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.append((request.headers.get("Authorization"), body))
        return await _stream(request, PIECE, PIECE, END, _usage(3, 2), "[DONE]")

    answer = _ask(reply)
    assert (len(answer.pieces), answer.prompt, answer.cached, answer.output) == (2, 3, 2, 3)
    assert answer.sent < answer.pieces[0] <= answer.pieces[1] <= answer.ended
    [(key, body)] = asked
    assert key == "Bearer secret"
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ([5, 6, 7], 3, True, True)


def test_a_last_token_with_the_reason_of_the_end_counts() -> None:
    async def reply(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await _stream(request, PIECE, {"choices": [{"text": "y", "finish_reason": "length"}]}, "[DONE]")

    assert len(_ask(reply).pieces) == 2


@pytest.mark.parametrize(
    ("chunks", "words"),
    [((), "ended without a token"), (("{",), "is no completion"), ((END, "[DONE]"), "ended without a token")],
)
def test_streams_that_are_no_answers_are_refused(chunks: tuple[object, ...], words: str) -> None:
    async def reply(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await _stream(request, *chunks)

    with pytest.raises(EngineError, match=words):
        _ask(reply)


def test_the_servers_words_are_passed_on() -> None:
    async def reply(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=400, text="prompt is too long")

    with pytest.raises(EngineError, match="400: prompt is too long"):
        _ask(reply)


def test_no_server_is_said_so() -> None:
    async def gone() -> None:
        async with aiohttp.ClientSession() as session:
            await ask(session, Endpoint("http://127.0.0.1:9", "m"), [1], 1)

    with pytest.raises(EngineError, match="is a server there"):
        asyncio.run(gone())


def test_models_are_listed() -> None:
    async def reply(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await _stream(request, "[DONE]")

    assert asyncio.run(_with(reply, models)) == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "cached", "words"), [(9, 0, "9 tokens in a prompt of 8"), (8, 4, "4 tokens of a new prompt were cached")]
)
def test_a_server_that_counts_otherwise_is_refused(prompt: int, cached: int, words: str) -> None:
    async def reply(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await _stream(request, PIECE, PIECE, _usage(prompt, cached), "[DONE]")

    with pytest.raises(EngineError, match=words):
        asyncio.run(_with(reply, lambda session, to: TimedServer(session, to).prefill(8)))


def test_answers_that_end_before_all_decode_are_refused() -> None:
    async def reply(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await _stream(request, PIECE, PIECE, _usage(8), "[DONE]")

    with pytest.raises(
        EngineError, match="of 178 tokens ended before all 2 decoded together: ask for a longer --answer"
    ):
        asyncio.run(_with(reply, lambda session, to: TimedServer(session, to).decode(2, 8, 50)))


def test_a_batch_is_cancelled_once_enough_steps_were_seen() -> None:
    left = 0

    async def reply(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        nonlocal left
        stream = await _stream(request)
        try:
            while True:
                await stream.write(f"data: {json.dumps(PIECE)}\n\n".encode())
                await asyncio.sleep(0)
        finally:
            left += 1

    step = asyncio.run(_with(reply, lambda session, to: TimedServer(session, to).decode(3, 100, 5)))
    assert left == 3
    assert step.seconds > 0
    assert step.resident > 3 * 100


def test_steps_count_from_when_all_decode() -> None:
    """Three tokens of each in the 3 s after the later one's first; the earlier one had 2 until then."""
    step = together([[1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0]], 10)
    assert step.seconds == 1.0
    assert step.resident == (10 + 2 + 1.5) + (10 + 1 + 1.5)


def test_ids_are_a_range() -> None:
    with pytest.raises(ConfigError, match="first token id and the end"):
        TimedServer(None, Endpoint("http://h", "m"), ids=(5, 5))  # type: ignore[arg-type]

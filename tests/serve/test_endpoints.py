"""Every status that a request can be refused with before a worker hears of it, and the error body it comes in."""

from __future__ import annotations

import asyncio
from threading import get_ident
from typing import Any

import pytest
from serve_rig import MODEL, WAIT_S, Rig, open_rig

from regauge.config import LimitsConfig
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def text(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 100, **fields}


def error_of(body: Any) -> tuple[str, str | None, str | None]:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["type"], error["param"], error["code"]


STATUSES: list[tuple[str, Any, int, tuple[str, str | None, str | None]]] = [
    (CHAT, b"{", 400, ("invalid_request_error", None, "invalid_json")),
    (CHAT, chat(temperature="hot"), 400, ("invalid_request_error", "temperature", "invalid_value")),
    (CHAT, chat(max_tokens=0), 400, ("invalid_request_error", "max_tokens", "invalid_value")),
    (CHAT, chat(model="gpt-9"), 404, ("invalid_request_error", "model", "model_not_found")),
    (CHAT, chat("long " * 600), 400, ("invalid_request_error", "messages", "context_length_exceeded")),
    (CHAT, chat("long " * 9000), 400, ("invalid_request_error", "messages", "context_length_exceeded")),
    (CHAT, chat(max_tokens=600), 400, ("invalid_request_error", "messages", "context_length_exceeded")),
    (CHAT, chat(max_tokens=10**30), 400, ("invalid_request_error", "messages", "context_length_exceeded")),
    (TEXT, text([300] * 512), 400, ("invalid_request_error", "prompt", "context_length_exceeded")),
    (TEXT, text(""), 400, ("invalid_request_error", "prompt", "invalid_value")),
    (TEXT, text([10**6]), 400, ("invalid_request_error", "prompt", "invalid_value")),
    (TEXT, text([[5], [-1]]), 400, ("invalid_request_error", "prompt[1]", "invalid_value")),
    (TEXT, text(["a"] * 100, n=8), 400, ("invalid_request_error", "prompt", "invalid_value")),
    (TEXT, b"x" * (4 << 20) + b"x", 413, ("invalid_request_error", None, "request_too_large")),
    ("/v1/embeddings", {}, 404, ("invalid_request_error", None, "not_found")),
    ("/v1/models", {}, 405, ("invalid_request_error", None, "method_not_allowed")),
]


@pytest.mark.parametrize(("path", "body", "status", "error"), STATUSES)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(rig: Rig, path: str, body: Any, status: int, error: Any, stream: bool) -> None:
    before = len(rig.decode.generates)
    asked = {**body, "stream": True} if stream and isinstance(body, dict) else body
    got, answer, headers = await rig.post(path, asked)
    assert (got, error_of(answer)) == (status, error)
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    assert len(rig.decode.generates) == before, "no worker hears of it"


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(rig: Rig) -> None:
    async def parts() -> Any:
        for _ in range(5):
            yield b" " * (1 << 20)

    async with rig.client.post(rig.base + CHAT, data=parts()) as answer:
        assert answer.status == 413


async def test_too_long_says_both_numbers(rig: Rig) -> None:
    _, body, _ = await rig.post(TEXT, text([300] * 500, max_tokens=100))
    assert "512 tokens" in body["error"]["message"]
    assert "600 are asked for: 500 in prompt and 100" in body["error"]["message"]


async def test_admission_counts_every_answer(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, limits=LimitsConfig(max_queue=3, request_timeout_s=WAIT_S)) as rig:
        rig.decode.hold = asyncio.Event()
        first = asyncio.create_task(rig.post(CHAT, chat(n=2)))
        for _ in range(2):
            await asyncio.wait_for(rig.decode.arrivals.get(), WAIT_S)
        assert rig.sample("regauge_requests_in_flight") == 2
        status, body, headers = await rig.post(CHAT, chat(n=2))
        assert (status, error_of(body)) == (429, ("rate_limit_error", None, "rate_limit_exceeded"))
        assert headers["retry-after"] == "1"
        rig.decode.hold.set()
        assert (await first)[0] == 200
        assert (await rig.post(CHAT, chat(n=3)))[0] == 200


async def test_a_body_that_does_not_come_is_not_waited_for(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, limits=LimitsConfig(request_timeout_s=0.1)) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.base.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        line = await asyncio.wait_for(reader.readline(), WAIT_S)
        assert line.startswith(b"HTTP/1.1 408")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    "ask",
    [
        (CHAT, chat("x" * 20_000)),
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": ""}] * 1_000}),
        (TEXT, text(["word " * 1_000] * 100)),
        (TEXT, text(["a"] * 500, max_tokens=600)),
    ],
)
async def test_what_takes_long_to_tokenise_does_not_hold_the_event_loop(
    rig: Rig, ask: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    where: set[int] = set()
    for name in ("encode", "encode_chat"):
        own = getattr(rig.tokenizer, name)

        def seen(what: Any, own: Any = own) -> Any:
            where.add(get_ident())
            return own(what)

        monkeypatch.setattr(rig.tokenizer, name, seen)
    status, body, _ = await rig.post(*ask)
    assert (status, error_of(body)[2]) == (400, "context_length_exceeded"), (
        "no worker, which would tokenise, hears of it"
    )
    assert where
    assert get_ident() not in where
    where.clear()
    await rig.post(CHAT, chat())
    assert where == {get_ident()}, "a thread for a short one would only cost time"


async def test_more_prompts_than_are_taken_are_not_even_tokenised(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(rig.tokenizer, "encode", asked.append)
    status, body, _ = await rig.post(TEXT, text(["a"] * 100_000))
    assert (status, body["error"]["message"]) == (400, "'prompt': 100000 prompts x n=1 is more than 512 requests")
    assert asked == []


async def test_a_request_that_the_server_cuts_short_leaves_the_house(tokenizer: Tokenizer) -> None:
    """As uvicorn does with those that outlive its shutdown: also in the middle of their own end."""
    async with open_rig(tokenizer) as rig:
        rig.decode.hold = asyncio.Event()
        asking = asyncio.create_task(status_of(rig, CHAT, chat()))
        await asyncio.wait_for(rig.decode.arrivals.get(), WAIT_S)
        house = rig.server.config.app.state.house
        assert house.choices == 1
        [task] = rig.server.server_state.tasks
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task], timeout=WAIT_S)
        assert house.choices == 0
        assert await asking == 500


async def status_of(rig: Rig, path: str, body: Any) -> int:
    async with rig.client.post(rig.base + path, json=body) as answer:
        return answer.status

"""The Anthropic API at the gateway: what is accepted, what is refused and how, whole and streamed messages, counts."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from serve_rig import MODEL, WAIT_S, Rig, open_rig

from regauge.serve import wire
from regauge.serve.anthropic import error_body, parse_count, parse_messages
from regauge.serve.openai import ApiError
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
PATH = "/v1/messages"
USER = {"role": "user", "content": "hello"}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "max_tokens": 400, **fields}


def parse(**fields: Any) -> Any:
    return parse_messages(msgspec.json.encode(message(**fields)))


def test_what_is_asked_for() -> None:
    ask = parse(
        system=[{"type": "text", "text": "be "}, {"type": "text", "text": "kind", "cache_control": {"type": "ephemeral"}}],
        messages=[USER, {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, USER],
        stop_sequences=["a", "b"], temperature=0.5, top_p=0.25, top_k=7, stream=True, metadata={"user_id": "x"},
        service_tier="auto", thinking={"type": "disabled"}, tools=[], not_yet_known={"deep": 1},
    )  # fmt: skip
    assert ask.messages == (
        {"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"}, {"role": "user", "content": "hello"},
    )  # fmt: skip
    assert (ask.api, ask.chat, ask.n, ask.stream, ask.max_tokens, ask.stops) == (
        "anthropic", True, 1, True, 400, ("a", "b"),
    )  # fmt: skip
    sampling = ask.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, None)


def test_a_count_needs_no_length() -> None:
    model, messages = parse_count(msgspec.json.encode({"model": "m", "messages": [USER], "system": "s"}))
    assert (model, [m["role"] for m in messages]) == ("m", ["system", "user"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "assistant", "content": "I th"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"output_format": {"type": "json_schema"}}, "output_format"),
    ({"output_config": {"effort": "low"}}, "output_config"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.error.param) == (400, param)
    assert repr(param) in str(caught.value)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
        (405, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
        (502, "api_error"), (503, "overloaded_error"), (504, "timeout_error"),
    ],
)  # fmt: skip
def test_names_of_errors(status: int, kind: str) -> None:
    body = msgspec.json.decode(error_body(ApiError(status, "why"), "r1"))
    assert body == {"type": "error", "error": {"type": kind, "message": "why"}, "request_id": "r1"}


async def test_a_whole_message(rig: Rig) -> None:
    status, body, headers = await rig.post(PATH, message(system="be kind"), X_Request_Id="mine")
    prompt = rig.tokenizer.encode_chat([{"role": "system", "content": "be kind"}, USER])
    text = "I heard: " + rig.tokenizer.decode(prompt)
    assert (status, headers["content-type"], headers["x-request-id"]) == (200, "application/json", "mine")
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message", "role": "assistant", "model": MODEL, "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt), "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": len(rig.tokenizer.encode(text)) + 1,
        },
    }  # fmt: skip


async def test_what_was_cached_is_no_input(tokenizer: Tokenizer) -> None:
    """`input_tokens` is what was computed, in this API."""
    async with open_rig(tokenizer) as rig:
        rig.prefill.cached = 3
        _, body, _ = await rig.post(PATH, message())
        events = await events_of(rig, message(stream=True))
        prompt = len(rig.tokenizer.encode_chat([USER]))
        for usage in (body["usage"], events[-2]["usage"]):
            assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 3, 3)


async def events_of(rig: Rig, body: dict[str, Any]) -> list[Any]:
    """Return the events' data; each event's name must be its data's type."""
    async with rig.client.post(rig.base + PATH, json=body) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        found = []
        for event in (await answer.text()).removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            found.append(msgspec.json.decode(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


async def test_a_streamed_message(rig: Rig) -> None:
    events = await events_of(rig, message(stream=True))
    whole = (await rig.post(PATH, message()))[1]
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == (
        [], None, whole["usage"]["input_tokens"],
    )  # fmt: skip
    text = "".join(event["delta"]["text"] for event in events[3:-3])
    assert [{"type": "text", "text": text}] == whole["content"]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["zzz", "heard"]}, "stop_sequence", "heard"),
    ],
)
async def test_why_a_message_ended(rig: Rig, fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    _, whole, _ = await rig.post(PATH, message(**fields))
    events = await events_of(rig, message(stream=True, **fields))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert "heard" not in whole["content"][0]["text"] or sequence is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        (PATH, b"{", 400, "invalid_request_error"),
        (PATH, message(model="gpt-9"), 404, "not_found_error"),
        (PATH, message(max_tokens=600), 400, "invalid_request_error"),
        (PATH, b"x" * (4 << 20) + b"x", 413, "request_too_large"),
        (PATH + "/count_tokens", message(model="gpt-9"), 404, "not_found_error"),
        (PATH + "/batches", {}, 404, "not_found_error"),
    ],
)
async def test_refusals_are_in_the_apis_words(
    rig: Rig, path: str, body: Any, status: int, kind: str, stream: bool
) -> None:
    asked = {**body, "stream": True} if stream and isinstance(body, dict) else body
    got, answer, headers = await rig.post(path, asked)
    assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    assert answer["request_id"] == headers["x-request-id"] == headers["request-id"]


async def test_a_count_is_what_the_message_costs(rig: Rig) -> None:
    asked = {"model": MODEL, "messages": [USER], "system": "be kind"}
    status, count, _ = await rig.post(PATH + "/count_tokens", asked)
    _, answer, _ = await rig.post(PATH, {**asked, "max_tokens": 1})
    assert (status, count) == (200, {"input_tokens": answer["usage"]["input_tokens"]})
    long = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 9_000}]}
    status, count, _ = await rig.post(PATH + "/count_tokens", long)
    assert (status, count["input_tokens"] > 512) == (200, True), "a count has no limit but the body's"


async def test_a_stream_that_breaks_ends_in_an_error_event(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.break_after = (3, wire.ErrorEvent("engine_failed", "out of luck", "decode-0"))
        events = await events_of(rig, message(stream=True))
        assert events[-1]["error"]["type"] == "api_error"
        assert "out of luck" in events[-1]["error"]["message"]
        assert [event["type"] for event in events].count("message_stop") == 0


async def test_before_the_first_text_a_failure_has_its_own_status(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.refuse = wire.ErrorEvent("queue_full", "busy", "decode-0")
        for stream in (False, True):
            status, body, headers = await rig.post(PATH, message(stream=stream))
            assert (status, body["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "1")


async def test_a_full_house_is_told_in_the_apis_words(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.hold = asyncio.Event()
        first = asyncio.create_task(rig.post(PATH, message()))
        await asyncio.wait_for(rig.decode.arrivals.get(), WAIT_S)
        rig.server.config.app.state.house.draining = True
        status, body, _ = await rig.post(PATH, message())
        assert (status, body["error"]["type"]) == (503, "overloaded_error")
        rig.decode.hold.set()
        assert (await first)[0] == 200

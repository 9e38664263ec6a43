"""A client's own body: what goes on of it to each engine, what does not, and usage read and corrected on the way back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_rig import STEADY

from regauge.engines.sglang import room
from regauge.engines.vllm.schedule import ReceiveParams, SendParams
from regauge.serve.inject import Leg
from regauge.serve.openai import ApiError
from regauge.serve.passthrough import CHAT, COMPLETION, MESSAGES, RESPONSES, ROUTES, Cutter, Meter, Route, read

TO = {"d.0": ("10.0.0.1", 9_000)}
SEND = Leg("r", room.transfer(17), receivers=TO)
TAKE = Leg("r", room.transfer(17), senders=["p.0"])
ALONE = Leg("r", room.transfer(17))
BODY = {
    "model": "m",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "big": 10**30,
    "nested": {"a": [1, None]},
}


def body(**fields: Any) -> bytes:
    return json.dumps({**BODY, **fields}).encode()


def sent(route: Route, engine: Any, leg: Leg, **fields: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(read(route, body(**fields)).to(engine, leg))
    return told


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_all_that_is_not_ours_goes_on(route: Route, engine: Any) -> None:
    given_fields = {"stream": True, "response_format": {"type": "json_object"}, "seed": -(2**63), "x": "é\U0001f682"}
    for leg in (SEND, TAKE):
        told = sent(route, engine, leg, **given_fields)
        kept = {**BODY, **given_fields} if leg is TAKE else {**BODY, **given_fields, "stream": False}
        assert {name: told[name] for name in kept} == kept


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_vllm_is_told_its_part_of_the_transfer_on_every_route(route: Route) -> None:
    told = sent(route, "vllm", SEND)["kv_transfer_params"]
    assert msgspec.convert(told["regauge"], SendParams) == SendParams(room.transfer(17), TO, handover=False)
    assert told["do_remote_decode"] is True, "/v1/messages refuses a thinking budget over max_tokens, else"
    told = sent(route, "vllm", TAKE)["kv_transfer_params"]
    assert msgspec.convert(told["regauge"], ReceiveParams) == ReceiveParams(room.transfer(17), ["p.0"])
    assert "kv_transfer_params" not in sent(route, "vllm", ALONE)


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_sglang_is_told_its_part_of_the_transfer_on_every_route(route: Route) -> None:
    told = sent(route, "sglang", SEND)
    assert (told["bootstrap_room"], room.decode(told["bootstrap_host"])) == (17, room.To(TO))
    told = sent(route, "sglang", TAKE)
    assert (told["bootstrap_room"], room.decode(told["bootstrap_host"])) == (17, room.From(["p.0"]))
    named = {"/v1/responses": "request_id", "/v1/messages": None}.get(route.path, "rid")
    assert {name: told[name] for name in ("rid", "request_id") if name in told} == ({named: "r."} if named else {})


@pytest.mark.parametrize(
    ("route", "given_fields", "field", "gone"),
    [
        (CHAT, {"max_tokens": 500, "min_tokens": 2}, "max_completion_tokens", ("max_tokens", "min_tokens")),
        (CHAT, {"max_completion_tokens": 500}, "max_completion_tokens", ()),
        (COMPLETION, {"max_tokens": 500}, "max_tokens", ()),
        (RESPONSES, {"max_output_tokens": 500}, "max_output_tokens", ()),
        (MESSAGES, {"max_tokens": 500, "thinking": {"type": "enabled", "budget_tokens": 400}}, "max_tokens", ()),
    ],
)
def test_of_a_vllm_prefill_one_token_is_asked(route: Route, given_fields: Any, field: str, gone: Any) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    told = sent(route, "vllm", SEND, **given_fields, **options)
    assert told[field] == 1
    assert not {*gone, "stream_options"} & told.keys()
    assert (told["stream"], told.get("store", False)) == (False, False)
    assert told.get("thinking") == given_fields.get("thinking")
    for_decode = sent(route, "vllm", TAKE, **given_fields, **options)
    assert {name: for_decode[name] for name in given_fields} == given_fields
    for_sglang = sent(route, "sglang", SEND, **given_fields)
    assert {name: for_sglang[name] for name in given_fields} == given_fields


@pytest.mark.parametrize(
    ("given_options", "told", "wanted"),
    [
        ({}, {"include_usage": True}, False),
        ({"stream_options": None}, {"include_usage": True}, False),
        ({"stream_options": {"include_usage": False, "x": 1}}, {"include_usage": True, "x": 1}, False),
        ({"stream_options": {"include_usage": True}}, {"include_usage": True}, True),
        ({"stream_options": "wrong"}, "wrong", False),
    ],
)
def test_usage_of_a_stream_is_asked_for(given_options: Any, told: Any, wanted: bool) -> None:
    for route in (CHAT, COMPLETION):
        assert sent(route, "vllm", TAKE, stream=True, **given_options)["stream_options"] == told
        assert read(route, body(stream=True, **given_options)).usage is wanted
    assert "stream_options" not in sent(CHAT, "vllm", TAKE)
    assert "stream_options" not in sent(RESPONSES, "vllm", TAKE, stream=True), "its streams always end with usage"


@pytest.mark.parametrize(
    "name",
    ["kv_transfer_params", "bootstrap_room", "bootstrap_host", "rid", "request_id", "routed_dp_rank", "ec_transfer_params"],
)  # fmt: skip
def test_a_client_does_not_reach_into_transfers(name: str) -> None:
    with pytest.raises(ApiError, match="is for the gateway to say") as caught:
        read(CHAT, body(**{name: 17}))
    assert (caught.value.status, caught.value.error.param) == (400, name)
    assert name not in sent(CHAT, "vllm", ALONE, **{name: None})


def test_nor_by_vllms_back_door() -> None:
    """vLLM makes `vllm_xargs` and `kv_transfer_params` one mapping."""
    with pytest.raises(ApiError, match="vllm_xargs"):
        read(CHAT, body(vllm_xargs={"kv_transfer_params": "x"}))
    assert sent(CHAT, "vllm", TAKE, vllm_xargs={"own": 1})["vllm_xargs"] == {"own": 1}


@pytest.mark.parametrize("name", ["background", "previous_response_id", "conversation"])
def test_what_an_engine_would_have_to_keep_is_refused(name: str) -> None:
    with pytest.raises(ApiError, match="no answer is kept"):
        read(RESPONSES, body(**{name: "resp_1"}))


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b'{"model": 5}', b"{}", b'"x"', b'{"model": "m", "n": 1e999}', b"[" * 9_999]
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(CHAT, data)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("route", "fields", "why"),
    [
        (CHAT, {"n": 2}, "'n' above 1"),
        (COMPLETION, {"best_of": 2}, "'best_of' above 1"),
        (COMPLETION, {"prompt": ["a", "b"]}, "there are 2 prompts"),
        (COMPLETION, {"prompt": [[1], [2], [3]]}, "there are 3 prompts"),
        (COMPLETION, {"prompt": "x", "echo": True, "logprobs": 0}, ""),
        (COMPLETION, {"prompt": "x", "echo": True, "logprobs": 1}, "log-probabilities of the prompt"),
        (COMPLETION, {"prompt": "x", "max_tokens": 0}, "no token"),
        (CHAT, {"prompt_logprobs": 0}, "log-probabilities of the prompt"),
        (CHAT, {"use_beam_search": True}, "'use_beam_search'"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "'web_search'"),
        (CHAT, {"n": 1, "prompt_logprobs": None, "echo": False}, ""),
        (CHAT, {"n": "wrong", "echo": True}, ""),
        (COMPLETION, {"prompt": [1, 2, 3]}, ""),
        (COMPLETION, {"prompt": ["a"]}, ""),
        (RESPONSES, {"tools": [{"type": "function"}, {"type": "custom"}]}, ""),
        (RESPONSES, {"tools": "wrong"}, ""),
        (MESSAGES, {"tools": [{"name": "f"}]}, ""),
    ],
)  # fmt: skip
def test_what_one_cache_cannot_serve(route: Route, fields: Any, why: str) -> None:
    found = read(route, body(**fields)).alone
    assert bool(found) is bool(why)
    assert why in found


def chat_usage(cached: int | None = 0, prompt: int = 9) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached, "audio_tokens": 0}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": details,
    }


def meter(route: Route = CHAT, **fields: Any) -> Meter:
    return Meter(read(route, body(**fields)))


@pytest.mark.parametrize(
    ("decodes", "prefills", "told"), [(8, 5, 5), (None, 5, 5), (8, 0, 0), (8, 12, 9), (8, None, 8)]
)
def test_cached_tokens_are_prefills(decodes: int | None, prefills: int | None, told: int) -> None:
    reads = meter()
    answer = {"id": "x", "choices": [{"big": 10**30}], "usage": chat_usage(decodes), "model": "m"}
    out = json.loads(reads.body(json.dumps(answer).encode(), prefills))
    assert out["usage"]["prompt_tokens_details"]["cached_tokens"] == told
    assert {**out, "usage": 0} == {**answer, "usage": 0}
    usage = reads.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (9, 4, told)


def test_usage_of_the_other_routes() -> None:
    responses, inner = (
        meter(RESPONSES),
        {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 8}},
    )
    for answer, place in (({"id": "r", "usage": inner}, None), ({"response": {"usage": inner}}, "response")):
        out = json.loads(responses.body(json.dumps(answer).encode(), 3))
        assert (out[place] if place else out)["usage"] == {**inner, "input_tokens_details": {"cached_tokens": 3}}
    messages = meter(MESSAGES)
    start = {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 0}},
    }
    event = b"event: message_start\ndata: " + json.dumps(start).encode() + b"\n\n"
    head, data = messages.event(event, 3).split(b"\n")[:2]
    assert head == b"event: message_start"
    told = json.loads(data.removeprefix(b"data: "))["message"]["usage"]
    assert (told["input_tokens"], told["cache_read_input_tokens"]) == (6, 3)
    messages.event(b'data: {"type":"message_delta","usage":{"output_tokens":4}}\n\n', 3)
    for usage in (responses.usage, messages.usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (9, 4, 3)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_the_chunk_of_usage_goes_to_who_asked_for_it() -> None:
    last = event(choices=[], usage=chat_usage(8))
    silent, asked = meter(stream=True), meter(stream=True, stream_options={"include_usage": True})
    assert silent.event(last, 5) == b""
    assert json.loads(asked.event(last, 5)[6:])["usage"] == chat_usage(5)
    assert silent.usage == asked.usage is not None
    with_text = event(choices=[{"delta": {}}], usage=chat_usage(8))
    assert json.loads(silent.event(with_text, None)[6:]) == {"choices": [{"delta": {}}]}


@pytest.mark.parametrize(
    "odd", [b'data: {"usage": {"prompt_tokens": "x"}}\n\n', b'data: {"usage": {]\n\n', b'x "usage": {\n\n']
)
def test_what_is_no_usage_goes_on_as_it_came(odd: bytes) -> None:
    reads = meter(stream=True)
    assert reads.event(odd, 3) == odd
    assert reads.usage is None


PARTS = st.lists(
    st.sampled_from([b'data: {"choices":[1]}', b'data: {"usage":{"a":1}}', b'data: {"t":"\\"usage\\":{"}', b": ping", b"data: [DONE]"]),
    max_size=8,
)  # fmt: skip


@STEADY
@given(parts=PARTS, cuts=st.lists(st.integers(0, 300), max_size=8), tail=st.binary(max_size=3))
def test_a_stream_is_cut_at_its_events_ends(parts: list[bytes], cuts: list[int], tail: bytes) -> None:
    whole = b"".join(part + b"\n\n" for part in parts) + tail.replace(b"\n", b"")
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    cutter, pieces = Cutter(), []
    for begin, end in itertools.pairwise(places):
        pieces += cutter.push(whole[begin:end])
    rest = cutter.flush()
    assert b"".join(piece for piece, _ in pieces) + rest == whole
    assert all(piece.endswith(b"\n\n") for piece, _ in pieces)
    assert [piece for piece, has in pieces if has] == [
        part + b"\n\n" for part in parts if part.startswith(b'data: {"usage"')
    ]

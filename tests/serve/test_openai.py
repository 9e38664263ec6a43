"""What the API accepts, what it refuses, and how a refusal names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_rig import STEADY

from regauge.engines.local.sampling import SamplingParams
from regauge.serve.openai import ApiError, parse_chat, parse_completion

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": HELLO, **fields})


def completion(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "prompt": "hello", **fields})


def test_a_chat_with_every_known_field() -> None:
    ask = parse_chat(
        chat(
            max_completion_tokens=7,
            max_tokens=5,
            temperature=0.5,
            top_p=0.9,
            n=2,
            stop=["a", "b"],
            stream=True,
            stream_options={"include_usage": True},
            seed=3,
            presence_penalty=1,
            frequency_penalty=-1,
            logprobs=True,
            top_logprobs=4,
            top_k=9,
            min_p=0.1,
            ignore_eos=True,
            min_tokens=2,
            stop_token_ids=[1, 2],
            response_format={"type": "text"},
            tools=[],
            logit_bias={},
        )
    )
    assert (ask.chat, ask.n, ask.stream, ask.include_usage, ask.stops) == (True, 2, True, True, ("a", "b"))
    assert ask.max_tokens == 7, "the newer name of the two wins"
    assert ask.sampling_for(7, 0) == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=9,
        min_p=0.1,
        seed=3,
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=4,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        min_tokens=2,
    )


def test_null_is_the_same_as_leaving_out() -> None:
    names = [
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stop",
        "stream",
        "stream_options",
        "seed",
        "tools",
        "top_k",
    ]
    assert parse_chat(chat(**dict.fromkeys(names))) == parse_chat(chat())


def test_unknown_fields_are_ignored() -> None:
    ask = parse_chat(chat(brand_new={"deep": [1, 2]}, user="me", messages=[{**HELLO[0], "name": "bob"}]))
    assert ask == parse_chat(chat())


def test_each_choice_of_a_seeded_request_has_its_own_stream() -> None:
    ask = parse_chat(chat(n=2, seed=-1))
    assert [ask.sampling_for(5, choice).seed for choice in (0, 1)] == [2**64 - 1, 0]


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant"},
        {"role": "tool", "content": "t"},
    ]
    assert parse_chat(chat(messages=messages)).messages == (
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "t"},
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert parse_completion(completion(prompt=prompt)).prompts == prompts


IMAGE = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}]
EITHER = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"seed": 2**64}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"model": 5}, "model"),
]
CHAT_ONLY = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": IMAGE}, "messages[0].content[1].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]
COMPLETION_ONLY = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
    ({"prompt": None}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
]


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [("chat", *case) for case in EITHER + CHAT_ONLY] + [("completion", *case) for case in EITHER + COMPLETION_ONLY],
)
def test_a_refusal_names_the_field(route: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(chat(**fields)) if route == "chat" else parse_completion(completion(**fields))
    error = msgspec.json.decode(caught.value.body())["error"]
    assert caught.value.status == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]
    assert error["code"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": "m"', b"\xff", b'{"a":' + b"[" * 100_000, b'{"model":"m","prompt":"\\ud800"}'],
    ids=["empty", "open", "cut", "not UTF-8", "deep", "lone surrogate"],
)
def test_what_is_no_json_is_a_400(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError) as caught:
            parse(body)
        assert (caught.value.status, caught.value.error.code) == (400, "invalid_json")


@pytest.mark.parametrize("body", [b"[]", b"null", b"5"])
def test_what_is_no_object_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body"):
        parse_chat(body)


def test_missing_fields_are_named() -> None:
    for parse, field in ((parse_chat, "messages"), (parse_completion, "prompt")):
        with pytest.raises(ApiError) as caught:
            parse(b'{"model": "m"}')
        assert (caught.value.error.param, caught.value.error.code) == (field, "missing_required_parameter")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({name for fields, _ in EITHER + CHAT_ONLY + COMPLETION_ONLY for name in fields})


@STEADY
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_value_in_any_field_is_accepted_or_a_400(fields: dict[str, Any]) -> None:
    for parse, body in ((parse_chat, chat), (parse_completion, completion)):
        status = 200
        try:
            msgspec.json.encode(parse(body(**fields)).sampling_for(8, 0))
        except ApiError as error:
            status = error.status
        assert status in (200, 400)

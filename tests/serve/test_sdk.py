"""The OpenAI and Anthropic Python SDKs as clients of a real deployment: whole and streamed answers, usage, errors as their exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import anthropic
import openai
import pytest
from deployment import READY_S, Served, ready, until

from regauge.config import BUNDLED_MODEL

pytestmark = [pytest.mark.model, pytest.mark.process, pytest.mark.timeout(600)]
ASK = "Name three cities with a big railway station."
TOKENS = 16


@pytest.fixture(scope="module")
def base(served: Served) -> str:
    async def wait() -> None:
        async with aiohttp.ClientSession() as session:
            await until(lambda: ready(session, served), READY_S, "a ready endpoint")

    asyncio.run(wait())
    return served.url


@pytest.fixture
def gpt(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def claude(base: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_openai_chat(gpt: openai.OpenAI) -> None:
    assert [model.id for model in gpt.models.list()] == [gpt.models.retrieve(BUNDLED_MODEL).id] == [BUNDLED_MODEL]
    asked = {
        "model": BUNDLED_MODEL, "messages": [{"role": "user", "content": ASK}], "temperature": 0, "max_completion_tokens": TOKENS,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = gpt.chat.completions.create(**asked)
    [choice] = whole.choices
    usage = whole.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert choice.message.content
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert (usage.completion_tokens, usage.total_tokens) == (TOKENS, usage.prompt_tokens + TOKENS)
    assert choice.logprobs is not None
    assert [len(token.top_logprobs) for token in choice.logprobs.content or ()] == [2] * TOKENS
    assert "".join(token.token for token in choice.logprobs.content or ()) == choice.message.content
    with gpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert (text, chunks[-2].choices[0].finish_reason) == (choice.message.content, "length")
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (usage.prompt_tokens, TOKENS)


def test_openai_completions_and_stops(gpt: openai.OpenAI) -> None:
    asked = {"model": BUNDLED_MODEL, "temperature": 0, "max_tokens": TOKENS}
    plain = gpt.completions.create(prompt="The capital of France is", **asked)
    first, second = gpt.completions.create(prompt=["The capital of France is", "One, two,"], echo=True, **asked).choices
    assert first.text == "The capital of France is" + plain.choices[0].text
    assert second.text.startswith("One, two,")
    stop = plain.choices[0].text.split()[1]
    with gpt.completions.create(prompt="The capital of France is", stop=[stop], stream=True, **asked) as stream:
        chunks = list(stream)
    assert "".join(each.choices[0].text for each in chunks) == plain.choices[0].text.split(stop)[0]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_openai_several_answers(gpt: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": ASK}]
    asked = {"model": BUNDLED_MODEL, "messages": messages, "max_tokens": 8, "n": 2, "seed": 7, "temperature": 1.5}
    answer = gpt.chat.completions.create(**asked)
    assert len({choice.message.content for choice in answer.choices}) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_openai_errors_are_its_exceptions(gpt: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": ASK}]
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.chat.completions.create(model=BUNDLED_MODEL, messages=messages, temperature=3)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError, match="gpt-9") as missing:
        gpt.chat.completions.create(model="gpt-9", messages=messages, stream=True)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="the context holds") as long:
        gpt.chat.completions.create(model=BUNDLED_MODEL, messages=messages, max_tokens=10**6)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        gpt.chat.completions.create(
            model=BUNDLED_MODEL, messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    raw = gpt.with_options(default_headers={"X-Request-Id": "mine"}).models.with_raw_response.list()
    assert raw.headers["x-request-id"] == "mine"


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    asked = {
        "model": BUNDLED_MODEL, "messages": [{"role": "user", "content": ASK}], "system": "Answer briefly.",
        "extra_body": {"temperature": 0},
    }  # fmt: skip
    whole = claude.messages.create(max_tokens=TOKENS, **asked)
    [block] = whole.content
    assert block.type == "text"
    assert (whole.role, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "max_tokens", TOKENS)
    counted = claude.messages.count_tokens(**{name: asked[name] for name in ("model", "messages", "system")})
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    with claude.messages.stream(max_tokens=TOKENS, **asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert (final.content[0].model_dump()["text"], final.stop_reason) == (text, "max_tokens")
    total = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert (total, final.usage.output_tokens) == (counted.input_tokens, TOKENS)
    stop = block.text.split()[1]
    ended = claude.messages.create(max_tokens=TOKENS, stop_sequences=["qqq", stop], **asked)
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    assert ended.content[0].model_dump()["text"] == block.text.split(stop)[0]


def test_anthropic_errors_are_its_exceptions(claude: anthropic.Anthropic) -> None:
    asked = {"messages": [{"role": "user", "content": ASK}], "max_tokens": 4}
    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        claude.messages.create(model=BUNDLED_MODEL, extra_body={"temperature": 2}, **asked)
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert caught.value.request_id
    with pytest.raises(anthropic.NotFoundError, match="claude-9"):
        claude.messages.create(model="claude-9", **asked)
    with pytest.raises(anthropic.NotFoundError), claude.messages.stream(model="claude-9", **asked) as stream:
        stream.get_final_message()
    with pytest.raises(anthropic.BadRequestError, match="the context holds"):
        claude.messages.create(model=BUNDLED_MODEL, **{**asked, "max_tokens": 10**6})
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        claude.messages.create(model=BUNDLED_MODEL, tools=[{"name": "f", "input_schema": {"type": "object"}}], **asked)

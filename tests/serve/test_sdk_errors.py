"""What the SDKs make of failures that a real deployment shows too seldom: full houses, workers that fail, streams that break, keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from serve_rig import MODEL, WAIT_S, Rig, open_rig

from regauge.config import LimitsConfig
from regauge.serve import wire
from regauge.serve.tenants import Tenants, new_key
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}


@pytest.fixture
async def full(tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    """A gateway that takes one request at a time."""
    async with open_rig(tokenizer, limits=LimitsConfig(max_queue=1, request_timeout_s=WAIT_S)) as rig:
        yield rig


def gpt(rig: Rig, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=rig.base + "/v1", **{"api_key": "none", "max_retries": 0, **options})


def claude(rig: Rig, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=rig.base, **{"api_key": "none", "max_retries": 0, **options})


async def test_a_full_house_is_a_rate_limit(full: Rig) -> None:
    full.decode.hold = asyncio.Event()
    async with gpt(full) as one, claude(full) as other:
        running = asyncio.create_task(one.chat.completions.create(**ASK))
        await asyncio.wait_for(full.decode.arrivals.get(), WAIT_S)
        with pytest.raises(openai.RateLimitError) as caught:
            await one.chat.completions.create(**ASK)
        assert caught.value.response.headers["retry-after"]
        with pytest.raises(anthropic.RateLimitError):
            await other.messages.create(**ASK)
        full.decode.hold.set()
        assert (await running).choices[0].message.content


async def test_the_sdks_try_again_by_themselves(full: Rig) -> None:
    full.decode.hold = asyncio.Event()
    async with gpt(full, max_retries=3) as one, gpt(full) as other:
        running = asyncio.create_task(other.chat.completions.create(**ASK))
        await asyncio.wait_for(full.decode.arrivals.get(), WAIT_S)
        waiting = asyncio.create_task(one.chat.completions.create(**ASK))
        await full.until(lambda: full.sample("regauge_requests_total", route="/v1/chat/completions", status="429") > 0)
        full.decode.hold.set()
        assert (await running).choices[0].message.content == (await waiting).choices[0].message.content


async def test_a_worker_that_fails_is_a_server_error(full: Rig) -> None:
    full.decode.refuse = wire.ErrorEvent("engine_failed", "out of luck", "decode-0")
    async with gpt(full) as one, claude(full) as other:
        with pytest.raises(openai.InternalServerError, match="out of luck"):
            await one.completions.create(model=MODEL, prompt="hello")
        with pytest.raises(anthropic.InternalServerError, match="out of luck"):
            await other.messages.create(**ASK)


async def test_a_stream_that_breaks_is_an_error_and_not_an_end(full: Rig) -> None:
    full.decode.break_after = (3, wire.ErrorEvent("engine_failed", "out of luck", "decode-0"))
    async with gpt(full) as one, claude(full) as other:
        got = []
        stream = await one.chat.completions.create(**ASK, stream=True)
        with pytest.raises(openai.APIError, match="out of luck"):
            got.extend([chunk async for chunk in stream])
        events = await other.messages.create(**ASK, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="out of luck"):
            got.extend([event async for event in events])


async def test_a_wrong_key_is_an_authentication_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    key, digest = new_key()
    file = tmp_path / "tenants.toml"
    file.write_text(f'[tenant.acme]\nkeys = ["{digest}"]\n')
    async with open_rig(tokenizer, tenants=Tenants.load(file)) as rig:
        async with gpt(rig, api_key="wrong") as one, claude(rig, api_key="wrong") as other:
            with pytest.raises(openai.AuthenticationError) as caught:
                await one.chat.completions.create(**ASK)
            assert caught.value.code == "invalid_api_key"
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(**ASK)
        async with gpt(rig, api_key=key) as one, claude(rig, api_key=key) as other:
            assert (await one.chat.completions.create(**ASK)).choices[0].message.content
            assert (await other.messages.create(**ASK)).content


async def test_a_body_that_is_too_large(tokenizer: Tokenizer) -> None:
    limits = LimitsConfig(max_body_bytes=1_024, request_timeout_s=WAIT_S)
    long: Any = {**ASK, "messages": [{"role": "user", "content": "x" * 2_000}]}
    async with open_rig(tokenizer, limits=limits) as rig, gpt(rig) as one, claude(rig) as other:
        with pytest.raises(openai.APIStatusError) as caught:
            await one.chat.completions.create(**long)
        assert caught.value.status_code == 413
        with pytest.raises(anthropic.RequestTooLargeError):
            await other.messages.create(**long)

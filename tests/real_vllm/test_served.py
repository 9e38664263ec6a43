"""`regauge serve` with real vLLM servers: one endpoint, the same text as vLLM alone, whatever happens to prefill; and pairs with the embedded engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines import Engine, config
from regauge.testing.tiny_models import tiny_model
from served import ANSWER_S, READY_S, TOKENS, Served, Side, served

VLLM = ("--dtype=float32", "--enforce-eager", "--kv-cache-memory-bytes=64M")


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)  # a prompt
    return [rng.randrange(3, 500) for _ in range(tokens)]


def vllm(*args: str) -> Side:
    return Side("vllm", args=(*VLLM, *args))


@pytest.fixture(scope="module")
def llama() -> Path:
    return tiny_model("tiny-llama")


PROMPTS = [prompt(n, n) for n in (1, 32, 33, 128, 129, 1_000)]


@pytest.fixture(scope="module")
def alone(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What monolithic vLLM answers to PROMPTS."""
    engine = Engine(config(llama, block_size=32), tmp_path_factory.mktemp("alone") / "log")
    try:
        engine.wait("ready", limit_s=READY_S)
        return [engine.alone(ids, tokens=TOKENS) for ids in PROMPTS]
    finally:
        engine.end()


def test_one_endpoint_with_vllms_own_answers_whatever_becomes_of_prefill(
    llama: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    async def check(pair: Served) -> None:
        # A character that the answer's end cuts through vLLM leaves out; the gateway's own detokeniser gives U+FFFD.
        want = [pair.text(tokens).rstrip("\ufffd") for tokens in alone]
        assert await pair.answers(PROMPTS) == want
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            assert (await pair.get(session, "/version"))["verdict"] == {"path": "REMAP", "text": "page size 32 -> 128"}
            assert await pair.stream(session, "/v1/completions", prompt=PROMPTS[2]) == want[2]
            messages = [{"role": "user", "content": "hello"}]
            body = {
                "model": pair.name,
                "messages": messages,
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            async with session.post(f"{pair.base}/v1/chat/completions", json=body) as answer:
                assert answer.headers["x-regauge-path"] == "REMAP"
                whole = (await answer.json())["choices"][0]["message"]["content"]
            assert await pair.stream(session, "/v1/chat/completions", messages=messages) == whole
            answer = await pair.ask(session, PROMPTS[4], logprobs=2)
            assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == TOKENS
            # A client that goes away leaves nothing behind.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await pair.ask(session, prompt(77, 900), max_tokens=400)
            before = (await pair.get(session, "/debug/transfers"))["workers"]
            # Prefill dies under a request: decode computes the prompt itself.
            fresh = prompt(5, 1_000)
            (pid,) = [worker["state"]["pid"] for worker in before if worker["role"] == "prefill"]
            asking = asyncio.create_task(pair.ask(session, fresh))
            await asyncio.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
            begun = time.monotonic()
            got = (await asking)["choices"][0]["text"]
            assert time.monotonic() - begun < 60
            # The same prompt again, by whatever way there is now, and once prefill has been started again.
            assert (await pair.ask(session, fresh))["choices"][0]["text"] == got
            assert await pair.answers(PROMPTS) == want
            ready: Any = {}
            limit = time.monotonic() + READY_S
            while ready.get("status") != "ready":
                assert time.monotonic() < limit, ready
                await asyncio.sleep(0.5)
                ready = await pair.get(session, "/ready")
            new = prompt(6, 500)
            sent = (await pair.get(session, "/debug/transfers"))["workers"][1]["state"]["totals"]["delivered"]
            await pair.ask(session, new)
            after = (await pair.get(session, "/debug/transfers"))["workers"][1]["state"]["totals"]["delivered"]
            assert after == sent + 1

    with served(tmp_path, llama, vllm("--block-size=32"), vllm("--block-size=128")) as pair:
        asyncio.run(check(pair))


MIXED = {
    "vllm-local": (vllm("--block-size=32"), Side("local", "fp32,page=16,nhd")),
    "local-vllm": (Side("local", "fp32,page=16,nhd"), vllm("--block-size=128")),
}


@pytest.mark.parametrize("sides", MIXED.values(), ids=MIXED.keys())
def test_the_embedded_engine_on_the_other_side(
    sides: tuple[Side, Side], llama: Path, alone: list[list[int]], tmp_path: Path
) -> None:
    with served(tmp_path, llama, *sides) as pair:
        got = asyncio.run(pair.answers(PROMPTS))
    assert got == [pair.text(tokens) for tokens in alone]


def test_fp8_on_the_other_side_agrees_as_far_as_it_does(llama: Path, alone: list[list[int]], tmp_path: Path) -> None:
    """vLLM's CPU backend has no 8-bit cache: the embedded engine has."""
    with served(tmp_path, llama, vllm("--block-size=32"), Side("local", "fp8_e4m3,page=64,hnd")) as pair:
        got = asyncio.run(pair.answers(PROMPTS))
        want = [pair.text(tokens) for tokens in alone]
    common = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(y))
        for x, y in zip(got, want, strict=True)
    ]
    print(f"fp32 to fp8: characters in common {common} of {[len(text) for text in want]}")
    assert all(common)  # the first token is prefill's own

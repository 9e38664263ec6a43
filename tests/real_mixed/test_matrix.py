"""`regauge serve` with every engine on either side: the tokens are those of the prefill engine alone.

Where they are not, the first place that differs must be a tie: two tokens whose logits are closer than two engines' arithmetic is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

import aiohttp
import monoliths
import pytest
from monoliths import Answer
from sides import DECODE, PREFILL, SGLANG, VLLM, prompt

from regauge.testing.tiny_models import tiny_model
from served import ANSWER_S, TOKENS, Served, served

LENGTHS: Final = (1, 16, 17, 246, 1_000, 33, 64, 129)
TIE: Final = 1e-4
"""Logits in fp32 that are so close, another order of additions may take for the other way round."""
pytestmark = pytest.mark.timeout(900)


PROMPTS: Final = [prompt(n, n) for n in LENGTHS]


@pytest.fixture(scope="module")
def llama() -> Path:
    return tiny_model("tiny-llama")


@pytest.fixture(scope="module")
def alone(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Answer]]:
    """What an engine answers alone, asked once."""
    folder = tmp_path_factory.mktemp("alone")

    @lru_cache
    def of(engine: str) -> list[Answer]:
        if engine == "vllm":
            return monoliths.vllm(VLLM, llama, PROMPTS, TOKENS, folder / "vllm")
        if engine == "sglang":
            return monoliths.sglang(SGLANG, llama, PROMPTS, TOKENS, folder / "sglang")
        return monoliths.local(llama, PROMPTS, TOKENS)

    return of


def compare(pair: Served, got: list[str], want: list[Answer]) -> list[str]:
    """Return a line for each answer that parts from the prefill engine's own, at a tie; fail for one that parts elsewhere."""
    lines = []
    for length, text, (tokens, margins) in zip(LENGTHS, got, want, strict=True):
        if text == pair.text(tokens):
            continue
        at = next(i for i in range(len(tokens)) if not text.startswith(pair.text(tokens[: i + 1]).rstrip("�")))
        lines.append(f"prompt of {length}: token {at} differs, where two logits are {margins[at]:.2g} apart")
        assert margins[at] < TIE, lines[-1]
    return lines


async def asked(pair: Served) -> tuple[str, list[str], list[str], list[float | None]]:
    """Return the pair's path, the answers to PROMPTS at once, streamed one by one, and the margins of one answer.

    A margin is None where both tokens have the same text.
    """
    together = await pair.answers(PROMPTS)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
        streamed = [await pair.stream(session, "/v1/completions", prompt=ids) for ids in PROMPTS]
        given = (await pair.ask(session, PROMPTS[2], logprobs=2))["choices"][0]["logprobs"]
        only = await pair.ask(session, PROMPTS[2], max_tokens=1)
        assert only["choices"][0]["text"] == given["tokens"][0]
        path = (await pair.get(session, "/version"))["verdict"]["path"]
    assert len(given["token_logprobs"]) == len(given["top_logprobs"]) == TOKENS
    tops = [sorted(top.values(), reverse=True) for top in given["top_logprobs"]]
    for top, chosen in zip(tops, given["token_logprobs"], strict=True):
        assert len(top) < 2 or top[0] == pytest.approx(chosen, abs=1e-4)
    return path, together, streamed, [top[0] - top[1] if len(top) > 1 else None for top in tops]


@pytest.mark.parametrize("decode", DECODE)
@pytest.mark.parametrize("prefill", PREFILL)
def test_the_tokens_are_those_of_the_prefill_engine_alone(
    prefill: str, decode: str, llama: Path, alone: Callable[[str], list[Answer]], tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    want = alone(prefill)
    with served(tmp_path, llama, PREFILL[prefill], DECODE[decode]) as pair:
        path, together, streamed, margins = asyncio.run(asked(pair))
        lines = compare(pair, together, want) + compare(pair, streamed, want)
    record_property(
        "pair",
        f"{prefill:>6} -> {decode:6} {path:7} {2 * len(LENGTHS) - len(lines)} of {2 * len(LENGTHS)} answers equal",
    )
    for line in lines:
        record_property("parted", f"{prefill} -> {decode}: {line}")
    # The log-probabilities are the engines', the first token's too: whichever of the two has told it.
    pairs = [(got, own) for got, own in zip(margins, want[2][1], strict=True) if got is not None]
    assert len(pairs) > TOKENS // 2
    assert [got for got, _ in pairs] == pytest.approx([own for _, own in pairs], abs=1e-3)

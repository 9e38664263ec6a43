"""Engines that are short of blocks, and compute a prompt in chunks: right answers, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines import Pair, at_rest, empty, pair, prompt, settle
from regauge.testing.tiny_models import tiny_model

TOKENS = 640
"""That prefill has blocks for; decode has 1,024."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One block more is the null block."""
    prefill = {"block_size": 32, "num_gpu_blocks_override": TOKENS // 32 + 1, "long_prefill_token_threshold": 32}
    decode = {"block_size": 64, "num_gpu_blocks_override": 1_024 // 64 + 1}
    with pair(
        tiny_model("tiny-llama"), tmp_path_factory.mktemp("pair"), prefill, decode,
        max_num_batched_tokens=64, max_model_len=TOKENS,
    ) as made:  # fmt: skip
        yield made


def rest(both: Pair) -> None:
    settle(lambda: at_rest(both.prefill) and at_rest(both.decode))


def test_a_prompt_in_twenty_chunks(both: Pair) -> None:
    ids = prompt(1, 620)
    want = both.decode.alone(ids)
    before = both.decode.stats()["bytes_in"]
    assert both.through(ids)["tokens"] == want
    assert both.decode.stats()["bytes_in"] > before
    rest(both)


def test_a_prompt_that_prefill_preempts_is_computed_by_decode(both: Pair) -> None:
    """Both are admitted, and grow chunk by chunk until there is no block left: the later one has to go back."""
    prompts = [prompt(10 + i, 480) for i in range(2)]
    want = [both.decode.alone(ids) for ids in prompts]
    empty(both.prefill)
    before = both.prefill.stats()["preempted"]
    begun = [both.begin(ids) for ids in prompts]
    assert [both.decode.answer(d)["tokens"] for _, _, d in begun] == want
    for _, p, _ in begun:
        assert both.prefill.answer(p)["reason"] == "length"
    assert both.prefill.stats()["preempted"] > before
    rest(both)


def test_requests_that_decode_preempts_are_answered_as_if_alone(both: Pair) -> None:
    """Five prompts of three blocks each fit; with their answers they need five blocks each."""
    prompts = [prompt(20 + i, 150) for i in range(5)]
    want = [both.decode.alone(ids, tokens=150) for ids in prompts]
    empty(both.prefill)
    before = both.decode.stats()
    begun = [both.begin(ids, tokens=150) for ids in prompts]
    for _, p, _ in begun:
        both.prefill.answer(p)
    assert [both.decode.answer(d)["tokens"] for _, _, d in begun] == want
    after = both.decode.stats()
    assert after["preempted"] > before["preempted"]
    assert after["bytes_in"] > before["bytes_in"]
    rest(both)

"""The bundled real model, SmolLM2 135M, through a pair: the text of one server alone."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from sglang_servers import OURS, Server, Side, Site, pair, settle
from tokenizers import Tokenizer

from regauge.config import BUNDLED_MODEL, cache_dir
from regauge.engines.local.prepare import prepare

pytestmark = pytest.mark.timeout(1_200)
TOKENS = 24
PROMPTS = (
    "The capital of France is",
    "Q: A train leaves at 14:05 and arrives at 16:50. How long does it travel?\nA:",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nGive me three reasons to learn to cook.<|im_end|>\n<|im_start|>assistant\n",
    """Once upon a time there was a lighthouse keeper who collected clocks. Every evening he wound all of them, one after the other, and
every morning he noted which of them had stopped. One day a ship came whose captain had a clock that ran backwards. The keeper looked at
it for a long time, and then he said:""",
)


def test_the_text_is_that_of_one_server(tmp_path: Path) -> None:
    model = prepare(BUNDLED_MODEL, cache_dir())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    with Server(model, tmp_path / "alone.log", Side()) as one:
        one.ready()
        wanted = [one.generate(ids, TOKENS).ids for ids in prompts]
    assert [len(ids) for ids in wanted] == [TOKENS] * len(prompts)
    with ExitStack() as stack:
        both = stack.enter_context(pair(Site(model, tmp_path, OURS), Side(), Side(page=64)))
        both.ready()
        begun = [both.begin(ids, TOKENS, stream=n % 2 == 1) for n, ids in enumerate(prompts)]
        answers = [decode.result() for _, decode in begun]
        assert all(prefill.result().good for prefill, _ in begun)
        assert ([answer.ids for answer in answers], [answer.error for answer in answers]) == (
            wanted,
            [""] * len(wanted),
        )
        settle(both.at_rest)
    for text, ids in zip(PROMPTS, wanted, strict=True):
        print(f"\n{text[-40:]!r} -> {tokenizer.decode(ids)!r}")

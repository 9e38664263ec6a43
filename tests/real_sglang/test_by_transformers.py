"""The rule that tells rounding from wrong KV: it lets pass what differs by rounding, and nothing else."""

from __future__ import annotations

import pytest
import torch
from by_transformers import HandOver, Reference, load
from sglang_client import prompt

from regauge.testing.tiny_models import tiny_model

PROMPTS = [prompt(n, 33 + 15 * n) for n in range(6)]
TOKENS = 12
PAGE = 16


class HeadsExchanged(HandOver):
    def hand(self, kept: torch.Tensor) -> torch.Tensor:
        return super().hand(kept.roll(1, dims=1))


class PageLost(HandOver):
    def hand(self, kept: torch.Tensor) -> torch.Tensor:
        return super().hand(torch.cat([torch.zeros_like(kept[:, :, :PAGE]), kept[:, :, PAGE:]], 2))


class LastTokenWrong(HandOver):
    def hand(self, kept: torch.Tensor) -> torch.Tensor:
        return super().hand(torch.cat([kept[:, :, :-1], kept[:, :, :1]], 2))


class TakenForTheOtherDtype(HandOver):
    """The bytes as they are, as SGLang's own backend moves them: half of them, or twice as many."""

    def hand(self, kept: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros(kept.numel(), dtype=self.decode.dtype).view(torch.uint8)
        sent = kept.transpose(1, 2).contiguous().flatten().view(torch.uint8)[: len(memory)]
        memory[: len(sent)] = sent
        taken = memory.view(self.decode.dtype).nan_to_num(0.0, 1e4, -1e4).clamp(-1e4, 1e4)
        return taken.view(kept.transpose(1, 2).shape).transpose(1, 2)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_rounding_passes_and_wrong_kv_does_not(dtypes: tuple[str, str]) -> None:
    one, two = (load(tiny_model("tiny-llama"), dtype) for dtype in dtypes)
    reference = Reference(one, two, PROMPTS, TOKENS)
    assert reference.judge(reference.best).short == 0
    for alone in (one, two):
        assert reference.judge([HandOver(alone, alone).says(ids, TOKENS) for ids in PROMPTS]).right
    for wrong in (HeadsExchanged, PageLost, LastTokenWrong, TakenForTheOtherDtype):
        verdict = reference.judge([wrong(one, two).says(ids, TOKENS) for ids in PROMPTS])
        print(f"\n{wrong.__name__}: {verdict}")
        assert not verdict.right
        assert verdict.short > 3 * verdict.margin  # far from where the rule draws its line

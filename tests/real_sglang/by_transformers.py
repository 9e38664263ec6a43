"""What transformers answers, greedy: alone, and with its KV handed over from a model in one dtype to the same in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # as the servers: two threads on two busy cores wait for each other


def load(model: Path, dtype: str) -> transformers.PreTrainedModel:
    """Return the model in a dtype of torch's by its name."""
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))


@dataclass(frozen=True)
class HandOver:
    """One model computes a prompt, what it keeps is cast, and another one goes on with that; the same one twice: alone."""

    prefill: transformers.PreTrainedModel
    decode: transformers.PreTrainedModel

    def hand(self, kept: torch.Tensor) -> torch.Tensor:
        """Return what becomes of keys or values, [1, heads, tokens, dim]."""
        return kept.to(self.decode.dtype)

    def _begin(self, ids: Sequence[int]) -> tuple[torch.Tensor, transformers.DynamicCache]:
        came = self.prefill(torch.tensor([ids]), use_cache=True)
        cache = transformers.DynamicCache()
        for number, layer in enumerate(came.past_key_values.layers):
            cache.update(self.hand(layer.keys), self.hand(layer.values), number)
        return came.logits[0, -1], cache

    def says(self, ids: Sequence[int], tokens: int) -> list[int]:
        """Return what comes after the prompt."""
        with torch.inference_mode():
            first, cache = self._begin(ids)
            out = [int(first.argmax())]
            while len(out) < tokens:
                came = self.decode(torch.tensor([out[-1:]]), past_key_values=cache, use_cache=True)
                out.append(int(came.logits[0, -1].argmax()))
        return out

    def short(self, ids: Sequence[int], said: Sequence[int]) -> list[float]:
        """Return by how much each token said falls short of the best one, given those before it; in logits, 0 for the best one itself."""
        with torch.inference_mode():
            first, cache = self._begin(ids)
            came = self.decode(torch.tensor([said[:-1]]), past_key_values=cache, use_cache=True)
            logits = torch.cat([first[None].float(), came.logits[0].float()])
            return (logits.amax(-1) - logits[torch.arange(len(said)), torch.tensor(said)]).tolist()


@dataclass(frozen=True)
class Verdict:
    """On answers to some prompts. The first token of each is prefill's own: it says nothing of what was handed over, and is left out."""

    best: int
    """Tokens that transformers would have said, too, after those before them."""
    of: int
    same: int
    """Answers that are transformers', token for token."""
    answers: int
    short: float
    """The most that a token falls short of the best one, in logits."""
    margin: float
    """That much is rounding."""

    @property
    def right(self) -> bool:
        """Nothing was said that rounding does not explain."""
        return self.answers > 0 and self.short <= self.margin

    def __str__(self) -> str:
        return (
            f"after transformers' own KV, cast, {self.best} of {self.of} tokens are the best ones, no other falls short of it by more "
            f"than {self.short:.2g} logits (rounding: {self.margin:.2g}); {self.same} of {self.answers} answers are the same"
        )


@dataclass(frozen=True)
class Reference:
    """What a hand-over between two dtypes can come to at best: the text of transformers with its own KV cast.

    Another program rounds elsewhere, and where two tokens are next to equal it may say the other one, and something else from then on.
    So each token is judged by itself, given those before it: it may fall short of the best one by a margin. How far rounding goes is
    seen in the same run: what each of the two models says alone differs from the hand-over by rounding only, so what it says is judged
    like an answer, and the margin is the most that any of its tokens falls short.
    """

    prefill: transformers.PreTrainedModel
    decode: transformers.PreTrainedModel
    prompts: Sequence[Sequence[int]]
    tokens: int

    @property
    def _both(self) -> HandOver:
        return HandOver(self.prefill, self.decode)

    @cached_property
    def best(self) -> list[list[int]]:
        """Its answers."""
        return [self._both.says(ids, self.tokens) for ids in self.prompts]

    @cached_property
    def margin(self) -> float:
        """In logits."""
        alone = [HandOver(model, model) for model in (self.prefill, self.decode)]
        texts = [(ids, one.says(ids, self.tokens)) for one in alone for ids in self.prompts]
        return max(max(self._both.short(ids, said)[1:]) for ids, said in texts)

    def judge(self, answers: Sequence[Sequence[int]]) -> Verdict:
        """Compare an answer to every prompt."""
        short = [x for ids, said in zip(self.prompts, answers, strict=True) for x in self._both.short(ids, said)[1:]]
        same = sum(list(a) == b for a, b in zip(answers, self.best, strict=True))
        return Verdict(short.count(0.0), len(short), same, len(answers), max(short), self.margin)

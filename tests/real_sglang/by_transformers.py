"""What transformers answers, greedy: alone, and with its KV handed over from a model in one dtype to the same in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from sglang_client import common

transformers.utils.logging.disable_progress_bar()


def load(model: Path, dtype: str) -> transformers.PreTrainedModel:
    """Return the model in a dtype of torch's by its name."""
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))


def handed_over(
    prefill: transformers.PreTrainedModel, decode: transformers.PreTrainedModel, ids: Sequence[int], tokens: int
) -> list[int]:
    """Compute the prompt with one, cast what it keeps, and go on with the other; the same one twice: alone."""
    with torch.inference_mode():
        came = prefill(torch.tensor([ids]), use_cache=True)
        cache = transformers.DynamicCache()
        for number, layer in enumerate(came.past_key_values.layers):
            cache.update(layer.keys.to(decode.dtype), layer.values.to(decode.dtype), number)
        out = [int(came.logits[0, -1].argmax())]
        while len(out) < tokens:
            came = decode(torch.tensor([out[-1:]]), past_key_values=cache, use_cache=True)
            out.append(int(came.logits[0, -1].argmax()))
    return out


def agreeing(came: Sequence[Sequence[int]], control: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return how many tokens behind the first of each came as the control has them, until one did not, and of how many.

    The first is prefill's own: it says nothing of what was handed over.
    """
    pairs = [(common(ids, wanted), len(wanted)) for ids, wanted in zip(came, control, strict=True)]
    return sum(max(0, got - 1) for got, _ in pairs), sum(max(0, of - 1) for _, of in pairs)


def both_say(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the first tokens on which two agree, for each prompt: rounding has not changed the text yet."""
    return [list(x[: common(x, y)]) for x, y in zip(a, b, strict=True)]

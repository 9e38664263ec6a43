"""Small models with random weights, the same on every machine: what engines are tried with where no checkpoint is at hand.

    python -m regauge.testing.tiny_models [FOLDER [NAME ...]]

Each is a Hugging Face folder with a tokenizer of its own, which an engine loads as it loads a real one. Weights are drawn by
numpy from a seed of the parameter's name, so that they do not depend on the versions of torch and transformers. They are drawn
wide enough that greedy answers wander: with the usual 0.02 a model repeats one token, whatever its cache holds.

| name | what it keeps | where it is from |
|---|---|---|
| `tiny-llama` | K and V of 4 heads of 32 in 4 layers | Llama |
| `tiny-gemma3` | K and V of 2 heads of 32; layers 2 and 5 whole, the other four the last 128 tokens | Gemma 3, text only |
| `tiny-mla` | latents of 512 + 64 in 3 layers: vLLM's CPU kernel takes no other size | DeepSeek-V2, dense |
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from regauge.config import cache_dir
from regauge.errors import EngineError

VOCABULARY: Final = 512
_BYTES: Final = 256
_SPECIAL: Final = ("<pad>", "<bos>", "<eos>")
_LETTERS: Final = "etaoinshrdlucmfw"
_CHAT: Final = (
    "{{ '<bos>' }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_FORMAT: Final = 2
"""Counts changes of what is written, so that folders of an older one are made anew."""
_STAMP: Final = "regauge-tiny.json"
_COMMON: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
)


def _llama(transformers: Any) -> Any:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON, **shape))


def _gemma3(transformers: Any) -> Any:
    shape = {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_COMMON, **shape))


def _mla(transformers: Any) -> Any:
    shape = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 3,
        "n_group": 1,
        "topk_group": 1,
        # As the real ones have it; vLLM 0.32's CPU operation for RoPE without scaling rotates MLA's strided views wrongly.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**_COMMON, **shape))


_Make = Callable[[Any], Any]
MODELS: Final[Mapping[str, tuple[_Make, float]]] = MappingProxyType(
    {"tiny-llama": (_llama, 0.2), "tiny-gemma3": (_gemma3, 0.2), "tiny-mla": (_mla, 0.1)}
)
"""Name -> what builds the model of the transformers package, and the standard deviation of its weights."""


class Stamp(msgspec.Struct, frozen=True):
    """What a folder was made by."""

    name: str
    format: int


def tiny_model(name: str, folder: Path | None = None) -> Path:
    """Return the folder of the model, made at first use; under `folder`, default: the cache's `tiny`.

    Safe to call in several processes at once. Raises EngineError for a name that is not in MODELS.
    """
    if name not in MODELS:
        raise EngineError(f"no tiny model {name!r}; there are {', '.join(MODELS)}")
    under = folder or cache_dir() / "tiny"
    target, stamp = under / name, Stamp(name, _FORMAT)
    if _made_as(target, stamp):
        return target
    under.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=under, prefix=f".{name}.") as working:
        made = Path(working) / "made"
        _write(name, made)
        (made / _STAMP).write_bytes(msgspec.json.encode(stamp))
        if target.exists() and not _made_as(target, stamp):
            shutil.rmtree(target, ignore_errors=True)
        try:
            made.rename(target)
        except OSError:  # another process was first: what it made is the same
            if not _made_as(target, stamp):
                raise
    return target


def _made_as(folder: Path, stamp: Stamp) -> bool:
    try:
        return msgspec.json.decode((folder / _STAMP).read_bytes(), type=Stamp) == stamp
    except (FileNotFoundError, msgspec.DecodeError):
        return False


def _write(name: str, folder: Path) -> None:
    import torch
    import transformers

    make, deviation = MODELS[name]
    model = make(transformers).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:  # norms and biases stay as they begin
                seed = int.from_bytes(hashlib.sha256(f"{name}:{key}".encode()).digest()[:8], "little")
                drawn = np.random.default_rng(seed).standard_normal(tuple(parameter.shape), dtype=np.float32)
                parameter.copy_(torch.from_numpy(drawn * np.float32(deviation)))
    model.save_pretrained(folder)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with as many tokens as the model has: bytes, then pairs of letters, then a few syllables more."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(a, b) for a in _LETTERS for b in _LETTERS if a != b][: VOCABULARY - len(tokens)]
    tokens += [a + b for a, b in pairs]
    tokens += [f"<extra_{i}>" for i in range(VOCABULARY - len(tokens))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": _CHAT,
        "model_max_length": _COMMON["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def main(arguments: list[str]) -> None:
    """Make the models named, or all, and print their folders."""
    folder = Path(arguments[0]) if arguments else None
    for name in arguments[1:] or MODELS:
        print(tiny_model(name, folder))


if __name__ == "__main__":
    main(sys.argv[1:])

"""A transformers model that computes many requests' tokens in one pass over a paged KV store.

All tokens of a step, decoded ones and prompt chunks together, form one sequence, so that the linear layers see
one large matrix. Attention alone looks at each request's segment: it writes the segment's keys and values to the
store, reads back all of that request's, and attends to those. What a request's attention computes therefore
never depends on who shares the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from regauge.errors import EngineError

_ATTENTION: Final = "regauge"
_REFUSED: Final = {
    "kv_lora_rank": "multi-head latent attention",
    "attn_logit_softcapping": "capped attention scores",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share a KV cache",
    "alibi": "ALiBi positions",
}
"""Fields of config.json that, when set, mean attention which `_attend` does not compute."""
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's part of a step: `count` new tokens after the `start` tokens that the pool holds."""

    request_id: str
    pages: npt.NDArray[np.int64]
    """Page table: page number of the request's first `page_size` tokens, of its next, and so on."""
    start: int
    count: int


class KVStore(Protocol):
    """Where keys and values lie. All tensors have the model's compute dtype."""

    @property
    def page_size(self) -> int:
        """Tokens in one page."""

    def begin(self, segments: Sequence[Segment]) -> None:
        """Prepare for a step; called once, before its first layer."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the new tokens of all segments, in order: `k` and `v` are [tokens, kv_heads, head_dim]."""

    def read(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values of segment `index`, old and new: [kv_heads, start + count, head_dim].

        They are valid until the next call.
        """


@dataclass(slots=True)
class _Step:
    """What `_attend` needs; travels through transformers' forward as a keyword argument."""

    segments: Sequence[Segment]
    store: KVStore
    on_layer: Callable[[int], None] | None
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    layers_done: int = 0

    def mask(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return segment `index`'s additive causal mask, [count, start + count]; the same for all layers."""
        if index not in self.masks:
            start, count = self.segments[index].start, self.segments[index].count
            mask = torch.full((count, start + count), float("-inf"), dtype=like.dtype, device=like.device)
            self.masks[index] = mask.triu_(start + 1)
        return self.masks[index]


class LocalModel:
    """A decoder-only model in a Hugging Face folder.

    `threads` is the number of CPU threads of this process's arithmetic (0: half of the cores, at least one).
    Raises EngineError when the folder cannot be loaded or its attention is of another kind than full
    multi-head or grouped-query attention; the message names the field.
    """

    def __init__(self, folder: Path, threads: int = 0, dtype: torch.dtype = torch.float32) -> None:
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 2) // 2))
        AttentionInterface.register(_ATTENTION, _attend)
        try:
            self._config = _checked(AutoConfig.from_pretrained(folder, local_files_only=True), folder)
            self._model = _load(folder, dtype)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise EngineError(f"model folder {folder} cannot be loaded: {error}") from error
        if not getattr(self._model, "_supports_attention_backend", False):
            raise EngineError(
                f"model folder {folder}: {type(self._model).__name__} does not use transformers' attention "
                "interface; choose a model such as Llama, Qwen or Mistral"
            )
        self.dtype = dtype
        self.num_layers = int(self._config.num_hidden_layers)
        heads = int(self._config.num_attention_heads)
        self.kv_heads = int(getattr(self._config, "num_key_value_heads", None) or heads)
        self.head_dim = int(getattr(self._config, "head_dim", None) or self._config.hidden_size // heads)
        self.vocab = int(self._config.vocab_size)
        self.max_context = int(self._config.max_position_embeddings)
        self.eos_ids = _eos_ids(self._config, self._model.generation_config)

    def forward(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.int64],
        segments: Sequence[Segment],
        store: KVStore,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Compute one step; return the logits after each segment's last token, [segments, vocab] float32.

        `token_ids` are the new tokens of all segments, in order. `on_layer(layer)` is called as soon as a
        layer's keys and values of all segments are in the store, while later layers are still to come.
        Raises EngineError when the tokens do not fit the segments or a layer does not reach the store.
        """
        counts = np.array([segment.count for segment in segments], dtype=np.int64)
        if len(counts) == 0 or counts.min() < 1 or counts.sum() != len(token_ids):
            raise EngineError(f"{len(token_ids)} tokens do not fill segments of {counts.tolist()} tokens")
        step = _Step(segments, store, on_layer)
        positions = np.concatenate([np.arange(s.start, s.start + s.count, dtype=np.int64) for s in segments])
        store.begin(segments)
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.from_numpy(np.asarray(token_ids, dtype=np.int64))[None],
                position_ids=torch.from_numpy(positions)[None],
                use_cache=False,
                logits_to_keep=torch.from_numpy(np.cumsum(counts) - 1),
                regauge_step=step,
            )
            if step.layers_done != self.num_layers:
                raise EngineError(f"{step.layers_done} of {self.num_layers} layers reached the KV store")
            return output.logits[0].float()


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    regauge_step: _Step,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, segment by segment; the signature is that of transformers' attention functions.

    `query` is [1, heads, tokens, head_dim], `key` and `value` [1, kv_heads, tokens, head_dim]; returns
    [1, tokens, heads, head_dim].
    """
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise EngineError(f"the model's attention uses {name}, which the local engine does not compute")
    layer = int(module.layer_idx)
    step = regauge_step
    step.store.write(layer, key[0].transpose(0, 1).contiguous(), value[0].transpose(0, 1).contiguous())
    step.layers_done += 1
    if step.on_layer is not None:
        step.on_layer(layer)
    heads, kv_heads = query.shape[1], key.shape[1]
    output = torch.empty((query.shape[2], heads, value.shape[3]), dtype=query.dtype, device=query.device)
    offset = 0
    for index, segment in enumerate(step.segments):
        k, v = step.store.read(layer, index)
        own = query[0, :, offset : offset + segment.count].unflatten(0, (kv_heads, -1))
        place = output[offset : offset + segment.count]
        if segment.count == 1:
            # The heads of a group stand as queries side by side, so that their keys are read once.
            attended = scaled_dot_product_attention(own.transpose(1, 2), k[:, None], v[:, None], scale=scaling)
            place.copy_(attended.reshape(1, heads, -1))
        else:
            # KV heads as the batch, a group as heads: keys are shared by a stride of 0 instead of copied.
            attended = scaled_dot_product_attention(
                own,
                k[:, None].expand(-1, own.shape[1], -1, -1),
                v[:, None].expand(-1, own.shape[1], -1, -1),
                attn_mask=step.mask(index, own) if segment.start else None,
                is_causal=segment.start == 0,
                scale=scaling,
            )
            place.copy_(attended.flatten(0, 1).transpose(0, 1))
        offset += segment.count
    return output[None], None


def _load(folder: Path, dtype: torch.dtype) -> Any:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=_ATTENTION, local_files_only=True, use_safetensors=True
        )
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    return model.eval().requires_grad_(False)


def _checked(outer: Any, folder: Path) -> Any:
    """Return the text model's configuration, or raise EngineError that names a field it cannot serve."""
    config = outer.get_text_config()
    clashes = [f"{name} (= {what})" for name, what in _REFUSED.items() if getattr(config, name, None)]
    if getattr(outer, "is_encoder_decoder", False):
        clashes.append("is_encoder_decoder")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if kinds:
        clashes.append(f"layer_types (= {', '.join(sorted(kinds))})")
    elif window is not None and window < config.max_position_embeddings:
        clashes.append(f"sliding_window (= {window} tokens)")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        clashes.append(f"rope_parameters.rope_type (= {rope['rope_type']}: depends on the longest request)")
    if clashes:
        raise EngineError(
            f"model folder {folder}: config.json sets {'; '.join(clashes)}; the local engine computes full "
            "multi-head and grouped-query attention only"
        )
    return config


def _eos_ids(config: Any, generation_config: Any) -> frozenset[int]:
    ids: set[int] = set()
    for source in (config, generation_config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return frozenset(ids)

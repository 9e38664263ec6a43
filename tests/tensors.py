"""Small models of every kind; where a layout says that elements lie, to compare with tensors of the shapes that engines allocate."""

from __future__ import annotations

import numpy as np

from regauge.layout.models import model_from_config
from regauge.layout.spec import Group
from regauge.layout.view import Int64, View, component_view, scale_view

MLA = {"num_hidden_layers": 2, "num_attention_heads": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_theta": 1e4}
DENSE = model_from_config(MLA, name="dense")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 1e4}
WINDOW = model_from_config(
    {**HEADS, "num_hidden_layers": 7, "sliding_window": 8, "layer_types":
     ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}, name="window")  # fmt: skip
UNROTATED = model_from_config(
    {**HEADS, "head_dim": 16, "num_hidden_layers": 4, "no_rope_layer_interval": 4}, name="unrotated"
)
GATED = {**HEADS, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_num_value_heads": 4,
         "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}  # fmt: skip
QWEN = model_from_config({**GATED, "num_hidden_layers": 4}, name="qwen")
KIMI = model_from_config(
    {"num_hidden_layers": 4, "num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "mla_use_nope": True,
     "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 8,
                            "short_conv_kernel_size": 4}}, name="kimi")  # fmt: skip
SPARSE = model_from_config({**MLA, "num_hidden_layers": 4, "index_head_dim": 128, "index_topk_freq": 2}, name="sparse")


def where(group: Group, name: str) -> Int64:
    """Byte offset of each element of a component in its region, int64[layers, pages, tokens, heads, dim]."""
    return _offsets(group, component_view(group, group.component(name)))


def where_scales(group: Group, name: str) -> Int64:
    """The same of a component's stored scales."""
    return _offsets(group, scale_view(group, group.component(name)))


def regions(group: Group, name: str) -> tuple[str, ...]:
    """Region of each layer of a component."""
    region = group.component(name).at.region
    return tuple(region.replace("{layer}", str(layer)) for layer in group.layer_ids)


def _offsets(group: Group, view: View) -> Int64:
    layers = np.arange(len(group.layer_ids)) * view.layer_stride
    pages = np.arange(max(group.pages, 1)) * view.page_stride
    inner = view.token[:, None, None] + view.head[:, None] + view.dim
    out: Int64 = view.offset + layers[:, None, None, None, None] + pages[:, None, None, None] + inner
    return out


def counted(*shape: int, itemsize: int = 1) -> Int64:
    """A tensor of that shape that holds each element's own byte offset."""
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape) * itemsize

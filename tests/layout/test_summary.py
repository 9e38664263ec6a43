"""Bytes of each group."""

from __future__ import annotations

from regauge.layout.engines import Flags, engine_layout
from regauge.layout.models import attention_model, model_from_config
from regauge.layout.presets import from_short
from regauge.layout.spec import Array
from regauge.layout.summary import GroupBytes, summarize

HYBRID = model_from_config(
    {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 4,
     "linear_num_value_heads": 2, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3, "full_attention_interval": 2},
    name="hybrid")  # fmt: skip


def test_a_symbolic_layout_has_bytes_too() -> None:
    (group,) = summarize(from_short("fp8,page=4,scale=token_head,fused", attention_model("m", 3, Array(2, 8))))
    token = 3 * 2 * 2 * (8 + 4)
    assert group == GroupBytes("attention", "0-2", 4, token, 4 * token, 4 * token)
    assert group.text() == "attention, layers 0-2: 144 bytes per token, 576 bytes per page of 4"


def test_padding_counts_apart() -> None:
    flags = Flags(pool="BLNHC", model_dtype="bfloat16", ssm_dtype="float32")
    recurrent, attention = summarize(engine_layout("vllm", HYBRID, flags))
    state = 2 * 3 * 2 * 4 * 2 + 2 * 16 * 4  # two past inputs of q, k and v in two heads of 4; 4 x 4 floats in two heads
    assert (recurrent.bytes_per_token, attention.bytes_per_token) == (state, 64)
    assert recurrent.memory_per_page == attention.memory_per_page == attention.bytes_per_page == 16 * 64
    assert recurrent.text() == f"recurrent, layers 0: {state} bytes per request, 1024 with padding"

"""From a config.json to what each layer keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regauge.errors import PresetError
from regauge.layout.config import shipped_models
from regauge.layout.models import (
    attention_model,
    load_described,
    load_model,
    model_from_config,
)
from regauge.layout.spec import Array, Model, Rope, State

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
}


def states(config: dict[str, Any]) -> list[State]:
    return model_from_config(config, name="m").states


def test_a_config_gives_the_geometry() -> None:
    assert model_from_config(CONFIG, name="m") == attention_model("m", 2, Array(2, 8), rope=Rope(1e4, 8))
    old = {**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {k: v for k, v in CONFIG.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}  # fmt: skip
    assert states(old) == states(new)
    assert states(old)[0].rope == Rope(1e4, 8, scaling='{"factor": 2.0, "rope_type": "linear"}')
    assert states({"text_config": CONFIG})[0].arrays["k"].heads == 2
    assert states({**CONFIG, "partial_rotary_factor": 0.5})[0].rope == Rope(1e4, 4)
    assert states({**CONFIG, "rotary_dim": 6})[0].rope == Rope(1e4, 6)  # as MiniMax writes it
    assert states({**CONFIG, "rope_interleave": True})[0].rope == Rope(1e4, 8, interleaved=True)
    without = {k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "rope_theta")}
    assert model_from_config(without, name="m") == attention_model("m", 2, Array(8, 8))
    assert states({**CONFIG, "v_head_dim": 4})[0].arrays == {"k": Array(2, 8), "v": Array(2, 4)}


def test_layers_whose_keys_are_not_rotated_are_a_state_of_their_own() -> None:
    layers = {**CONFIG, "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}
    assert [(s.layers, s.rope is None) for s in states(layers)] == [("0-2,4", False), ("3", True)]
    every_other = {**CONFIG, "num_hidden_layers": 4, "no_rope_layer_interval": 2}
    assert [(s.layers, s.rope is None) for s in states(every_other)] == [("0,2", False), ("1,3", True)]


@pytest.mark.parametrize(
    ("change", "window", "full"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 3}, "0-4:2", "1-5:2"),
        ({"sliding_window_pattern": 3}, "0-1,3-4", "2,5"),
        ({"model_type": "gemma3_text"}, "0-4", "5"),
        ({"model_type": "gpt_oss"}, "0-4:2", "1-5:2"),
        ({"model_type": "mistral"}, "0-5", ""),
        ({"use_sliding_window": True, "max_window_layers": 4}, "4-5", "0-3"),
        ({"use_sliding_window": False}, "", "0-5"),
    ],
)
def test_which_layers_have_the_window(change: dict[str, Any], window: str, full: str) -> None:
    made = states({**CONFIG, "num_hidden_layers": 6, "sliding_window": 16, **change})
    assert {s.kind: s.layers for s in made} == {k: v for k, v in (("window", window), ("attention", full)) if v}
    assert {s.window for s in made if s.kind == "window"} <= {16}


def test_window_layers_may_rotate_otherwise() -> None:
    """Gemma 3: base 10,000 and no scaling where the window is, 1,000,000 and linear scaling elsewhere."""
    old = {**CONFIG, "num_hidden_layers": 6, "sliding_window": 16, "sliding_window_pattern": 6, "rope_theta": 1e6,
           "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    new = {**CONFIG, "num_hidden_layers": 6, "sliding_window": 16, "sliding_window_pattern": 6, "rope_parameters": {
        "full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}  # fmt: skip
    assert states(old) == states(new)
    assert {s.kind: s.rope for s in states(old)} == {
        "window": Rope(1e4, 8), "attention": Rope(1e6, 8, scaling='{"factor": 8.0, "rope_type": "linear"}')}  # fmt: skip


MLA = {**CONFIG, "num_hidden_layers": 7, "kv_lora_rank": 32, "qk_rope_head_dim": 4}


def test_latents_and_indexer_keys() -> None:
    latent = State("latent", "0-6", {"latent": Array(1, 32), "rope": Array(1, 4)}, rope=Rope(1e4, 4, interleaved=True))
    assert states(MLA) == [latent]
    assert states({**MLA, "rope_interleave": False})[0].rope == Rope(1e4, 4)
    assert states({**MLA, "qk_rope_head_dim": 0}) == [State("latent", "0-6", {"latent": Array(1, 32)})]
    assert states({**MLA, "mla_use_nope": True})[0].rope is None
    sparse = {**MLA, "index_head_dim": 16}
    assert states(sparse) == [latent, State("indexer", "0-6", {"index_k": Array(1, 16)}, rope=Rope(1e4, 4))]
    assert states({**sparse, "indexer_rope_interleave": True})[1].rope == Rope(1e4, 4, interleaved=True)
    for schedule in (
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},  # as GLM-5.2 writes it
        {"index_topk_pattern": "FFFSSSF"},
        {"indexer_types": ["full"] * 3 + ["shared"] * 3 + ["full"]},
    ):
        assert states({**sparse, **schedule})[1].layers == "0-2,6"


def test_delta_nets() -> None:
    gated = {**CONFIG, "num_hidden_layers": 5, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_num_value_heads": 6,
             "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}  # fmt: skip
    arrays = {"conv_q": Array(2, 12), "conv_k": Array(2, 12), "conv_v": Array(6, 24), "ssm_state": Array(6, 32)}
    assert [(s.kind, s.layers) for s in states(gated)] == [("recurrent", "0-2,4"), ("attention", "3")]
    assert states(gated)[0].arrays == arrays
    assert states({**gated, "full_attention_interval": 2})[0].layers == "0-4:2"
    kimi = {**MLA, "num_hidden_layers": 3, "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 3}}  # fmt: skip
    assert [(s.kind, s.layers) for s in states(kimi)] == [("recurrent", "0,2"), ("latent", "1")]
    assert states(kimi)[0].arrays == {
        **dict.fromkeys(("conv_q", "conv_k", "conv_v"), Array(2, 8)),
        "ssm_state": Array(2, 16),
    }


def test_lightning_attention() -> None:
    made = states({**CONFIG, "attn_type_list": [0, 1]})
    assert made[0] == State("recurrent", "0", {"ssm_state": Array(8, 64)})
    assert states({**CONFIG, "attn_type_list": [1, 1]}) == states(CONFIG)  # MiniMax-M2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "2"}, "config.num_hidden_layers: expected a positive integer, found '2'"),
        ({"num_hidden_layers": 10**9}, "config.num_hidden_layers: expected a positive integer"),
        ({"num_key_value_heads": -1}, "config.num_key_value_heads: expected a positive integer, found -1"),
        ({"sliding_window": 4096}, "config.sliding_window: .* add layer_types"),
        ({"sliding_window": 8, "sliding_window_pattern": 0.5}, "config.sliding_window_pattern: expected a positive"),
        ({"layer_types": ["full_attention"]}, "config.layer_types: expected one entry for each of 2 layers"),
        ({"layer_types": ["full_attention", "mamba"]}, "config.layer_types: layers of 'mamba' .* known are full_attention"),
        ({"layer_types": ["linear_attention"] * 2}, "config.layer_types: the shape of its linear attention"),
        ({"kv_lora_rank": 8, "layer_types": ["sliding_attention"] * 2}, "config.layer_types: .*'sliding_attention'"),
        ({"kv_lora_rank": 8, "index_head_dim": 8, "index_topk_freq": 0}, "config.index_topk_freq: expected a positive integer, found 0"),
        ({"kv_lora_rank": 8, "index_head_dim": 8, "indexer_types": ["full"]}, "config.indexer_types: expected one entry"),
        ({"kv_lora_rank": 8, "index_head_dim": 8, "indexer_types": ["shared"] * 2}, "config.indexer_types: no layer"),
        ({"index_kpool": 4}, "config.index_kpool: .* describe the layout in a file"),
        ({"compress_ratios": [0, 4]}, "config.compress_ratios: compressed attention .* describe the layout in a file"),
        ({"attention_chunk_size": 8192}, "config.attention_chunk_size: chunked attention"),
        ({"hybrid_override_pattern": "M-M*"}, "config.hybrid_override_pattern: Mamba layers"),
        ({"no_rope_layers": 3}, "config.no_rope_layers: expected one entry for each of 2 layers"),
        ({"no_rope_layers": [1]}, "config.no_rope_layers: expected one entry for each of 2 layers"),
        ({"no_rope_layers": [1, "no"]}, "config.no_rope_layers: expected 0 or 1 for each layer"),
        ({"no_rope_layer_interval": "2"}, "config.no_rope_layer_interval: expected a positive integer, found '2'"),
        ({"rope_theta": "x"}, "config.rope_theta: expected a positive number, found 'x'"),
        ({"rope_theta": float("nan")}, "config.rope_theta: expected a positive number, found nan"),
        ({"rope_theta": 10**400}, "config.rope_theta: expected a positive number"),
        ({"rope_scaling": "yarn"}, "config.rope_scaling: expected an object, found 'yarn'"),
        ({"rope_parameters": [1]}, r"config.rope_parameters: expected an object, found \[1\]"),
        ({"rope_parameters": {"rope_theta": "x"}}, "config.rope_parameters.rope_theta: expected a positive number"),
        ({"rope_parameters": {"full_attention": 1}}, "config.rope_parameters.full_attention: expected an object"),
        ({"partial_rotary_factor": "x"}, "config.partial_rotary_factor: expected a positive number up to 1, found 'x'"),
        ({"partial_rotary_factor": 2}, "config.partial_rotary_factor: expected a positive number up to 1, found 2"),
        ({"rotary_dim": 9}, "config.rotary_dim: expected a positive integer"),
        ({"rope_interleave": "yes"}, "config.rope_interleave: expected true or false, found 'yes'"),
        ({"head_dim": "8"}, "config.head_dim: expected a positive integer, found '8'"),
        ({"hidden_size": 7}, "config.hidden_size: expected an integer from 8 on, found 7"),
        ({"layer_types": 2}, "config.layer_types: expected one entry for each of 2 layers"),
        ({"attn_type_list": 2}, "config.attn_type_list: expected one entry"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": "x"}, "config.max_window_layers: expected"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": "4"}, "config.qk_rope_head_dim: expected an integer from 0 on, found '4'"),
        ({"kv_lora_rank": 8, "index_head_dim": 8, "indexer_types": 5}, "config.indexer_types: expected one entry"),
        ({"kv_lora_rank": 8, "index_head_dim": 8, "index_topk_pattern": "F"}, "config.index_topk_pattern: expected one"),
        ({"kv_lora_rank": 8, "index_head_dim": 8, "index_skip_topk_offset": "1"}, "config.index_skip_topk_offset: expected"),
        ({"linear_attn_config": {"kda_layers": 3}}, "config.linear_attn_config.kda_layers: expected a list, found 3"),
        ({"linear_attn_config": {"kda_layers": [1, 2]}}, "config.linear_attn_config.num_heads: expected a positive integer"),
        ({"linear_num_value_heads": "x"}, "config.linear_num_key_heads: expected a positive integer"),
        ({"linear_attn_config": [1]}, "config.linear_attn_config: expected an object"),
        ({"linear_attn_config": {"kda_layers": [3]}}, "config.linear_attn_config.kda_layers: there is no layer 3 of 2"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "config.linear_attn_config: layer 2 is in neither"),
    ],
)  # fmt: skip
def test_what_a_config_does_not_say_is_named_by_its_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(PresetError, match=message):
        model_from_config({**CONFIG, **change}, name="m")


def test_a_folder_a_file_and_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert load_model(str(folder)) == load_model(str(folder / "config.json"))
    assert load_model(str(folder)).name == "mine"
    (folder / "config.json").write_text("{")
    with pytest.raises(PresetError, match="is not JSON"):
        load_model(str(folder))
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(PresetError, match=r"model: .*config\.json is not JSON: 'utf-8' codec can't decode byte 0xff"):
        load_model(str(folder))
    (folder / "config.json").write_text("[]")
    with pytest.raises(PresetError, match="not a JSON object"):
        load_model(str(folder))
    with pytest.raises(PresetError, match=r"no shipped model; shipped are .*llama-3\.1-8b"):
        load_model("no-such-model")


def test_the_dtype_a_model_computes_in(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    plain = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    for config, found in (
        ({**plain, "torch_dtype": "float16"}, "float16"),
        ({**plain, "dtype": "bfloat16"}, "bfloat16"),  # transformers 5
        ({"text_config": {**plain, "torch_dtype": "float32"}}, "float32"),
        ({"text_config": plain, "torch_dtype": "float32"}, "float32"),
        (plain, ""),
    ):
        path.write_text(json.dumps(config))
        assert load_described(str(path)).dtype == found
    assert load_described("qwen3.5-397b-a17b").state_dtype == "float32"
    assert load_described("llama-3.1-8b").state_dtype == ""


def token_bytes(model: Model) -> int:
    """Bytes of a token at two bytes an element."""
    return sum(
        2 * a.heads * a.dim * len(s.layer_ids) for s in model.states if s.kind != "recurrent" for a in s.arrays.values()
    )


def request_bytes(model: Model) -> int:
    """Bytes of a request's recurrent states: inputs of convolutions at two bytes, states at four."""
    recurrent = (s for s in model.states if s.kind == "recurrent")
    return sum(
        (4 if name == "ssm_state" else 2) * a.heads * a.dim * len(s.layer_ids)
        for s in recurrent
        for name, a in s.arrays.items()
    )


@pytest.mark.parametrize(
    ("name", "token", "request_", "kinds"),
    [
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2, 0, "attention"),
        ("llama-3.1-70b", 2 * 80 * 8 * 128 * 2, 0, "attention"),
        ("qwen3-32b", 2 * 64 * 8 * 128 * 2, 0, "attention"),
        ("qwen3-30b-a3b", 2 * 48 * 4 * 128 * 2, 0, "attention"),
        ("qwen3-235b-a22b", 2 * 94 * 4 * 128 * 2, 0, "attention"),
        ("glm-4.5", 2 * 92 * 8 * 128 * 2, 0, "attention"),
        ("glm-4.5-air", 2 * 46 * 8 * 128 * 2, 0, "attention"),
        ("minimax-m2", 2 * 62 * 8 * 128 * 2, 0, "attention"),
        ("deepseek-v3", 61 * 1152, 0, "latent"),
        ("deepseek-v3.2", 61 * (1152 + 256), 0, "latent indexer"),
        ("kimi-k2", 61 * 1152, 0, "latent"),
        ("glm-5", 78 * (1152 + 256), 0, "latent indexer"),
        ("glm-5.1", 78 * (1152 + 256), 0, "latent indexer"),
        ("glm-5.2", 78 * 1152 + 21 * 256, 0, "latent indexer"),
        ("gpt-oss-20b", 2 * 24 * 8 * 64 * 2, 0, "window attention"),
        ("gpt-oss-120b", 2 * 36 * 8 * 64 * 2, 0, "window attention"),
        ("gemma-3-4b", 2 * 34 * 4 * 256 * 2, 0, "window attention"),
        ("gemma-3-12b", 2 * 48 * 8 * 256 * 2, 0, "window attention"),
        ("gemma-3-27b", 2 * 62 * 16 * 128 * 2, 0, "window attention"),
        ("qwen3-next-80b-a3b", 2 * 12 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2), "recurrent attention"),
        ("qwen3.5-35b-a3b", 2 * 10 * 2 * 256 * 2, 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2), "recurrent attention"),
        ("qwen3.5-397b-a17b", 2 * 15 * 2 * 256 * 2, 45 * (64 * 128 * 128 * 4 + 12288 * 3 * 2), "recurrent attention"),
        ("kimi-linear-48b-a3b", 7 * 1152, 20 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2), "recurrent latent"),
        ("minimax-text-01", 2 * 10 * 8 * 128 * 2, 70 * 64 * 128 * 128 * 4, "recurrent attention"),
    ],
)  # fmt: skip
def test_the_shipped_geometry(name: str, token: int, request_: int, kinds: str) -> None:
    told = load_described(name)
    assert (token_bytes(told.model), request_bytes(told.model)) == (token, request_)
    assert " ".join(s.kind for s in told.model.states) == kinds
    assert told.dtype == "bfloat16"


def test_every_shipped_model_has_a_source() -> None:
    import regauge.layout

    sources = (Path(regauge.layout.__file__).parent / "configs" / "SOURCES.md").read_text()
    rows = [line.split("|")[1] for line in sources.splitlines() if line.startswith("| ")]
    named = {name.strip() for row in rows for name in row.split(",")}
    assert set(shipped_models()) <= named

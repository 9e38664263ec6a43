"""From a config.json and a short form to a layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regauge.errors import LayoutError, PresetError
from regauge.layout.presets import (
    attention_model,
    from_short,
    load_model,
    load_model_dtype,
    model_from_config,
    shipped_models,
)
from regauge.layout.spec import Array, Rope, Shard
from regauge.layout.view import bytes_per_token, check_memory

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
}


@pytest.mark.parametrize("name", shipped_models())
def test_every_shipped_model_makes_layouts(name: str) -> None:
    layout = from_short("bf16", load_model(name), pages=2)
    check_memory(layout)
    assert layout.model.name == name


def test_the_bytes_of_a_token_are_the_models() -> None:
    assert bytes_per_token(from_short("bf16", load_model("llama-3.1-8b"))) == 2 * 32 * 8 * 128 * 2
    assert bytes_per_token(from_short("fp8_e4m3,scale=token_head", load_model("llama-3.1-8b"))) == 2 * 32 * 8 * (
        128 + 4
    )
    assert bytes_per_token(from_short("bf16", load_model("llama-3.1-8b"), shard=Shard(3, 4))) == 2 * 32 * 2 * 128 * 2


def test_a_config_gives_the_geometry() -> None:
    assert model_from_config(CONFIG, name="m") == attention_model("m", 2, Array(2, 8), rope=Rope(1e4, 8))
    old = {**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {k: v for k, v in CONFIG.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}  # fmt: skip
    assert model_from_config(old, name="m") == model_from_config(new, name="m")
    assert model_from_config(old, name="m").states[0].rope == Rope(
        1e4, 8, scaling='{"factor": 2.0, "rope_type": "linear"}'
    )
    assert model_from_config({"text_config": CONFIG}, name="m").states[0].arrays["k"].heads == 2
    half = model_from_config({**CONFIG, "partial_rotary_factor": 0.5}, name="m").states[0].rope
    assert half is not None
    assert half.dim == 4
    del half
    assert model_from_config({**CONFIG, "rotary_dim": 6}, name="m").states[0].rope == Rope(
        1e4, 6
    )  # as MiniMax writes it
    without = {k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "rope_theta")}
    assert model_from_config(without, name="m") == attention_model("m", 2, Array(8, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": "2"}, "config.num_hidden_layers: expected a positive integer, found '2'"),
        ({"kv_lora_rank": 512}, "config.kv_lora_rank: .* describe the layout in a file"),
        ({"sliding_window": 4096}, "config.sliding_window: .* describe the layout in a file"),
    ],
)
def test_what_a_preset_cannot_do_is_named(change: dict[str, object], message: str) -> None:
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
    (folder / "config.json").write_text("[]")
    with pytest.raises(PresetError, match="not a JSON object"):
        load_model(str(folder))
    with pytest.raises(PresetError, match=r"no shipped model; shipped are .*llama-3\.1-8b"):
        load_model("no-such-model")


@pytest.mark.parametrize(
    ("name", "token_bytes", "rope_dim"),
    [
        ("llama-3.1-70b", 2 * 80 * 8 * 128 * 2, 128),
        ("qwen3-32b", 2 * 64 * 8 * 128 * 2, 128),
        ("qwen3-30b-a3b", 2 * 48 * 4 * 128 * 2, 128),
        ("qwen3-235b-a22b", 2 * 94 * 4 * 128 * 2, 128),
        ("glm-4.5", 2 * 92 * 8 * 128 * 2, 64),
        ("glm-4.5-air", 2 * 46 * 8 * 128 * 2, 64),
        ("minimax-m2", 2 * 62 * 8 * 128 * 2, 64),
    ],
)
def test_the_shipped_geometry(name: str, token_bytes: int, rope_dim: int) -> None:
    model = load_model(name)
    assert bytes_per_token(from_short("bf16", model)) == token_bytes
    rope = model.states[0].rope
    assert rope is not None
    assert rope.dim == rope_dim
    assert load_model_dtype(name) == "bfloat16"


def test_the_dtype_a_model_computes_in(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for config, found in (
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),  # transformers 5
        ({"text_config": {"torch_dtype": "float32"}}, "float32"),
        ({}, ""),
    ):
        path.write_text(json.dumps(config))
        assert load_model_dtype(str(path)) == found


MODEL = attention_model("m", 2, Array(2, 8))


def test_short_forms_say_what_they_mean() -> None:
    k, v = from_short("FP8, page=64, kt, fused, page-first", MODEL).groups[0].components
    assert (k.dtype, k.at.order, k.at.region) == ("float8_e4m3fn", "page layer kv head dim token", "kv")
    assert (v.at.order, v.at.region) == ("page layer kv head token dim", "kv")
    k, v = from_short("torch.bfloat16", MODEL).groups[0].components
    assert (k.at.order, k.at.region, v.at.region) == ("layer page token head dim", "k", "v")
    scale = from_short("fp8_e5m2,hnd,scale=token-head", MODEL).groups[0].components[1].scale
    assert scale is not None
    assert scale.at is not None
    assert (scale.at.order, scale.at.region) == ("layer page head token", "v_scale")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16,page=0", "page=0 is not a number of tokens"),
        ("bf16,page=x", "page=x is not"),
        ("page=16", "names a dtype"),
        ("bf16,nhd,hnd", "order is given twice"),
        ("bf16,fp16", "dtype is given twice"),
        ("bf17", "cannot read 'bf17'; the parts of a short form are fp32"),
        ("bf16,scale=head", "bfloat16 needs no scale"),
        ("fp8,scale=row", "choose none, tensor, head or token_head"),
        ("bf16,colour=red", "cannot read 'colour=red'"),
    ],
)
def test_a_short_form_that_cannot_be_read_says_which_part(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        from_short(text, MODEL)


def test_k_and_v_of_unlike_size_do_not_share_a_tensor() -> None:
    unlike = attention_model("m", 2, Array(2, 8), Array(2, 4))
    check_memory(from_short("bf16", unlike, pages=2))
    with pytest.raises(LayoutError, match="cannot share one tensor"):
        from_short("bf16,fused", unlike)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", "float8_e4m3fn"), ("fp8_e4m3fnuz", "float8_e4m3fnuz"), ("int8", "int8"), ("torch.int8", "int8")],
)
def test_eight_bit_types_by_the_names_that_engines_use(name: str, dtype: str) -> None:
    layout = from_short(f"{name},scale=token_head", MODEL)
    assert {c.dtype for c in layout.groups[0].components} == {dtype}

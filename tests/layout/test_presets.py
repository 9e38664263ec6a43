"""Short forms: every kind of state, in the order, grouping and scaling that their parts say."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge.errors import LayoutError
from regauge.layout.config import shipped_models
from regauge.layout.files import encode
from regauge.layout.models import attention_model, load_model, model_from_config
from regauge.layout.presets import from_short, load_layout, load_named, with_pages
from regauge.layout.spec import Array, Shard
from regauge.layout.view import bytes_per_token, check_memory
from regauge.plan import check

MODEL = attention_model("m", 2, Array(2, 8))
MLA = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
}
LINEAR = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4}
SPARSE = model_from_config(MLA, name="sparse")
HYBRID = model_from_config({**MLA, "index_head_dim": 0, "linear_attn_config": LINEAR}, name="hybrid")
WINDOW = model_from_config(
    {"num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2}, name="window")  # fmt: skip


@pytest.mark.parametrize("name", shipped_models())
def test_every_shipped_model_makes_layouts(name: str) -> None:
    model = load_model(name)
    for text in ("bf16", "fp8_e4m3,page=64,hnd,scale=block,page-first"):
        layout = from_short(text, model, pages=2)
        assert layout.model.name == name
        assert {(g.kind, x) for g in layout.groups for x in g.layer_ids} == {
            (s.kind, x) for s in model.states for x in s.layer_ids
        }
    assert check(from_short("bf16", model), from_short("bf16,hnd,page=32", model)).path == "REMAP"


@pytest.mark.parametrize("model", [MODEL, SPARSE, HYBRID, WINDOW])
@pytest.mark.parametrize(
    "text",
    ["bf16", "bf16,fused", "fp32,kt,page=4,fused,page-first", "fp8,scale=block", "fp8,hnd,scale=token_head,fused",
     "int8,scale=head", "fp8,kt,scale=block,block=4,rule=divide", "fp16,page-first"],
)  # fmt: skip
def test_nothing_overlaps(model: object, text: str) -> None:
    assert isinstance(model, type(MODEL))
    for shard in (Shard(), Shard(1, 2)):
        check_memory(from_short(text, model, shard=shard, pages=3))


def test_the_bytes_of_a_token_are_the_models() -> None:
    assert bytes_per_token(from_short("bf16", load_model("llama-3.1-8b"))) == 2 * 32 * 8 * 128 * 2
    assert bytes_per_token(from_short("fp8_e4m3,scale=token_head", load_model("llama-3.1-8b"))) == 2 * 32 * 8 * (
        128 + 4
    )
    assert bytes_per_token(from_short("bf16", load_model("llama-3.1-8b"), shard=Shard(3, 4))) == 2 * 32 * 2 * 128 * 2
    assert bytes_per_token(from_short("fp8_e4m3,scale=block", load_model("deepseek-v3"))) == 61 * (576 + 4 * 4 + 4)


def test_short_forms_say_what_they_mean() -> None:
    k, v = from_short("FP8, page=64, kt, fused, page-first", MODEL).groups[0].components
    assert (k.dtype, k.at.order, k.at.region) == ("float8_e4m3fn", "page layer kv head dim token", "kv")
    assert (v.at.order, v.at.region) == ("page layer kv head token dim", "kv")
    k, v = from_short("torch.bfloat16", MODEL).groups[0].components
    assert (k.at.order, k.at.region, v.at.region) == ("layer page token head dim", "k", "v")
    scale = from_short("fp8_e5m2,hnd,scale=token-head,rule=divide_source", MODEL).groups[0].components[1].scale
    assert scale is not None
    assert scale.at is not None
    assert (scale.at.order, scale.at.region, scale.rule) == ("layer page head token", "v_scale", "divide_source")
    scale = from_short("fp8,scale=block,block=6", MODEL).groups[0].components[0].scale
    assert scale is not None
    assert scale.at is not None
    assert (scale.block, scale.at.order) == (2, "layer page token head dim")  # 2 is what of 6 divides a head of 8


def test_latents_lie_apart_or_in_one_row() -> None:
    latent, rope = from_short("bf16,page=4", SPARSE).groups[0].components
    assert (latent.at.order, latent.at.region, rope.at.region) == ("layer page token dim", "latent", "rope")
    latent, rope = from_short("bf16,page=4,fused,hnd", SPARSE).groups[0].components
    assert (latent.at.region, rope.at.region, rope.at.offset) == ("latent", "latent", 96)
    assert latent.at.strides == rope.at.strides == {"token": 112}
    group = from_short("fp8,scale=block", SPARSE).groups[1]
    assert (group.kind, group.component("index_k").at.region) == ("indexer", "index_k")


def test_recurrent_states_have_a_dtype_of_their_own() -> None:
    group = from_short("fp8,scale=token_head", HYBRID, pages=3, requests=5).groups[0]
    assert (group.kind, group.page_size, group.pages) == ("recurrent", 1, 5)
    assert [c.dtype for c in group.components] == ["bfloat16"] * 3 + ["float32"]
    assert {c.at.order for c in group.components} == {"layer page head dim"}
    assert [c.at.region for c in group.components] == ["conv_q", "conv_k", "conv_v", "ssm_state"]
    group = from_short("fp16,state=bf16", HYBRID, pages=3).groups[0]
    assert [c.dtype for c in group.components] == ["float16"] * 3 + ["bfloat16"]
    assert group.pages == 3


def test_states_with_the_same_arrays_have_regions_of_their_own() -> None:
    window, full = from_short("bf16", WINDOW).groups
    assert [c.at.region for c in window.components] == ["k", "v"]
    assert [c.at.region for c in full.components] == ["attention1_k", "attention1_v"]


def test_a_pool_for_so_many_tokens_and_requests() -> None:
    layout = with_pages(from_short("bf16,page=24", HYBRID), 100, requests=7)
    assert [(g.kind, g.pages) for g in layout.groups] == [("recurrent", 7), ("latent", 5)]
    assert with_pages(from_short("bf16,page=24", HYBRID, pages=3), 100).groups[0].pages == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16,page=0", "page=0 is not a number of tokens"),
        ("bf16,page=x", "page=x is not"),
        ("bf16,page=70000", "page=70000 is not"),
        ("fp8,scale=block,block=0", "block=0 is not a number of elements"),
        ("page=16", "names a dtype"),
        ("bf16,nhd,hnd", "order is given twice"),
        ("bf16,fp16", "dtype is given twice"),
        ("fp8,scale=head,scale=head", "scale is given twice"),
        ("bf17", "cannot read 'bf17'; the parts of a short form are fp32"),
        ("bf16,scale=head", "bfloat16 needs no scale"),
        ("fp8,scale=row", "choose tensor, head, token_head, block, none"),
        ("fp8,rule=floor", "rule=floor: choose reciprocal, divide, divide_source"),
        ("bf16,state=fp8", "state=float8_e4m3fn: choose float32, bfloat16, float16"),
        ("bf16,colour=red", "cannot read 'colour=red'"),
        ("record:inline4,hnd", "hnd: record:inline4 says it of all that m keeps"),
        ("record:inline4,split", "split: record:inline4 says it"),
        ("record:inline4,fused,scale=head,rule=divide", "fused: record:inline4 says it"),
        ("record:inline4,scale=none", "scale=none: record:inline4 says it"),
        ("bf16,record:inline4,rule=divide", "rule=divide: record:inline4 says it"),
        ("fp8,rule=divide", "rule=divide: is how codes are scaled: add a scale"),
        ("fp8,scale=none,rule=divide", "rule=divide: is how codes are scaled"),
        ("bf16,block=64", "block=64: is the size of scale=block"),
        ("fp8,scale=token_head,block=64", "block=64: is the size of scale=block"),
        ("bf16,state=fp16", "state=fp16: m keeps no recurrent state"),
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


def test_what_a_config_says_goes_into_an_engines_layout(tmp_path: Path) -> None:
    """The model and both dtypes; a file says all that itself."""
    named = load_named("engine:vllm,pool=LBHNC,tp=8", "qwen3.5-397b-a17b")
    assert named.groups[0].component("ssm_state").dtype == "float32"
    assert named.groups[0].component("conv_q").dtype == "bfloat16"
    (tmp_path / "a.toml").write_bytes(encode(named, format="toml"))
    assert load_named(str(tmp_path / "a.toml"), "no such model") == named


def test_a_form_needs_a_model() -> None:
    with pytest.raises(LayoutError, match="bf16: is a short form, which needs a model"):
        load_layout("bf16", None)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", "float8_e4m3fn"), ("fp8_e4m3fnuz", "float8_e4m3fnuz"), ("int8", "int8"), ("torch.int8", "int8")],
)
def test_eight_bit_types_by_the_names_that_engines_use(name: str, dtype: str) -> None:
    layout = from_short(f"{name},scale=token_head", MODEL)
    assert {c.dtype for c in layout.groups[0].components} == {dtype}

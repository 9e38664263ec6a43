"""vLLM's pools of latents, indexer keys, and of layers of several kinds, against what it allocates."""

from __future__ import annotations

import numpy as np
import pytest

from regauge.errors import PresetError
from regauge.layout.engines import Flags, engine_layout
from regauge.layout.models import load_model, model_from_config
from regauge.layout.spec import Array, Layout, Model, State
from regauge.layout.summary import summarize
from regauge.layout.view import check_memory
from regauge.plan import check
from tensors import DENSE, GATED, MLA, WINDOW, counted, regions, where, where_scales

PAGES = 3
SPARSE = model_from_config({**MLA, "index_head_dim": 128}, name="sparse")
QWEN = model_from_config({**GATED, "num_hidden_layers": 8}, name="qwen")


def make(model: Model, **more: object) -> Layout:
    options = {"model_dtype": "bfloat16", "pages": PAGES, "requests": PAGES, **more}
    return engine_layout("vllm", model, Flags(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("pool", "outer"), [(None, (0, 1, 2, 3)), ("BLNHC", (1, 0, 2, 3)), ("cpu", (0, 1, 2, 3))])
def test_latents_lie_in_blocks(pool: str | None, outer: tuple[int, ...]) -> None:
    group = make(DENSE, pool=pool).groups[0]
    size = 16 if pool == "cpu" else 64
    assert group.page_size == size
    shape = (PAGES, 2, size, 576) if pool == "BLNHC" else (2, PAGES, size, 576)
    rows = counted(*shape, itemsize=2).transpose(outer)
    assert np.array_equal(where(group, "latent")[..., 0, :], rows[..., :512])
    assert np.array_equal(where(group, "rope")[..., 0, :], rows[..., 512:])


def test_ds_mla_blocks_and_indexer_blocks_share_their_numbers() -> None:
    layout = check_memory(make(SPARSE, kv_cache_dtype="fp8_ds_mla"))
    latent, indexer = layout.groups
    rows = counted(2, PAGES, 64, 656)
    assert np.array_equal(where(latent, "latent")[..., 0, :], rows[..., :512])
    assert np.array_equal(where_scales(latent, "latent")[..., 0, :], rows[..., 512:528:4])
    assert np.array_equal(where(latent, "rope")[..., 0, :], rows[..., 528::2])
    blocks = counted(2, PAGES, 64 * 132)
    assert np.array_equal(where(indexer, "index_k")[..., 0, :], blocks[..., :8192].reshape(2, PAGES, 64, 128))
    assert np.array_equal(where_scales(indexer, "index_k")[..., 0, 0], blocks[..., 8192::4])
    scale = latent.component("latent").scale
    assert scale is not None
    assert scale.rule == "divide"
    assert regions(indexer, "index_k") == ("index_k", "index_k")


def test_records_of_both_engines_cross_as_they_are() -> None:
    ours = engine_layout("sglang", SPARSE, Flags(kv_cache_dtype="fp8_e4m3", pages=PAGES))
    assert check(ours, make(SPARSE, kv_cache_dtype="fp8_ds_mla")).path in ("DIRECT", "REMAP")
    assert check(ours, make(SPARSE, kv_cache_dtype="fp8", record="raw")).path == "CONVERT"


@pytest.mark.parametrize("pool", ["LBHNC", "BLHNC"])
def test_window_layers_are_dealt_into_groups_over_one_allocation(pool: str) -> None:
    """7 layers, 2 of full attention and 5 with a window: 3 groups of windows, of 2, 2 and 1 layers."""
    layout = check_memory(make(WINDOW, pool=pool))
    assert [(g.kind, g.layers) for g in layout.groups] == [
        ("window", "0,4"), ("window", "1,6"), ("window", "3"), ("attention", "2,5")]  # fmt: skip
    for number, group in enumerate(layout.groups):
        layers, blocks = len(group.layer_ids), counted(2, PAGES, 2, 16, 2, 8, itemsize=2)  # L B H P kv D
        if pool == "BLHNC":  # a block has room for the largest group's layers
            blocks = counted(PAGES, 2, 2, 16, 2, 8, itemsize=2).transpose(1, 0, 2, 3, 4, 5)
        for index, name in enumerate(("k", "v")):
            assert np.array_equal(where(group, name), blocks[:layers, :, :, :, index].transpose(0, 1, 3, 2, 4))
            assert set(regions(group, name)) == {f"kv{number}"}


def test_layers_are_dealt_over_all_pipeline_stages() -> None:
    """27B of Gemma 3: 6 groups of windows and one of full attention; a stage keeps its part of each, blocks as of the largest."""
    whole = make(load_model("gemma-3-27b"), pool="BLHNC")
    for stage, layers in ((0, range(31)), (1, range(31, 62))):
        part = make(load_model("gemma-3-27b"), pool="BLHNC", pp=2, pp_rank=stage)
        ids = [tuple(x for x in g.layer_ids if x in layers) for g in whole.groups]
        assert [g.layer_ids for g in part.groups] == ids
        page = 2 * 16 * 16 * 128 * 2
        assert {x.memory_per_page for x in summarize(part)} == {max(map(len, ids)) * page}


def test_as_many_windows_as_full_layers_make_two_groups() -> None:
    groups = make(load_model("gpt-oss-120b"), pool="nhd").groups
    assert [(g.kind, g.layers) for g in groups] == [("window", "0-34:2"), ("attention", "1-35:2")]


@pytest.mark.parametrize(("pool", "tp"), [("LBNHC", 1), ("BLNHC", 2)])
def test_a_block_of_attention_holds_a_recurrent_state(pool: str, tp: int) -> None:
    layout = check_memory(make(QWEN, pool=pool, tp=tp, ssm_dtype="float32"))
    assert [(g.kind, g.layers) for g in layout.groups] == [
        ("recurrent", "0,4"), ("recurrent", "1,5"), ("recurrent", "2,6"), ("attention", "3,7")]  # fmt: skip
    keys, values = 2 // tp, 4 // tp
    channels = keys * 4 * 2 + values * 8
    need = 3 * channels * 2 + values * 32 * 4
    page = 16 * keys * 2 * 8 * 2  # 16 tokens: K and V of the heads of this rank
    blocks = -(-need // page)
    assert layout.groups[3].page_size == 16 * blocks
    bytes_ = page * blocks
    assert [x.memory_per_page for x in summarize(layout)] == [2 * bytes_] * 4
    for group in layout.groups[:3]:
        first = counted(2, PAGES, bytes_) if pool == "LBNHC" else counted(PAGES, 2, bytes_).transpose(1, 0, 2)
        conv = first[..., : 3 * channels * 2 : 2].reshape(2, PAGES, 3, channels)  # (kernel - 1, channels)
        at = 0
        for name, heads, dim in (("conv_q", keys, 4), ("conv_k", keys, 4), ("conv_v", values, 8)):
            part = conv[..., at : at + heads * dim].reshape(2, PAGES, 3, heads, dim).transpose(0, 1, 3, 4, 2)
            assert np.array_equal(where(group, name)[:, :, 0], part.reshape(2, PAGES, heads, dim * 3))
            at += heads * dim
        state = first[..., 3 * channels * 2 : need : 4].reshape(2, PAGES, values, 32)
        assert np.array_equal(where(group, "ssm_state")[:, :, 0], state)


def test_the_two_engines_carry_a_hybrid_to_each_other() -> None:
    ours = engine_layout("sglang", QWEN, Flags(model_dtype="bfloat16", pages=PAGES, requests=PAGES))
    for pair in (
        (ours, make(QWEN, pool="hnd", ssm_dtype="float32")),
        (make(QWEN, pool="nhd", ssm_dtype="float32"), ours),
    ):
        assert check(*pair).path == "REMAP"


def test_kimi_beside_mla() -> None:
    """A block is a multiple of 128 tokens that holds 32 heads' states of 128 x 128 floats and 3 past inputs of q, k, v."""
    layout = make(load_model("kimi-linear-48b-a3b"))
    need = 32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2
    assert layout.groups[-1].kind == "latent"
    assert layout.groups[-1].page_size == 128 * -(-need // (128 * 1152)) == 1920
    assert [len(g.layer_ids) for g in layout.groups] == [7, 7, 6, 7]


UNLIKE = Model("m", 4, [State("window", "0-1", {"k": Array(2, 8), "v": Array(2, 8)}, window=4),
                        State("attention", "2-3", {"k": Array(1, 8), "v": Array(1, 8)})])  # fmt: skip
TWO = Model("m", 2, [State("attention", str(i), {"k": Array(1, 8), "v": Array(1, 8)}) for i in range(2)])
LIGHTNING = Model("m", 2, [State("recurrent", "0", {"ssm_state": Array(2, 16)}),
                           State("attention", "1", {"k": Array(1, 8), "v": Array(1, 8)})])  # fmt: skip


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (SPARSE, {"kv_cache_dtype": "fp8"}, "^record: fp8 is fp8_ds_mla with FlashMLA.* record=packed or record=raw"),
        (SPARSE, {"pool": "BLHNC"}, "^pool: how BLHNC packs latents and indexer keys"),
        (SPARSE, {"platform": "gfx95x"}, "^platform: on ROCm its keys are shuffled"),
        (DENSE, {"pool": "B2NHC"}, "^pool: latents do not lie in B2NHC; choose LBHNC"),
        (DENSE, {"kv_cache_dtype": "fp8_per_token_head"}, "^dtype: where latents keep such scales"),
        (WINDOW, {"pool": "LHBNC"}, "^pool: layers of several kinds do not lie in LHBNC; choose LBHNC"),
        (WINDOW, {"pool": "LBHNC", "tp": 4, "cp": 2}, "^cp: vLLM shares tokens among ranks for full attention only"),
        (QWEN, {"pool": "LBHNC"}, "^ssm-dtype: .* say which, such as ssm-dtype=float32"),
        (QWEN, {"pool": "LBHNC", "ssm_dtype": "float32", "page_size": 1}, "^page: a block of 1 tokens .* use 16"),
        (QWEN, {"pool": "LBHNC", "ssm_dtype": "float32", "tp": 4}, "^tp: 2 key heads do not divide over 4 ranks"),
        (QWEN, {"pool": "cpu"}, "^pool: how the CPU packs recurrent states"),
        (UNLIKE, {"pool": "LBHNC"}, "^model: layers that keep 32, 64 bytes of a token"),
        (TWO, {"pool": "LBHNC"}, "^model: layers of one kind that keep unlike states"),
        (LIGHTNING, {"pool": "LBHNC"}, "^model: .* no pool for this linear attention"),
    ],
)
def test_what_is_not_known_is_refused(model: Model, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PresetError, match=message):
        make(model, **arguments)

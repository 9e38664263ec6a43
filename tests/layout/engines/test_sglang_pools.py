"""SGLang's pools of latents, indexer keys, windows and recurrent states, against tensors of the shapes it allocates."""

from __future__ import annotations

import numpy as np
import pytest

from regauge.errors import PresetError
from regauge.layout.engines import Flags, engine_layout
from regauge.layout.engines.sglang import POOLS
from regauge.layout.models import load_model
from regauge.layout.spec import Array, Layout, Model, State
from regauge.layout.summary import summarize
from regauge.layout.view import bytes_per_token, check_memory
from regauge.plan import check
from tensors import DENSE, KIMI, QWEN, SPARSE, UNROTATED, counted, regions, where, where_scales

PAGES, REQUESTS = 3, 2


def make(model: Model, **more: object) -> Layout:
    options = {"model_dtype": "bfloat16", "pages": PAGES, "requests": REQUESTS, **more}
    return engine_layout("sglang", model, Flags(**options))  # type: ignore[arg-type]


def test_a_latent_row_is_latent_then_rotated_part() -> None:
    group = make(DENSE, page_size=4).groups[0]
    rows = counted(PAGES, 4, 1, 576, itemsize=2)  # (slots, 1, 576)
    assert regions(group, "latent") == ("kv.0", "kv.1")
    for layer in range(2):
        assert np.array_equal(where(group, "latent")[layer], rows[..., :512])
        assert np.array_equal(where(group, "rope")[layer], rows[..., 512:])


@pytest.mark.parametrize(
    ("pool", "shape", "axes"),
    [
        ("layer_first", (2, PAGES, 4, 1, 576), (0, 1, 2, 3, 4)),
        ("page_first", (PAGES, 4, 2, 1, 576), (2, 0, 1, 3, 4)),
        ("page_first_direct", (PAGES, 2, 4, 1, 576), (1, 0, 2, 3, 4)),
    ],
)
def test_latents_on_the_host_lie_as_their_tensor(pool: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    group = make(DENSE, page_size=4, pool=pool).groups[0]
    rows = counted(*shape, itemsize=2).transpose(axes)
    assert regions(group, "latent") == ("kv", "kv")
    assert np.array_equal(where(group, "latent"), rows[..., :512])
    assert np.array_equal(where(group, "rope"), rows[..., 512:])


@pytest.mark.parametrize("pool", ["nhd", "layer_first", "page_first", "page_first_direct"])
def test_packed_latents_hold_their_scales_before_the_rotated_part(pool: str) -> None:
    layout = check_memory(make(SPARSE, kv_cache_dtype="fp8_e4m3", pool=pool))
    group = layout.groups[0]
    shapes = {"layer_first": ((4, PAGES, 64, 656), (0, 1, 2, 3)), "page_first": ((PAGES, 64, 4, 656), (2, 0, 1, 3)),
              "page_first_direct": ((PAGES, 4, 64, 656), (1, 0, 2, 3))}  # fmt: skip
    if pool == "nhd":
        rows = np.broadcast_to(counted(PAGES, 64, 656), (4, PAGES, 64, 656))
    else:
        rows = counted(*shapes[pool][0]).transpose(shapes[pool][1])
    assert np.array_equal(where(group, "latent")[..., 0, :], rows[..., :512])
    assert np.array_equal(where_scales(group, "latent")[..., 0, :], rows[..., 512:528:4])
    assert np.array_equal(where(group, "rope")[..., 0, :], rows[..., 528::2])
    scale = group.component("latent").scale
    assert scale is not None
    assert (scale.per, scale.block, scale.rule, scale.dtype) == ("block", 128, "reciprocal", "float32")


@pytest.mark.parametrize(("pool", "outer"), [("nhd", None), ("layer_first", (0, 1, 2)), ("page_first", (1, 0, 2))])
def test_indexer_pages_hold_codes_then_scales(pool: str, outer: tuple[int, ...] | None) -> None:
    group = make(SPARSE, pool=pool).groups[1]
    assert (group.layers, group.page_size) == ("0-1,3", 64)  # layer 2 reuses layer 1's choice
    shape = (3, PAGES) if pool == "layer_first" else (PAGES, 3)
    pages = np.broadcast_to(counted(PAGES, 64 * 132), (3, PAGES, 64 * 132))
    if outer is not None:
        pages = counted(*shape, 64 * 132).transpose(outer)
    assert np.array_equal(where(group, "index_k")[..., 0, :], pages[..., : 64 * 128].reshape(3, PAGES, 64, 128))
    assert np.array_equal(where_scales(group, "index_k")[..., 0, 0], pages[..., 64 * 128 :: 4])
    assert regions(group, "index_k") == (("index_k.0", "index_k.1", "index_k.3") if pool == "nhd" else ("index_k",) * 3)


def test_on_rocm_indexer_keys_lie_in_tiles() -> None:
    group = check_memory(make(SPARSE, platform="gfx95x")).groups[1]
    token, dim = np.arange(64)[:, None], np.arange(128)
    tiles = token // 16 * (16 * 128) + dim // 16 * 256 + token % 16 * 16 + dim % 16
    assert np.array_equal(where(group, "index_k")[0, 1, :, 0], 8448 + tiles)
    assert np.array_equal(where_scales(group, "index_k")[0, 1, :, 0, 0], 8448 + 8192 + np.arange(64) * 4)
    plain = make(SPARSE, platform="gfx95x", page_size=1).groups[1]
    assert np.array_equal(where(plain, "index_k")[0, 1, 0, 0], 132 + np.arange(128))
    assert make(SPARSE, platform="gfx95x", kv_cache_dtype="fp8_e4m3").groups[0].component("latent").at.strides == {
        "token": 576
    }


def test_one_dtype_name_two_formats() -> None:
    """sglang#37838: FlashMLA packs 656 bytes, TRT-LLM keeps 576; neither side's name says which."""
    packed, raw = make(SPARSE, kv_cache_dtype="fp8_e4m3"), make(SPARSE, kv_cache_dtype="fp8_e4m3", record="raw")
    assert [g.bytes_per_token // 4 for g in (summarize(packed)[0], summarize(raw)[0])] == [656, 576]
    assert check(packed, raw).path == "CONVERT"
    with pytest.raises(PresetError, match="record: latents of bfloat16 have no scales"):
        make(SPARSE, record="packed")


def test_the_tokens_of_glm_take_what_is_published() -> None:
    """54 KB per token of GLM-5.2: 78 layers of 656 bytes and 21 of 132 (MLA is not split over ranks)."""
    layout = engine_layout("sglang", load_model("glm-5.2"), Flags(tp=8, kv_cache_dtype="fp8_e4m3"))
    assert bytes_per_token(layout) == 78 * 656 + 21 * 132 == 53_940
    layout = engine_layout("sglang", load_model("glm-5"), Flags(tp=8, kv_cache_dtype="fp8_e4m3"))
    assert bytes_per_token(layout) == 78 * (656 + 132)


def test_window_layers_have_a_pool_and_a_page_table_of_their_own() -> None:
    layout = make(load_model("gpt-oss-20b"), tp=8, rank=5, pool="hnd", page_size=16)
    window, full = layout.groups
    assert (window.kind, window.layers, full.kind, full.layers) == ("window", "0-22:2", "attention", "1-23:2")
    pages = counted(PAGES, 1, 16, 64, itemsize=2).transpose(0, 2, 1, 3)
    for group in layout.groups:
        for name in ("k", "v"):
            assert all(np.array_equal(x, pages) for x in where(group, name))
            assert regions(group, name) == tuple(f"{name}.{x}" for x in group.layer_ids)


@pytest.mark.parametrize("tp", [1, 2])
def test_states_of_a_gated_delta_net(tp: int) -> None:
    layout = check_memory(make(QWEN, tp=tp, rank=tp - 1))
    group = layout.groups[0]
    assert (group.kind, group.layers, group.page_size, group.pages) == ("recurrent", "0-2", 1, REQUESTS)
    keys, values = 2 // tp, 4 // tp
    conv = counted(3, REQUESTS, keys * 4 * 2 + values * 8, 3, itemsize=2)  # (layers, slots, channels, kernel - 1)
    first = 0
    for name, heads, dim in (("conv_q", keys, 4), ("conv_k", keys, 4), ("conv_v", values, 8)):
        part = conv[:, :, first : first + heads * dim].reshape(3, REQUESTS, 1, heads, dim * 3)
        assert np.array_equal(where(group, name), part)
        first += heads * dim
    temporal = counted(3, REQUESTS, 1, values, 8 * 4, itemsize=4)  # value dim by key dim
    assert np.array_equal(where(group, "ssm_state"), temporal)
    assert [c.dtype for c in group.components] == ["bfloat16"] * 3 + ["float32"]
    assert layout.groups[1].component("k").heads == keys


def test_states_of_kimi_delta_attention() -> None:
    group = check_memory(make(KIMI, tp=2, ssm_dtype="bfloat16")).groups[0]
    conv = counted(3, REQUESTS, 3, 3 * 2 * 8, itemsize=2)  # (layers, slots, kernel - 1, channels)
    for index, name in enumerate(("conv_q", "conv_k", "conv_v")):
        part = conv[..., index * 16 : (index + 1) * 16].reshape(3, REQUESTS, 3, 2, 8)
        expected = part.transpose(0, 1, 3, 4, 2).reshape(3, REQUESTS, 1, 2, 24)  # channel by channel, its past inputs
        assert np.array_equal(where(group, name), expected)
    assert group.component("ssm_state").dtype == "bfloat16"


@pytest.mark.parametrize("pool", ["nhd", "hnd", "vectorized_5d"])
def test_layers_of_one_kind_that_keep_unlike_states_have_tensors_of_their_own(pool: str) -> None:
    assert [g.layers for g in check_memory(make(UNROTATED, pool=pool, platform="gfx95x")).groups] == ["0-2", "3"]


def test_tokens_shared_among_ranks() -> None:
    layout = make(DENSE, tp=4, rank=3, cp=2)
    assert (layout.shard.tp_rank, layout.shard.tp_size, layout.shard.cp_rank, layout.shard.cp_size) == (1, 2, 1, 2)


NO_DELTA_NET = Model("m", 2, [State("attention", "0", {"k": Array(2, 8), "v": Array(2, 8)}),
                              State("recurrent", "1", {"conv_q": Array(2, 6), "ssm_state": Array(2, 16)})])  # fmt: skip
LIGHTNING = Model("m", 1, [State("recurrent", "0", {"ssm_state": Array(2, 16)})])


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (DENSE, {"pool": "hnd"}, "^pool: latents do not lie in hnd; choose nhd, layer_first"),
        (SPARSE, {"page_size": 16}, "^page: 16 tokens; sparse attention takes pages of 64"),
        (SPARSE, {"platform": "gfx94x"}, "^platform: .* amax / 224"),
        (SPARSE, {"tp": 2, "cp": 2}, "^cp: .* without an indexer"),
        (DENSE, {"tp": 2, "cp": 2, "stripe": 4}, "^stripe: SGLang deals tokens out one by one"),
        (QWEN, {"pool": "page_first"}, "^pool: .* window and recurrent states is not known"),
        (QWEN, {"platform": "cpu"}, "^platform: on CPU, AMX"),
        (QWEN, {"ssm_dtype": "fp8"}, "^ssm-dtype: 'fp8': choose float32"),
        (load_model("gpt-oss-20b"), {"pool": "vectorized_5d"}, "^pool: .* window and recurrent states is not known"),
        (QWEN, {"pool": "vectorized_5d", "platform": "gfx95x"}, "^pool: .* window and recurrent states is not known"),
        *(
            (UNROTATED, {"pool": name}, f"^pool: layers of one kind that keep unlike states share one tensor in {name}")
            for name, pool in POOLS.items()
            if pool.host
        ),
        (NO_DELTA_NET, {}, "a delta net also keeps conv_v; other recurrent states have no preset"),
        (LIGHTNING, {}, "^model: .* no pool for this linear attention: describe it in a file"),
    ],
)
def test_what_is_not_known_is_refused(model: Model, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PresetError, match=message):
        make(model, **arguments)

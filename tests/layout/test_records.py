"""Packed records against the byte maps that their engines document."""

from __future__ import annotations

import numpy as np
import pytest

from regauge.errors import LayoutError, PresetError
from regauge.layout.presets import attention_model, from_short
from regauge.layout.records import record_components
from regauge.layout.spec import Array, Group, Kind, Layout, Model, State
from regauge.layout.validate import validate
from regauge.layout.view import bytes_per_token, check_memory
from tensors import counted, where, where_scales

PAGES, TOKENS, LAYERS = 3, 5, 2


def made(
    name: str, arrays: dict[str, Array], kind: Kind = "latent", order: str = "layer page", size: int = TOKENS
) -> Group:
    state = State(kind, f"0-{LAYERS - 1}", arrays, window=4 if kind == "window" else 0)
    heads = {key: array.heads for key, array in arrays.items()}
    components = record_components(name, state, page_size=size, heads=heads, order=order, region="r.{name}")
    group = Group(kind, state.layers, size, components, PAGES)
    check_memory(validate(Layout(Model("m", LAYERS, [state]), [group])))
    return group


@pytest.mark.parametrize("name", ["fp8_ds_mla", "dsa_mla"])
def test_656_bytes(name: str) -> None:
    """512 codes, 4 float32 scales of 128 codes each, 64 bfloat16 (vLLM's flashmla_sparse.py)."""
    group = made(name, {"latent": Array(1, 512), "rope": Array(1, 64)})
    rows = counted(LAYERS, PAGES, TOKENS, 656)
    assert np.array_equal(where(group, "latent")[..., 0, :], rows[..., :512])
    assert np.array_equal(where_scales(group, "latent")[..., 0, :], rows[..., 512:528:4])
    assert np.array_equal(where(group, "rope")[..., 0, :], rows[..., 528::2])


def test_the_two_engines_round_656_bytes_otherwise() -> None:
    arrays = {"latent": Array(1, 512), "rope": Array(1, 64)}
    rules = [made(name, arrays).component("latent").scale for name in ("fp8_ds_mla", "dsa_mla")]
    assert [r and (r.rule, r.floor, r.pow2) for r in rules] == [
        ("divide", 2.0**-126, False),
        ("reciprocal", 2.0**-126, False),
    ]


@pytest.mark.parametrize(
    ("name", "codes", "rope", "scales", "block", "align"),
    [("v4", 448, 64, 7, 64, 576), ("v41", 512, 0, 16, 32, 512), ("v41_fp4", 256, 0, 32, 8, 512)],
)
@pytest.mark.parametrize("order", ["layer page", "page layer"])
def test_records_whose_scales_follow_a_page_of_data(
    name: str, codes: int, rope: int, scales: int, block: int, align: int, order: str
) -> None:
    arrays = {"latent": Array(1, codes)} | ({"rope": Array(1, rope)} if rope else {})
    group = made(name, arrays, order=order)
    data, tail = codes + 2 * rope, {"v4": 8, "v41": 16, "v41_fp4": 32}[name]
    page = -(-TOKENS * (data + tail) // align) * align
    outer = counted(LAYERS, PAGES, page) if order == "layer page" else counted(PAGES, LAYERS, page).transpose(1, 0, 2)
    rows = outer[..., : TOKENS * data].reshape(LAYERS, PAGES, TOKENS, data)
    tails = outer[..., TOKENS * data : TOKENS * (data + tail)].reshape(LAYERS, PAGES, TOKENS, tail)
    assert np.array_equal(where(group, "latent")[..., 0, :], rows[..., :codes])
    assert np.array_equal(where_scales(group, "latent")[..., 0, :], tails[..., :scales])
    if rope:
        assert np.array_equal(where(group, "rope")[..., 0, :], rows[..., codes::2])
    scale = group.component("latent").scale
    assert scale is not None
    assert (scale.per, scale.block, codes // scale.block) == ("block", block, scales)
    assert scale.dtype == ("float8_e4m3fn" if name == "v41_fp4" else "float8_e8m0fnu")


@pytest.mark.parametrize("order", ["layer page", "page"])
def test_132_bytes(order: str) -> None:
    """A page's codes, then its scales."""
    if order == "page":
        state = State("indexer", "0-1", {"index_k": Array(1, 128)})
        components = record_components(
            "dsa_index", state, page_size=64, heads={"index_k": 1}, order=order, region="i.{layer}"
        )
        group, layers = Group("indexer", "0-1", 64, components, PAGES), [0, 0]
    else:
        group, layers = made("dsa_index", {"index_k": Array(1, 128)}, "indexer", size=64), [0, PAGES * 8448]
    pages = counted(PAGES, 64 * 132)
    for layer, first in enumerate(layers):
        assert np.array_equal(
            where(group, "index_k")[layer, ..., 0, :], first + pages[:, :8192].reshape(PAGES, 64, 128)
        )
        assert np.array_equal(where_scales(group, "index_k")[layer, ..., 0, 0], first + pages[:, 8192::4])
    scale = group.component("index_k").scale
    assert scale is not None
    assert (scale.rule, scale.pow2, scale.floor) == ("divide", True, 1e-4 / 448)


def test_512_bytes_of_one_scale() -> None:
    group = made("uniform", {"latent": Array(1, 512)})
    assert np.array_equal(where(group, "latent")[..., 0, :], counted(LAYERS, PAGES, TOKENS, 512))
    scale = group.component("latent").scale
    assert scale is not None
    assert (scale.per, scale.values) == ("tensor", 1.0)


@pytest.mark.parametrize(("name", "padding"), [("inline4", 4), ("inline16", 16)])
@pytest.mark.parametrize("kind", ["attention", "window"])
def test_rows_that_end_in_their_scale(name: str, padding: int, kind: Kind) -> None:
    group = made(name, {"k": Array(2, 8), "v": Array(2, 12)}, kind)
    for key, dim in (("k", 8), ("v", 12)):
        rows = counted(LAYERS, PAGES, TOKENS, 2, dim + padding)
        assert np.array_equal(where(group, key), rows[..., :dim])
        assert np.array_equal(where_scales(group, key), rows[..., dim : dim + 1])
        assert group.component(key).at.region == f"r.{key}"


def test_a_record_that_does_not_fit_says_what_it_holds() -> None:
    state = State("latent", "0", {"latent": Array(1, 512)})
    with pytest.raises(PresetError, match=r"record: v4 holds latent of 448 elements, rope of 64.*keeps latent of 512"):
        record_components("v4", state, page_size=4, heads={"latent": 1}, order="page", region="r.{layer}")
    with pytest.raises(PresetError, match="record: inline4 holds k of any elements"):
        record_components("inline4", state, page_size=4, heads={"latent": 1}, order="page", region="r.{layer}")
    with pytest.raises(PresetError, match="record: no record 'v5'; choose fp8_ds_mla"):
        record_components("v5", state, page_size=4, heads={"latent": 1}, order="page", region="r.{layer}")


SPARSE = Model("m", 2, [State("latent", "0-1", {"latent": Array(1, 512), "rope": Array(1, 64)}),
                        State("indexer", "0-1", {"index_k": Array(1, 128)})])  # fmt: skip


def test_records_in_short_forms() -> None:
    layout = check_memory(from_short("record:fp8_ds_mla,record:dsa_index,page=64", SPARSE, pages=2))
    assert bytes_per_token(layout) == 2 * (656 + 132)
    assert [c.at.region for g in layout.groups for c in g.components] == ["latent", "latent", "indexer"]
    mixed = check_memory(from_short("bf16,record:dsa_mla,page-first", SPARSE, pages=2))
    assert [c.dtype for g in mixed.groups for c in g.components] == ["float8_e4m3fn", "bfloat16", "bfloat16"]
    rows = check_memory(from_short("record:inline4", attention_model("m", 2, Array(2, 8)), pages=2))
    assert [c.at.region for c in rows.groups[0].components] == ["k", "v"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("record:v5", "record: no record 'v5'; choose fp8_ds_mla"),
        ("record:dsa_mla", "dtype: name a dtype for the indexer layers, such as bf16"),
        ("bf16,record:inline4", "record: m keeps nothing that inline4 holds"),
        ("bf16,record:v4", "record: v4 holds latent of 448"),
    ],
)
def test_records_that_a_model_does_not_keep(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        from_short(text, SPARSE)

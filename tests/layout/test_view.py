"""Offsets follow from axis orders: every view against a numpy array of that shape."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.errors import LayoutError
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Component, Group, Layout, Placement, Scale
from regauge.layout.validate import validate
from regauge.layout.view import bytes_per_token, check_memory, component_view, region_sizes, scale_view
from strategies import EIGHT_BIT, FLOATS, layouts, models
from tensors import where

MODEL = attention_model("m", 2, Array(2, 8))


def group(*components: Component, page: int = 4, pages: int = 3, layers: str = "0-1") -> Group:
    return Group("attention", layers, page, list(components), pages)


def component(order: str, name: str = "k", dtype: str = "bfloat16", **at: object) -> Component:
    return Component(name, dtype, 2, 8, Placement(order, **at))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "order",
    [
        "layer page token head dim",
        "page layer head dim token",
        "head layer page dim token",
        "dim token page layer head",
    ],
)
def test_offsets_are_those_of_a_dense_array(order: str) -> None:
    sizes = {"layer": 2, "page": 3, "token": 4, "head": 2, "dim": 8}
    axes = order.split()
    where = np.arange(2 * 3 * 4 * 2 * 8).reshape([sizes[a] for a in axes]) * 2
    where = where.transpose([axes.index(a) for a in ("layer", "page", "token", "head", "dim")])
    g = group(component(order))
    view = component_view(g, g.components[0])
    base = view.layer_bases((0, 1), (0, 1), {"kv": 0})
    got = (base[:, None, None, None, None] + np.arange(3)[:, None, None, None] * view.page_stride
           + view.token[:, None, None] + view.head[:, None] + view.dim)  # fmt: skip
    assert np.array_equal(got, where)


def test_vector_lanes_split_an_axis() -> None:
    """A page of (head, dim / 4, token, 4): as accelerators that load 16 bytes a lane keep K."""
    g = group(component("layer page head dim token dim:4"))
    view = component_view(g, g.components[0])
    dense = np.arange(2 * 2 * 4 * 4).reshape(2, 2, 4, 4) * 2  # head, dim / 4, token, 4
    want = dense.transpose(2, 0, 1, 3).reshape(4, 2, 8)
    assert np.array_equal(view.token[:, None, None] + view.head[:, None] + view.dim, want)


def test_k_transposed_then_v_inside_a_page() -> None:
    """(head, 2, ...) with K as (dim, token) and V as (token, dim): a CPU engine's page."""
    g = group(component("layer page head kv dim token"), component("layer page head kv token dim", "v"))
    k, v = (component_view(g, c) for c in g.components)
    assert (k.offset, v.offset) == (0, 4 * 8 * 2)
    assert k.token[1] == 2
    assert k.dim[1] == 4 * 2
    assert v.token[1] == 8 * 2
    assert k.head[1] == v.head[1] == 2 * 4 * 8 * 2


def test_a_packed_record_of_codes_and_its_scale() -> None:
    """(token, head): 8 codes, then a float32 scale, 12 bytes a row."""
    row = {"head": 12, "token": 24, "page": 96, "layer": 288}
    scale = Scale("token_head", at=Placement("layer page token head", offset=8, strides=row))
    c = msgspec.structs.replace(component("layer page token head dim", dtype="float8_e4m3fn", strides=row), scale=scale)
    g = group(c)
    assert scale_view(g, c).head.tolist() == [0, 12]
    assert scale_view(g, c).offset == 8
    layout = Layout(MODEL, [g])
    check_memory(validate(layout))
    assert region_sizes(layout) == {"kv": 2 * 288}
    assert bytes_per_token(layout) == 2 * 2 * 12


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_regions_are_as_large_as_their_last_byte(data: st.DataObject) -> None:
    layout = data.draw(layouts(data.draw(models()), (*FLOATS, *EIGHT_BIT)))
    elements = sum(
        c.heads * c.dim * {"float32": 4, "bfloat16": 2, "float16": 2}.get(c.dtype, 1)
        for c in layout.groups[0].components
    )
    g = layout.groups[0]
    dense = elements * g.page_size * g.pages * layout.model.num_layers
    offsets = sum(c.at.offset * (layout.model.num_layers if "{layer}" in c.at.region else 1) for c in g.components)
    scale_bytes = sum(
        4 * c.heads * c.scale.blocks(c.dim) * g.page_size * g.pages * layout.model.num_layers
        for c in g.components
        if c.scale and c.scale.at
    )
    assert sum(region_sizes(layout).values()) == dense + offsets + scale_bytes


def test_strides_that_collide_are_found() -> None:
    narrow = component("layer page token head dim", strides={"token": 24})
    with pytest.raises(LayoutError, match=r"elements of k overlap in region 'kv'"):
        check_memory(Layout(MODEL, [group(narrow)]))
    both = component("layer page token head dim"), component("layer page token head dim", "v", offset=64)
    with pytest.raises(LayoutError, match="elements of k and v overlap"):
        check_memory(Layout(MODEL, [group(*both)]))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_overlaps_are_those_of_single_bytes(data: st.DataObject) -> None:
    """K and V with any strides and offset: refused if and only if some byte belongs to two elements."""
    axes = ["layer", "page", *data.draw(st.permutations(["token", "head", "dim"]))]
    made = []
    for name in ("k", "v"):
        strides = {
            axis: data.draw(st.sampled_from([2, 16, 24, 32, 128, 256]))
            for axis in axes
            if data.draw(st.integers(0, 3)) == 0
        }
        offset = data.draw(st.sampled_from([0, 2, 16, 128, 256, 100_000]))
        made.append(component(" ".join(axes), name, strides=strides, offset=offset))
    g = group(*made, pages=2)
    taken = np.concatenate([(where(g, c.name).ravel()[:, None] + np.arange(2)).ravel() for c in made])
    try:
        check_memory(Layout(MODEL, [g]))
        sound = True
    except LayoutError:
        sound = False
    assert sound == (len(np.unique(taken)) == len(taken))


def test_a_page_too_large_to_check_is_refused_before_it_costs_memory() -> None:
    with pytest.raises(LayoutError, match=r"groups\[0\]: a page of 16777216 elements; at most 4194304 are checked"):
        check_memory(Layout(MODEL, [group(component("layer page token head dim"), page=1 << 20)]))


def test_a_symbolic_layout_has_no_sizes_and_a_missing_region_no_address() -> None:
    with pytest.raises(LayoutError, match="symbolic"):
        region_sizes(from_short("bf16", MODEL))
    g = group(component("layer page token head dim"))
    with pytest.raises(LayoutError, match="no address for region 'kv'"):
        component_view(g, g.components[0]).layer_bases((0, 1), (0,), {})

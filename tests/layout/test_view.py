"""Offsets follow from axis orders: every view against a numpy array of that shape."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.errors import LayoutError
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Component, Group, Layout, Model, Placement, Scale, State
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
    dense = np.arange(2 * 3 * 4 * 2 * 8).reshape([sizes[a] for a in axes]) * 2
    want = dense.transpose([axes.index(a) for a in ("layer", "page", "token", "head", "dim")])
    assert np.array_equal(where(group(component(order)), "k"), want)


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


@pytest.mark.parametrize(
    ("strides", "pages", "layers"),
    [
        ({"page": 64 * 128, "layer": 4 * 128}, 4, "0-31"),  # a layer beyond those of a page comes back into the next
        ({"layer": 256, "page": 128}, 64, "0-1"),  # page 2 of layer 0 is page 0 of layer 1
        ({"layer": 128 * 127, "page": 128}, 128, "0-1"),  # the last page alone
    ],
)
def test_layers_and_pages_far_apart_that_collide_are_found(strides: dict[str, int], pages: int, layers: str) -> None:
    far = component("layer page token head dim", strides=strides)
    with pytest.raises(LayoutError, match="elements of k overlap"):
        check_memory(Layout(MODEL, [group(far, pages=pages, layers=layers)]))


def test_groups_that_collide_in_a_region_are_found() -> None:
    model = Model("m", 2, [*MODEL.states, State("window", "0-1", MODEL.states[0].arrays, window=4)])
    one, size = component("layer page token head dim"), 2 * 3 * 128
    for offset, region, apart in ((0, "kv", False), (size - 2, "kv", False), (size, "kv", True), (0, "kv1", True)):
        other = component("layer page token head dim", offset=offset, region=region)
        layout = Layout(model, [group(one), msgspec.structs.replace(group(other), kind="window")])
        if apart:
            assert check_memory(layout) is layout
        else:
            with pytest.raises(
                LayoutError, match=r"groups\[1\]: elements of k of groups\[0\] and k of groups\[1\] overlap"
            ):
                check_memory(layout)
    each = component("page token head dim", region="k.{layer}")
    with pytest.raises(LayoutError, match=r"overlap in region 'k.1'"):
        check_memory(Layout(MODEL, [group(each), group(component("page token head dim", region="k.1"), layers="0")]))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_overlaps_are_those_of_single_bytes(data: st.DataObject) -> None:
    """K and V of one or two groups with any strides and offset: refused if and only if some byte belongs to two elements."""
    made = []
    for name in ("k", "v"):
        axes = data.draw(st.permutations(["layer", "page", "token", "head", "dim"]))
        strides = {
            axis: data.draw(st.sampled_from([2, 16, 24, 32, 66, 128, 256, 384, 640, 1024]))
            for axis in axes
            if data.draw(st.integers(0, 3)) == 0
        }
        offset = data.draw(st.sampled_from([0, 1, 2, 16, 128, 256, 100_000]))
        made.append(component(" ".join(axes), name, strides=strides, offset=offset))
    apart = data.draw(st.booleans())
    groups = [group(c, pages=5, layers="0-3") for c in made] if apart else [group(*made, pages=5, layers="0-3")]
    taken = np.concatenate(
        [(where(g, c.name).ravel()[:, None] + np.arange(2)).ravel() for g in groups for c in g.components]
    )
    found = ""
    try:
        check_memory(Layout(MODEL, groups))
    except LayoutError as error:
        found = str(error)
    assert ("overlap in region" in found, bool(found)) == (len(np.unique(taken)) < len(taken),) * 2


def test_strides_that_would_cost_long_to_look_through_are_refused() -> None:
    """As a peer may send them: factors of unlike primes, whose sums no axis bounds."""
    at = {"layer": 1_000_003, "page": 999_983, "token": 999_979, "head": 999_961, "dim": 999_959}
    wide = Component("k", "bfloat16", 64, 64, Placement("layer page token head dim", strides=at))
    with pytest.raises(LayoutError, match="strides are too intricate to tell whether elements overlap"):
        check_memory(Layout(MODEL, [Group("attention", "0-99", 64, [wide], 1000)]))


def test_a_page_too_large_to_check_is_refused_before_it_costs_memory() -> None:
    with pytest.raises(LayoutError, match=r"groups\[0\]: a page of 16777216 elements; at most 4194304 are checked"):
        check_memory(Layout(MODEL, [group(component("layer page token head dim"), page=1 << 20)]))


def test_a_symbolic_layout_has_no_sizes_and_a_missing_region_no_address() -> None:
    with pytest.raises(LayoutError, match="symbolic"):
        region_sizes(from_short("bf16", MODEL))
    g = group(component("layer page token head dim"))
    with pytest.raises(LayoutError, match="no address for region 'kv'"):
        component_view(g, g.components[0]).layer_bases((0, 1), (0,), {})

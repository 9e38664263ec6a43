"""Hypothesis strategies: models, layouts of any axis order, page tables; and pools of random bytes for them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from hypothesis import strategies as st

from regauge.layout.dtypes import DTYPES
from regauge.layout.presets import attention_model
from regauge.layout.spec import (
    Array,
    Component,
    Group,
    Kind,
    Layout,
    Model,
    Placement,
    Scale,
    Shard,
    State,
    format_layers,
)
from regauge.layout.validate import validate
from regauge.layout.view import Int64, check_memory, region_sizes
from regauge.plan.boxes import Side
from regauge.plan.reference import Bytes, addresses, component_view, load, scale_view, side_of

FLOATS = ("float32", "bfloat16", "float16")
EIGHT_BIT = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8")


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A model all of whose layers attend to all tokens."""
    array = Array(draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4, 8, 12])))
    return attention_model("m", draw(st.integers(1, 3)), array)


@st.composite
def hybrids(draw: st.DrawFn) -> Model:
    """A model of layers of several kinds: attention, window, latent with an indexer, recurrent."""
    num_layers = draw(st.integers(2, 4))
    kinds: list[Kind] = ["attention", "window", "latent", "recurrent"]
    layer_kinds = [draw(st.sampled_from(kinds)) for _ in range(num_layers)]
    states = []
    for kind in kinds:
        layers = tuple(i for i, k in enumerate(layer_kinds) if k == kind)
        if not layers:
            continue
        heads, dim = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([4, 8]))
        arrays = {"k": Array(heads, dim), "v": Array(heads, dim)}
        if kind == "latent":
            arrays = {"latent": Array(1, 2 * dim), "rope": Array(1, 2)}
            states.append(State("indexer", format_layers(layers), {"index_k": Array(1, dim)}))
        elif kind == "recurrent":
            arrays = {"conv_q": Array(heads, 3), "ssm_state": Array(2 * heads, dim)}
        window = draw(st.integers(1, 9)) if kind == "window" else 0
        states.append(State(kind, format_layers(layers), arrays, window))
    return Model("m", num_layers, states)


@st.composite
def scales(draw: st.DrawFn, component: Component, layers: int) -> Scale | None:
    dtype, heads, order, region = component.dtype, component.heads, component.at.order, component.at.region
    if dtype not in EIGHT_BIT:
        return None
    rule = draw(st.sampled_from(["reciprocal", "divide"]))
    per = draw(st.sampled_from([None, "tensor", "head", "token_head", "block"]))
    number = st.sampled_from([1.0, 0.5, 0.037, 3.7, 1e-4, 64.0])
    match per:
        case None:
            return None
        case "tensor":
            return Scale(
                per="tensor",
                values=draw(st.one_of(number, st.lists(number, min_size=layers, max_size=layers))),
                rule=rule,
            )
        case "head":
            row = st.lists(number, min_size=heads, max_size=heads)
            return Scale(per="head", values=draw(st.lists(row, min_size=layers, max_size=layers)), rule=rule)
    region = f"{component.name}_scale{'.{layer}' if '{layer}' in region else ''}"
    if per == "token_head" or component.dim % 4:
        inner = " ".join(a for a in order.split() if a in ("layer", "page", "token", "head"))
        return Scale(per="token_head", at=Placement(order=inner, region=region), rule=rule)
    inner = " ".join(a for a in order.split() if a in ("layer", "page", "token", "head", "dim"))
    block = draw(st.sampled_from([4, component.dim]))
    return Scale(per="block", block=block, at=Placement(order=inner, region=region), rule=rule)


@st.composite
def shards(draw: st.DrawFn, model: Model) -> Shard:
    """A rank of a tensor- and context-parallel group that the model's heads divide over."""
    heads = [a.heads for s in model.states for a in s.arrays.values()]
    fits = [n for n in (1, 2, 3, 4, 6, 8) if all(h % n == 0 or n % h == 0 for h in heads)]
    tp, cp = draw(st.sampled_from(fits)), draw(st.sampled_from([1, 1, 2, 3]))
    return Shard(
        tp_rank=draw(st.integers(0, tp - 1)), tp_size=tp, cp_rank=draw(st.integers(0, cp - 1)), cp_size=cp,
        cp_stripe=draw(st.integers(1, 5)) if cp > 1 else 1)  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, model: Model, dtypes: tuple[str, ...] = FLOATS, *, shard: Shard | None = None) -> Layout:
    shard = shard or Shard()
    groups = [draw(_groups(state, shard, dtypes, index)) for index, state in enumerate(model.states)]
    return check_memory(validate(Layout(model, groups, shard)))


@st.composite
def _groups(draw: st.DrawFn, state: State, shard: Shard, dtypes: tuple[str, ...], index: int) -> Group:
    dtype = draw(st.sampled_from(dtypes))
    fused = len(set(state.arrays.values())) == 1 and len(state.arrays) == 2 and draw(st.booleans())
    per_layer = draw(st.booleans())
    components: list[Component] = []
    for name, array in state.arrays.items():
        axes = ["page", "head", "dim", *(["kv"] if fused else []), *([] if per_layer else ["layer"])]
        if state.kind != "recurrent" or draw(st.booleans()):
            axes.append("token")
        if not components or not fused:
            axes = draw(st.permutations(axes))
            if array.dim % 4 == 0 and draw(st.booleans()):
                axes = [*axes, "dim:4"]
            order = " ".join(axes)
        region = (f"kv{index}" if fused else f"{name}{index}") + (".{layer}" if per_layer else "")
        at = Placement(order=order, region=region, offset=draw(st.sampled_from([0, 64])) if not fused else 0)
        component = Component(name, dtype, len(shard.heads(array.heads)), array.dim, at)
        scale = draw(scales(component, len(state.layer_ids)))
        if scale is not None and scale.at is not None:
            there = msgspec.structs.replace(scale.at, region=f"{index}{scale.at.region}")
            scale = msgspec.structs.replace(scale, at=there)
        components.append(msgspec.structs.replace(component, scale=scale))
    page_size = 1 if state.kind == "recurrent" else draw(st.integers(1, 9))
    return Group(state.kind, state.layers, page_size, components, pages=draw(st.integers(3, 7)))


@dataclass
class Pool:
    """Memory for a layout, and the side that a page table makes of it."""

    layout: Layout
    memory: Bytes
    bases: dict[str, int]

    @classmethod
    def of(cls, layout: Layout, rng: np.random.Generator, *, pad: int = 64) -> Pool:
        bases, end = {}, pad
        for name, size in region_sizes(layout).items():
            bases[name] = end
            end += size + pad
        pool = cls(layout, rng.integers(0, 256, end, np.uint8), bases)
        pool.make_scales_positive(rng)
        return pool

    def make_scales_positive(self, rng: np.random.Generator) -> None:
        for group in self.layout.groups:
            everything = Side(np.arange(group.pages), self.bases)
            for c in group.components:
                if c.scale is not None and c.scale.at is not None:
                    where = addresses(scale_view(group, c), group, everything, _all(group), group.layer_ids)
                    values = np.exp(rng.normal(0, 3, where.shape)).astype(np.float32)
                    self.memory[where[..., None] + np.arange(4)] = values[..., None].view(np.uint8)

    def side(self, pages: Int64, origin: int = 0) -> Side:
        """Return the side as absolute addresses, for kernels."""
        return side_of(self.memory, self.bases, pages, origin)

    def offsets(self, pages: Int64, origin: int = 0) -> Side:
        """Return the side as offsets into `memory`, for the reference."""
        return Side(pages, self.bases, origin)

    def copy(self) -> Pool:
        return Pool(self.layout, self.memory.copy(), self.bases)


def _all(group: Group) -> Int64:
    return np.arange(group.pages * group.page_size)


@st.composite
def page_tables(draw: st.DrawFn, group: Group, end: int, origin: int = 0) -> Int64:
    count = -(-(end - origin) // group.page_size)
    return np.array(draw(st.permutations(range(group.pages)))[:count], np.int64)


def assert_same(got: Pool, expected: Pool) -> None:
    """Every byte equal, except that a NaN may have another payload."""
    if np.array_equal(got.memory, expected.memory):
        return
    a, b = got.memory.copy(), expected.memory.copy()
    for group in got.layout.groups:
        everything = Side(np.arange(group.pages), got.bases)
        for c in group.components:
            where = addresses(component_view(group, c), group, everything, _all(group), group.layer_ids)
            x, y = load(a, where, c.dtype).astype(np.float32), load(b, where, c.dtype).astype(np.float32)
            nan = np.isnan(x)
            assert np.array_equal(nan, np.isnan(y)), f"NaNs of {c.name} differ"
            for memory in (a, b):
                memory[where[nan][..., None] + np.arange(DTYPES[c.dtype].itemsize)] = 0
    different = np.nonzero(a != b)[0]
    assert not len(different), f"{len(different)} bytes differ, the first at offset {different[0]}"

"""Hypothesis strategies: models, layouts of any axis order, page tables; and pools of random bytes for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Component, Group, Layout, Model, Placement, Scale, Shard, validate
from regauge.layout.view import Int64, check_memory, region_sizes
from regauge.plan.planner import Side
from regauge.plan.reference import Bytes, addresses, component_view, load, scale_view, side_of

FLOATS = ("float32", "bfloat16", "float16")
EIGHT_BIT = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8")


@st.composite
def models(draw: st.DrawFn) -> Model:
    return Model(
        name="m",
        num_layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.sampled_from([1, 2, 3, 4])),
        head_dim=draw(st.sampled_from([1, 2, 4, 8, 12])),
    )


@st.composite
def scales(draw: st.DrawFn, dtype: str, layers: int, heads: int, order: str, region: str) -> Scale | None:
    if dtype not in EIGHT_BIT:
        return None
    rule = draw(st.sampled_from(["reciprocal", "divide"]))
    per = draw(st.sampled_from([None, "tensor", "head", "token_head"]))
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
    inner = " ".join(a for a in order.split() if a in ("layer", "page", "token", "head"))
    return Scale(per="token_head", at=Placement(order=inner, region=f"{region}_scale"), rule=rule)


@st.composite
def layouts(draw: st.DrawFn, model: Model, dtypes: tuple[str, ...] = FLOATS, *, shard: Shard | None = None) -> Layout:
    shard = shard or Shard()
    heads = len(shard.heads(model.kv_heads))
    dtype = draw(st.sampled_from(dtypes))
    fused = draw(st.booleans())
    per_layer = draw(st.booleans())
    components = []
    for name in ("k", "v"):
        axes = ["page", "token", "head", "dim", *(["kv"] if fused else []), *([] if per_layer else ["layer"])]
        if not components or not fused:
            axes = draw(st.permutations(axes))
            if model.head_dim % 4 == 0 and draw(st.booleans()):
                axes = [*axes, "dim:4"]
            order = " ".join(axes)
        region = ("kv" if fused else name) + (".{layer}" if per_layer else "")
        strides = {}
        at = Placement(
            order=order, region=region, offset=draw(st.sampled_from([0, 64])) if not fused else 0, strides=strides
        )
        scale = draw(scales(dtype, model.num_layers, heads, order, f"{name}{'.{layer}' if per_layer else ''}"))
        components.append(Component(name, dtype, heads, model.head_dim, at, scale))
    group = Group(
        "attention", f"0-{model.num_layers - 1}", draw(st.integers(1, 9)), components, pages=draw(st.integers(3, 7))
    )
    return check_memory(validate(Layout(model, [group], shard)))


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
                    where = addresses(
                        scale_view(group, c), group, everything, (0, group.pages * group.page_size), group.layer_ids
                    )
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
            where = addresses(
                component_view(group, c), group, everything, (0, group.pages * group.page_size), group.layer_ids
            )
            x, y = load(a, where, c.dtype).astype(np.float32), load(b, where, c.dtype).astype(np.float32)
            nan = np.isnan(x)
            assert np.array_equal(nan, np.isnan(y)), f"NaNs of {c.name} differ"
            for memory in (a, b):
                memory[where[nan][..., None] + np.arange(DTYPES[c.dtype].itemsize)] = 0
    different = np.nonzero(a != b)[0]
    assert not len(different), f"{len(different)} bytes differ, the first at offset {different[0]}"

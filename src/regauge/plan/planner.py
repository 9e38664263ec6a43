"""Two layouts in, a plan out: the three paths in one place.

`compile` turns a pair of layouts into lanes, once per pair of ranks. A lane is one array (a component's elements, or its
stored scales) seen as two strided views over the same logical index (layer, token, head, dim). `instantiate` adds two page tables and
a token range: between page boundaries of either side tokens run on with constant strides, so each such run is a
box of nested loops. DIRECT, REMAP and CONVERT are the same boxes; they differ in how far the loops merge and in whether elements change.

One plan is for one prefill rank and one decode rank, and carries what both hold; `regauge.plan.ranks` pairs the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import numpy.typing as npt

from regauge.errors import Refused
from regauge.layout.spec import Component, Group, Layout, Scale, Shard, scale_table
from regauge.layout.view import View, component_view, scale_view
from regauge.plan.axes import Loop, factor, merge
from regauge.plan.check import LaneVerdict, Verdict, check
from regauge.plan.tiles import Int64


@dataclass(frozen=True, slots=True, eq=False)
class ScaleOperand:
    """Where a kernel finds the scale of (layer, token, head, dim): in a constant table or in the pool."""

    table: npt.NDArray[np.float32] | None
    """Constant scales, float32[layers of the lane, heads of the lane]."""
    view: View | None
    heads: Int64
    """Offset of each head of the lane, int64[heads]."""
    dims: Int64
    """Offset of the scale of each element of a head, int64[dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """The loops of one token's elements, and how tokens run on: the same for every transfer, so made once."""

    heads: tuple[Loop, ...]
    dims: tuple[Loop, ...]
    rest: Int64
    """Offsets that no loop describes, int64[n, operands]: source, target, their scales."""
    regular: bool
    """Whether the elements of a head are loops alone."""
    blocks: tuple[int, int]
    """Tokens that lie at a constant step from each other, on either side, from the start of a page."""
    layer_ids: tuple[tuple[int, ...], tuple[int, ...]]
    """Layers of either group, in memory order."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """One array of elements on its way from a prefill group to a decode group."""

    name: str
    """The component, or `... scale` for its stored scales."""
    heads: tuple[int, ...]
    """Global heads."""
    src_group: Group
    dst_group: Group
    pair: tuple[int, int]
    """Index of the prefill group and of the decode group."""
    layers: tuple[int, ...]
    src: View
    dst: View
    src_heads: Int64
    dst_heads: Int64
    src_dtype: str
    dst_dtype: str
    converts: bool
    formats: tuple[Scale | None, Scale | None]
    """How each side scales."""
    shards: tuple[Shard, ...]
    """Those who must hold a token that is carried: prefill, decode, and others if the plan is one leg of a way."""
    src_scale: ScaleOperand | None
    dst_scale: ScaleOperand | None
    inside: Inside

    @property
    def dynamic(self) -> bool:
        """Whether the target's scales are computed from the values and written beside the codes."""
        return self.converts and self.dst_scale is not None and self.dst_scale.view is not None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a pair of layouts compiles to."""

    prefill: Layout
    decode: Layout
    verdict: Verdict
    lanes: tuple[Lane, ...]

    def layers_of(self, pair: tuple[int, int]) -> tuple[int, ...]:
        """Return the layers that a pair of groups shares, ascending."""
        return tuple(sorted({x for lane in self.lanes if lane.pair == pair for x in lane.layers}))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of groups between which something crosses."""
        return tuple(dict.fromkeys(lane.pair for lane in self.lanes))


Take = Mapping[tuple[str, str, int], Collection[int]]
"""Which heads one pair of ranks carries: global heads by (kind, component, layer)."""


def compile(  # noqa: A001  # the field's own word for it
    prefill: Layout, decode: Layout, *, take: Take | None = None, whole: bool = True, among: tuple[Shard, ...] = ()
) -> Plan:
    """Compile a pair of layouts, each of one rank.

    `take` limits the plan to what this pair carries; default: all that both hold. `among` limits it to tokens that those
    ranks hold too. Raises Refused, with every reason, where `check`, which `whole` is for, refuses.
    """
    verdict = check(prefill, decode, whole=whole)
    if verdict.path == "REFUSED":
        raise Refused(tuple(str(r) for r in verdict.refusals))
    lanes: list[Lane] = []
    for lane in verdict.lanes:
        for part in _taken(prefill, lane, take):
            lanes += _compile_lane(prefill, decode, part, among)
    return Plan(prefill, decode, verdict, tuple(lanes))


def _taken(prefill: Layout, lane: LaneVerdict, take: Take | None) -> Iterator[LaneVerdict]:
    """Cut a lane into those layers that carry the same heads."""
    if take is None:
        yield lane
        return
    kind = prefill.groups[lane.prefill_group].kind
    by_heads: dict[tuple[int, ...], list[int]] = {}
    for layer in lane.layers:
        wanted = take.get((kind, lane.component, layer), ())
        by_heads.setdefault(tuple(h for h in lane.heads if h in wanted), []).append(layer)
    for heads, layers in by_heads.items():
        if heads:
            yield replace(lane, heads=heads, layers=tuple(layers))


def _compile_lane(prefill: Layout, decode: Layout, verdict: LaneVerdict, among: tuple[Shard, ...]) -> Iterator[Lane]:
    src, dst = prefill.groups[verdict.prefill_group], decode.groups[verdict.decode_group]
    a, b = src.component(verdict.component), dst.component(verdict.component)
    a_index = np.array(verdict.heads) - prefill.heads(src, a)[0]
    b_index = np.array(verdict.heads) - decode.heads(dst, b)[0]
    converts = verdict.path == "CONVERT"
    src_scale = _operand(src, a, a_index, verdict.layers) if converts else None
    dst_scale = _operand(dst, b, b_index, verdict.layers) if converts else None
    pair = (verdict.prefill_group, verdict.decode_group)
    layer_ids = src.layer_ids, dst.layer_ids

    def lane(name: str, va: View, vb: View, dtypes: tuple[str, str]) -> Lane:
        places = va.head[a_index], vb.head[b_index]
        return Lane(name, verdict.heads, src, dst, pair, verdict.layers, va, vb, *places, *dtypes,
                    converts=converts, formats=(a.scale, b.scale), shards=(prefill.shard, decode.shard, *among),
                    src_scale=src_scale, dst_scale=dst_scale,
                    inside=_inside((va, vb), places, (src_scale, dst_scale), layer_ids))  # fmt: skip

    yield lane(a.name, component_view(src, a), component_view(dst, b), (a.dtype, b.dtype))
    if not converts and a.scale is not None and a.scale.at is not None:
        yield lane(f"{a.name} scale", scale_view(src, a), scale_view(dst, b), (a.scale.dtype, a.scale.dtype))


def _inside(
    views: tuple[View, View], heads: tuple[Int64, Int64], operands: tuple[ScaleOperand | None, ScaleOperand | None],
    layer_ids: tuple[tuple[int, ...], tuple[int, ...]],
) -> Inside:  # fmt: skip
    scales = [s for s in operands if s is not None]
    head_loops, head_rest = factor(np.stack([*heads, *(s.heads for s in scales)], axis=1))
    dim_loops, dim_rest = factor(np.stack([*(v.dim for v in views), *(s.dims for s in scales)], axis=1))
    blocks = []
    for view, scale in zip(views, operands, strict=True):
        together = [view] if scale is None or scale.view is None else [view, scale.view]
        blocks.append(gcd(*(_regular_block(v.token) for v in together)))
    rest = (head_rest[:, None, :] + dim_rest[None, :, :]).reshape(-1, 2 + len(scales))
    return Inside(tuple(head_loops), tuple(dim_loops), rest, len(dim_rest) == 1, (blocks[0], blocks[1]), layer_ids)


def _regular_block(table: Int64) -> int:
    loops, _ = factor(table[:, None])
    merged = merge(loops)
    return merged[-1].count if merged else 1


def _operand(group: Group, component: Component, heads: Int64, layers: tuple[int, ...]) -> ScaleOperand | None:
    scale = component.scale
    if scale is None:
        return None
    if scale.at is not None:
        view = scale_view(group, component)
        return ScaleOperand(None, view, view.head[heads], np.repeat(view.dim, component.dim // len(view.dim)))
    rows = np.array(scale_table(scale, len(group.layer_ids), component.heads), np.float32)
    position = {layer: i for i, layer in enumerate(group.layer_ids)}
    table = np.ascontiguousarray(rows[[position[x] for x in layers]][:, heads])
    if (table == 1.0).all():
        return None
    step = 0 if scale.per == "tensor" else 4
    return ScaleOperand(table, None, np.arange(len(heads)) * step, np.zeros(component.dim, np.int64))


def live(group: Group, layout: Layout, tokens: tuple[int, int], length: int) -> tuple[int, int]:
    """Return those of tokens [first, end) that a group needs for a context of `length` tokens, as `instantiate` takes them.

    Window layers: only the last `window` tokens. Recurrent layers: the record, (0, 1), once the context is complete, and
    nothing before: a state is that of an exact length.
    """
    first, end = tokens
    if group.kind == "recurrent":
        return (0, 1) if end == length else (0, 0)
    if group.kind == "window":
        first = min(end, max(first, length - layout.model.state(group.kind, group.layer_ids[0]).window))
    return first, end

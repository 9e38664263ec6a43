"""The format between gather and scatter: what a chunk looks like in a staging slab and on the wire.

It is a layout like any other (one page of n tokens, layers outermost, each layer's arrays back to back), so that the same planner
compiles source -> wire and wire -> target. Its dtype and scales are those of the narrower side: narrow before
the wire, widen after.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from regauge.layout.dtypes import DTYPES, SCALE_DTYPES
from regauge.layout.spec import Component, Group, Layout, Placement, Scale, Shard, format_layers, scale_table
from regauge.layout.view import element_bytes
from regauge.plan.planner import Plan, compile

ConvertAt = Literal["auto", "prefill", "decode"]
REGION = "wire"
_ALIGN = 64
_CACHED = 64


class WireFormat:
    """The two halves of a staged transfer, compiled per number of tokens in a chunk."""

    def __init__(self, plan: Plan, *, convert_at: ConvertAt = "auto") -> None:
        self.plan = plan
        self.convert_at = convert_at
        self._halves: dict[tuple[tuple[int, int], int], tuple[Plan, Plan]] = {}
        self._bytes: dict[tuple[tuple[int, int], int], int] = {}

    def halves(self, pair: tuple[int, int], tokens: int) -> tuple[Plan, Plan]:
        """Return the plans source -> wire and wire -> target for chunks of that many tokens of a pair of groups."""
        key = (pair, tokens)
        if key not in self._halves:
            if len(self._halves) >= _CACHED:
                del self._halves[next(iter(self._halves))]
            wire = self.layout(pair, tokens)
            self._halves[key] = (
                compile(_only(self.plan.prefill, pair[0]), wire, whole=False, among=(self.plan.decode.shard,)),
                compile(wire, _only(self.plan.decode, pair[1]), whole=False, among=(self.plan.prefill.shard,)),
            )
        return self._halves[key]

    def layer_bytes(self, pair: tuple[int, int], tokens: int) -> int:
        """Return the bytes of one layer of a chunk on the wire."""
        key = (pair, tokens)
        if key not in self._bytes:
            if len(self._bytes) >= 64 * _CACHED:
                self._bytes.clear()
            self._bytes[key] = self.layout(pair, tokens).groups[0].components[0].at.strides["layer"]
        return self._bytes[key]

    def layout(self, pair: tuple[int, int], tokens: int) -> Layout:
        """Return the wire layout of a chunk of that many tokens, all shared layers, the heads that the plan carries."""
        layers = self.plan.layers_of(pair)
        prefill, decode = self.plan.prefill, self.plan.decode
        src, dst = prefill.groups[pair[0]], decode.groups[pair[1]]
        shard = _packing(prefill.shard, decode.shard)
        count = _most(shard, tokens)
        built: list[tuple[Component, Placement, Placement | None]] = []
        offset = 0
        for lane in self.plan.lanes:
            if lane.pair != pair or lane.name not in {c.name for c in dst.components}:
                continue
            a, b = src.component(lane.name), dst.component(lane.name)
            narrow, group, first = (
                (b, dst, decode.heads(dst, b)[0]) if self.narrows(a, b) else (a, src, prefill.heads(src, a)[0])
            )
            heads = len(lane.heads)
            at = Placement(order="layer page token head dim", region=REGION, offset=offset)
            offset = _aligned(offset + count * heads * b.dim * DTYPES[narrow.dtype].itemsize)
            scale, stored = narrow.scale, None
            if scale is not None and scale.at is not None:
                blocks = scale.blocks(b.dim)
                order = "layer page token head" + (" dim" if scale.per == "block" else "")
                stored = Placement(order=order, region=REGION, offset=offset)
                offset = _aligned(offset + count * heads * blocks * SCALE_DTYPES[scale.dtype])
            elif scale is not None:
                scale = _restrict(scale, group, narrow.heads, layers, [h - first for h in lane.heads])
            built.append(
                (Component(b.name, narrow.dtype, heads, b.dim, at, scale, first_head=lane.heads[0]), at, stored)
            )
        components = [_place(c, at, stored, offset) for c, at, stored in built]
        group = Group(dst.kind, format_layers(layers), count, components, pages=1)
        return Layout(decode.model, [group], shard)

    def narrows(self, a: Component, b: Component) -> bool:
        """Say whether the wire carries the target's codes, so that the source side converts: where those and their scales are not longer."""
        if self.convert_at != "auto":
            return self.convert_at == "prefill"
        return element_bytes(b) * a.heads <= element_bytes(a) * b.heads  # the ranks may hold unlike numbers of heads


def _packing(prefill: Shard, decode: Shard) -> Shard:
    """Return how tokens are packed on the wire: as on the side that deals them out to more ranks."""
    side = prefill if prefill.cp_size > decode.cp_size else decode
    return Shard(cp_rank=side.cp_rank, cp_size=side.cp_size, cp_stripe=side.cp_stripe)


def _most(shard: Shard, tokens: int) -> int:
    """Return the most of so many neighbouring tokens that one rank can hold."""
    turns, rest = divmod(tokens, shard.cp_stripe * shard.cp_size)
    return turns * shard.cp_stripe + min(rest, shard.cp_stripe)


def _place(component: Component, at: Placement, stored: Placement | None, layer: int) -> Component:
    strides = {"layer": layer}
    scale = component.scale
    if scale is not None and stored is not None:
        scale = msgspec.structs.replace(scale, at=msgspec.structs.replace(stored, strides=strides))
    return msgspec.structs.replace(component, at=msgspec.structs.replace(at, strides=strides), scale=scale)


def _restrict(scale: Scale, group: Group, heads: int, layers: tuple[int, ...], keep: list[int]) -> Scale:
    rows = scale_table(scale, len(group.layer_ids), heads)
    position = {layer: i for i, layer in enumerate(group.layer_ids)}
    return msgspec.structs.replace(scale, values=[[rows[position[x]][h] for h in keep] for x in layers])


def _only(layout: Layout, group: int) -> Layout:
    return msgspec.structs.replace(layout, groups=[layout.groups[group]])


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN

"""The format between gather and scatter: what a chunk looks like in a staging slab and on the wire.

It is a layout like any other (one page of n tokens, layers outermost, each layer's arrays back to back), so that the same planner
compiles source -> wire and wire -> target. Its dtype and scales are those of the narrower side: narrow before
the wire, widen after.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Component, Group, Layout, Placement, Scale, format_layers, scale_table
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

    def halves(self, pair: tuple[int, int], tokens: int) -> tuple[Plan, Plan]:
        """Return the plans source -> wire and wire -> target for chunks of that many tokens of a pair of groups."""
        key = (pair, tokens)
        if key not in self._halves:
            if len(self._halves) >= _CACHED:
                del self._halves[next(iter(self._halves))]
            wire = self.layout(pair, tokens)
            self._halves[key] = (
                compile(_only(self.plan.prefill, pair[0]), wire),
                compile(wire, _only(self.plan.decode, pair[1])),
            )
        return self._halves[key]

    def layer_bytes(self, pair: tuple[int, int], tokens: int) -> int:
        """Return the bytes of one layer of a chunk on the wire."""
        return self.layout(pair, tokens).groups[0].components[0].at.strides["layer"]

    def layout(self, pair: tuple[int, int], tokens: int) -> Layout:
        """Return the wire layout of a chunk of that many tokens, all shared layers."""
        layers = self.plan.layers_of(pair)
        src, dst = self.plan.prefill.groups[pair[0]], self.plan.decode.groups[pair[1]]
        built: list[tuple[Component, Placement, Placement | None]] = []
        offset = 0
        for b in dst.components:
            a = next(c for c in src.components if c.name == b.name)
            narrow, group, heads = (
                (b, dst, self.plan.decode.heads) if self._narrows(a, b) else (a, src, self.plan.prefill.heads)
            )
            keep = [h - heads[0] for h in self.plan.decode.heads]
            at = Placement(order="layer page token head dim", region=REGION, offset=offset)
            offset = _aligned(offset + tokens * b.heads * b.dim * DTYPES[narrow.dtype].itemsize)
            scale, stored = narrow.scale, None
            if scale is not None and scale.at is not None:
                stored = Placement(order="layer page token head", region=REGION, offset=offset)
                offset = _aligned(offset + tokens * b.heads * 4)
            elif scale is not None:
                scale = _restrict(scale, group, narrow.heads, layers, keep)
            built.append((msgspec.structs.replace(narrow, heads=b.heads, at=at, scale=scale), at, stored))
        components = [_place(c, at, stored, offset) for c, at, stored in built]
        group = Group(dst.kind, format_layers(layers), tokens, components, pages=1)
        return Layout(self.plan.decode.model, [group], self.plan.decode.shard)

    def _narrows(self, a: Component, b: Component) -> bool:
        """Say whether the wire carries the target's codes: then the source side converts."""
        if self.convert_at != "auto":
            return self.convert_at == "prefill"
        return DTYPES[b.dtype].itemsize <= DTYPES[a.dtype].itemsize


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

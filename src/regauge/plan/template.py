"""Boxes of all layers for some tokens, made once and then cut: what one write of a few layers needs. No I/O.

Instantiating 1,024 tokens takes as long for one layer as for 32, and longer than moving them. Where a side is a staging slot, the
boxes are made for a slot at `SLOT`, an address where no memory is, and moved to the slot of each write.
"""

from __future__ import annotations

from dataclasses import replace

from regauge.plan.boxes import Side, instantiate
from regauge.plan.digest import Keys
from regauge.plan.planner import Plan
from regauge.plan.tiles import Convert, Int64, Keyed, Tiles

SLOT = 1 << 56
"""Where a slot lies in a template: above all memory of a process (user space ends at 2**47, with five-level tables at 2**56)."""


class Template:
    """Boxes of tokens [first, end) of one pair of groups, for all layers that both sides share."""

    def __init__(
        self, plan: Plan, prefill: Side, decode: Side, tokens: tuple[int, int], *, pair: tuple[int, int],
        keys: Keys | None = None,
    ) -> None:  # fmt: skip
        """Raises PlanError as `instantiate` does."""
        layers = plan.layers_of(pair)
        lanes = [lane for lane in plan.lanes if lane.pair == pair]
        # Each layer's boxes lie together if all arrays have the same layers; else layers are made one by one.
        parts = [layers] if all(lane.layers == layers for lane in lanes) else [(x,) for x in layers]
        self._single = len(parts) == 1
        self._layers = len(layers)
        self._boxes = [instantiate(plan, prefill, decode, tokens, pair=pair, layers=part, keys=keys) for part in parts]

    def of(self, layers: tuple[int, int], slot: int = SLOT) -> list[Tiles]:
        """Return the boxes of the layers at positions [first, end); those of a staging slot begin at `slot` plus their layer's offset."""
        first, end = layers
        if not self._single:
            return [_cut(box, slice(None), slot - SLOT) for part in self._boxes[first:end] for box in part]
        out = []
        for box in self._boxes[0]:
            each = len(box.src) // self._layers
            out.append(_cut(box, slice(first * each, end * each), slot - SLOT))
        return out


def _cut(box: Tiles, rows: slice, by: int) -> Tiles:
    convert = box.convert
    return replace(
        box, src=_moved(box.src, rows, by), dst=_moved(box.dst, rows, by),
        convert=None if convert is None else _cut_convert(convert, rows, by),
        src_keys=_cut_keys(box.src_keys, rows), dst_keys=_cut_keys(box.dst_keys, rows),
    )  # fmt: skip


def _cut_convert(convert: Convert, rows: slice, by: int) -> Convert:
    scales = (None if x is None else _moved(x, rows, by) for x in (convert.src_scale, convert.dst_scale))
    src_scale, dst_scale = scales
    return replace(convert, src_scale=src_scale, dst_scale=dst_scale)


def _cut_keys(keys: Keyed | None, rows: slice) -> Keyed | None:
    return None if keys is None else replace(keys, row=keys.row[rows], token=keys.token[rows])


def _moved(addresses: Int64, rows: slice, by: int) -> Int64:
    """Return some of an operand's addresses, moved if they are of a slot."""
    some = addresses[rows]
    return some + by if by and len(some) and some[0] >= SLOT // 2 else some

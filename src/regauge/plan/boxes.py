"""A plan, two page tables and a token range in; boxes of bytes out, and boxes as pieces of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from regauge.errors import PlanError
from regauge.layout.spec import Group, Scale
from regauge.layout.view import View
from regauge.plan.axes import Loop, coalesce, columns, merge, outer_sum
from regauge.plan.digest import Keys
from regauge.plan.keyed import Operand, Runs, Table, add_keys
from regauge.plan.planner import Lane, Plan, ScaleOperand
from regauge.plan.stripes import owned, packed
from regauge.plan.tiles import Convert, Int64, Tiles

MAX_PIECES = 1 << 23
"""Most pieces that are expanded at once: 192 MiB of addresses."""


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Where the tokens of one transfer lie on one side, in one group of its layout."""

    pages: Int64
    """Page table: the pages that hold tokens `origin`, `origin` + 1, ... in order, int64[n]. Recurrent: the one record.

    Under context parallelism, the pages that hold those of these tokens that are this rank's.
    """
    bases: Mapping[str, int]
    """Address of each region."""
    origin: int = 0
    """Position of the first token of the first page; under context parallelism, the first that the rank holds."""


def instantiate(
    plan: Plan,
    prefill: Side,
    decode: Side,
    tokens: tuple[int, int],
    *,
    pair: tuple[int, int] | None = None,
    layers: Sequence[int] | None = None,
    keys: Keys | None = None,
) -> list[Tiles]:
    """Return the boxes that carry tokens [first, end) of the given layers (default: all) of a pair of groups (default: all).

    Under context parallelism the tokens that both ranks hold. For a recurrent group `tokens` is (0, 1): see `live`. With
    `keys` the boxes can be digested by `regauge.move.digest`.

    Raises PlanError for tokens that a page table does not cover, pages or layers that do not exist, symbolic layouts.
    """
    out: list[Tiles] = []
    table = None if keys is None else Table(keys, tokens)
    runs: dict[tuple[tuple[int, int], tuple[int, int]], _Runs] = {}
    wanted = None if layers is None else tuple(layers)
    for lane in plan.lanes:
        if pair is not None and lane.pair != pair:
            continue
        if wanted is not None and (gone := set(wanted) - set(plan.layers_of(lane.pair))):
            raise PlanError(f"layers {sorted(gone)} are not on both sides")
        ids = lane.layers if wanted is None else tuple(x for x in wanted if x in lane.layers)
        if ids and tokens[0] < tokens[1]:
            key = lane.pair, lane.inside.blocks  # K and V, and scales beside them, are cut alike
            if key not in runs:
                runs[key] = _Runs(lane, prefill, decode, tokens)
            out += _boxes(lane, prefill, decode, runs[key], ids, table)
    return out


class _Runs:
    """Tokens cut into runs, and where each begins in the pages of either side."""

    __slots__ = ("counts", "places", "starts")

    def __init__(self, lane: Lane, prefill: Side, decode: Side, tokens: tuple[int, int]) -> None:
        self.starts, self.counts = _cut(lane, prefill, decode, tokens)
        self.places: list[Int64] = []
        for side, group, shard, name in (
            (prefill, lane.src_group, lane.shards[0], "prefill"),
            (decode, lane.dst_group, lane.shards[1], "decode"),
        ):
            place = packed(shard, self.starts) - int(packed(shard, np.array(side.origin)))
            _check_side(side, group, place, self.counts, name)
            self.places.append(place)

    def alike(self) -> Iterator[tuple[int, Int64, list[Int64]]]:
        """Yield the runs of each length: tokens, the first of each run, and its places on either side."""
        if len(self.counts) and (self.counts == self.counts[0]).all():
            yield int(self.counts[0]), self.starts, self.places
            return
        for n in np.unique(self.counts):
            some = self.counts == n
            yield int(n), self.starts[some], [place[some] for place in self.places]


def _boxes(
    lane: Lane, prefill: Side, decode: Side, runs: _Runs, layers: tuple[int, ...], table: Table | None
) -> Iterator[Tiles]:
    source = (prefill, lane.src_group, lane.inside.layer_ids[0], layers)
    target = (decode, lane.dst_group, lane.inside.layer_ids[1], layers)
    for n, starts, (from_, to) in runs.alike():
        src, dst = _Cursor(lane.src, *source, from_), _Cursor(lane.dst, *target, to)
        src_scale = _scale_cursor(lane, lane.src_scale, source, from_)
        dst_scale = _scale_cursor(lane, lane.dst_scale, target, to)
        plain = _box(lane, n, (src, dst, src_scale, dst_scale))
        if table is None:
            yield plain
            continue
        ends = _operand(src, lane.src_heads, lane.src.dim), _operand(dst, lane.dst_heads, lane.dst.dim)
        scales = _scale_operand(src_scale, lane.src_scale), _scale_operand(dst_scale, lane.dst_scale)
        yield from add_keys(plain, Runs(lane, n, starts, layers, *ends, *scales), table)


def _operand(cursor: _Cursor, heads: Int64, dims: Int64) -> Operand:
    return Operand(cursor.addresses, cursor.step, heads, dims)


def _scale_operand(cursor: _Cursor | None, scale: ScaleOperand | None) -> Operand | None:
    return None if cursor is None or scale is None else _operand(cursor, scale.heads, scale.dims)


_Place = tuple[Side, Group, tuple[int, ...], tuple[int, ...]]
"""A side, its group, the group's layers in memory order, the layers that move."""


class _Cursor:
    """One operand of a box: the address of each run's first token, and the step to the next token."""

    __slots__ = ("addresses", "step")

    def __init__(
        self, view: View, side: Side, group: Group, layer_ids: tuple[int, ...], layers: tuple[int, ...], first: Int64
    ) -> None:
        page, inside = np.divmod(first, group.page_size)
        offsets = side.pages[page] * view.page_stride + view.token[inside]
        self.addresses = outer_sum(view.layer_bases(layer_ids, layers, side.bases), offsets)
        # Runs never cross a boundary of the table's regular blocks, so the step after the first token holds throughout.
        at = int(inside[0])
        self.step = int(view.token[min(at + 1, group.page_size - 1)] - view.token[at])


def _scale_cursor(lane: Lane, scale: ScaleOperand | None, place: _Place, first: Int64) -> _Cursor | None:
    if scale is None:
        return None
    if scale.view is not None:
        return _Cursor(scale.view, *place, first)
    assert scale.table is not None  # noqa: S101  # an operand is one or the other
    cursor = _Cursor.__new__(_Cursor)
    rows = np.array([lane.layers.index(x) for x in place[3]]) * scale.table.strides[0] + scale.table.ctypes.data
    cursor.addresses, cursor.step = np.repeat(rows, len(first)), 0
    return cursor


def _box(lane: Lane, n: int, cursors: tuple[_Cursor | None, ...]) -> Tiles:
    present = [c for c in cursors if c is not None]
    inside = lane.inside
    outer = sorted(
        [Loop(n, tuple(c.step for c in present)), *inside.heads], key=lambda loop: loop.strides, reverse=True
    )
    if lane.converts:
        loops, row_axes = _conversion_loops(lane, outer)
        if lane.dynamic and not inside.regular:
            raise PlanError(f"{lane.name}: a head's elements lie too irregularly to compute one scale over them")
    else:
        loops = merge(sorted([*outer, *inside.dims], key=lambda loop: loop.strides, reverse=True))
        row_axes = 0
    addresses = [outer_sum(c.addresses, inside.rest[:, i]) for i, c in enumerate(present)]
    return _tiles(lane, loops, addresses, row_axes)


def _conversion_loops(lane: Lane, outer: list[Loop]) -> tuple[list[Loop], int]:
    """Return the loops of a conversion, the row's last, and how many of them besides the last belong to the row."""
    operands = len(outer[0].strides)
    single = Loop(1, (lane.src.itemsize, lane.dst.itemsize, *[0] * (operands - 2)))
    # Loops over blocks change the scale: they are not part of a row.
    inner = merge([x for x in lane.inside.dims if not any(x.strides[2:])]) or [single]
    outer = [*outer, *(x for x in lane.inside.dims if any(x.strides[2:]))]
    loops = [*merge(outer), *inner] if lane.dynamic else merge([*outer, *inner]) or [single]
    # A row has one scale: where the innermost loop changes it (head dim 1), a row is a single element.
    if any(loops[-1].strides[2:]):
        loops.append(single)
    return loops, len(inner) - 1 if lane.dynamic else 0


def _tiles(lane: Lane, loops: list[Loop], addresses: list[Int64], row_axes: int) -> Tiles:
    size = lane.src.itemsize
    if not lane.converts:
        contiguous = bool(loops) and loops[-1].strides == (size, size)
        outer = loops[:-1] if contiguous else loops
        run = loops[-1].count * size if contiguous else size
        shape, src_stride, dst_stride = columns(outer, 2)
        return Tiles(addresses[0], addresses[1], shape, src_stride, dst_stride, run)
    *outer, row = loops
    shape, src_stride, dst_stride, *scale_strides = columns(outer, len(addresses))
    scales = list(zip(addresses[2:], scale_strides, strict=True))
    src_scale = scales.pop(0) if lane.src_scale else (None, ())
    dst_scale = scales.pop(0) if lane.dst_scale else (None, ())
    ours, theirs = (s or Scale("tensor") for s in lane.formats)
    convert = Convert(
        src_dtype=lane.src_dtype,
        dst_dtype=lane.dst_dtype,
        src_step=row.strides[0],
        dst_step=row.strides[1],
        rule=theirs.rule,
        floor=theirs.floor,
        pow2=theirs.pow2,
        src_scale_dtype=ours.dtype,
        dst_scale_dtype=theirs.dtype,
        row_axes=row_axes,
        src_scale=src_scale[0],
        src_scale_stride=src_scale[1],
        dst_scale=dst_scale[0],
        dst_scale_stride=dst_scale[1],
        dynamic=lane.dynamic,
        keep=tuple(s.table for s in (lane.src_scale, lane.dst_scale) if s is not None),
    )
    return Tiles(addresses[0], addresses[1], shape, src_stride, dst_stride, row.count, convert)


def _cut(lane: Lane, prefill: Side, decode: Side, tokens: tuple[int, int]) -> tuple[Int64, Int64]:
    """Cut tokens [first, end) wherever a page, a regular block inside a page, or a stripe ends on either side.

    Returns the first token and the number of tokens of every run that both ranks hold.
    """
    first, end = tokens
    cuts = [np.array([first, end])]
    for side, group, shard, block in (
        (prefill, lane.src_group, lane.shards[0], lane.inside.blocks[0]),
        (decode, lane.dst_group, lane.shards[1], lane.inside.blocks[1]),
    ):
        block = gcd(group.page_size, block)
        origin = side.origin
        if shard.cp_size > 1:
            # Blocks end where stripes end if they divide them.
            block = gcd(block, gcd(shard.cp_stripe, int(packed(shard, np.array(origin)))))
            origin = 0
        begin = first + (origin - first) % block
        cuts.append(np.arange(begin, end, block))
    # Packed tokens run on within a stripe only.
    cuts += [np.arange(first - first % x.cp_stripe, end, x.cp_stripe) for x in lane.shards if x.cp_size > 1]
    edges = np.unique(np.concatenate(cuts))
    edges = edges[(edges >= first) & (edges <= end)]
    starts, counts = edges[:-1], edges[1:] - edges[:-1]
    if all(shard.cp_size == 1 for shard in lane.shards):
        return starts, counts
    held = np.logical_and.reduce([owned(shard, starts) for shard in lane.shards])
    return starts[held], counts[held]


def _check_side(side: Side, group: Group, first: Int64, counts: Int64, name: str) -> None:
    """Check that runs of `counts` tokens from place `first` on lie in the page table, and its pages in the pool."""
    if not group.pages:
        raise PlanError(f"the {name} layout is symbolic: it has no pages to move")
    if not len(first):
        return
    low, high, covered = int(first.min()), int((first + counts).max()), len(side.pages) * group.page_size
    if low < 0 or high > covered:
        raise PlanError(
            f"{name}: tokens {side.origin + low}..{side.origin + high - 1} are asked for, the page table of {len(side.pages)} "
            f"pages covers {side.origin}..{side.origin + covered - 1}")  # fmt: skip
    used = side.pages[low // group.page_size : -(-high // group.page_size)]
    if len(used) and (used.min() < 0 or used.max() >= group.pages):
        raise PlanError(
            f"{name}: the page table names page {used.max() if used.min() >= 0 else used.min()} of {group.pages}"
        )


def pieces(tiles: Sequence[Tiles]) -> Int64:
    """Expand boxes that copy into (source, target, bytes), int64[n, 3], neighbours joined, in order of target address.

    Raises PlanError for boxes that convert (those need a kernel) and for more than MAX_PIECES before joining.
    """
    tiles = [box for box in tiles if box.only is None]
    if sum(box.pieces for box in tiles) > MAX_PIECES:
        raise PlanError(f"{sum(box.pieces for box in tiles)} pieces are too many to send one by one: stage them")
    parts = []
    for box in tiles:
        if box.convert is not None:
            raise PlanError("a conversion cannot be sent as pieces of memory")
        src, dst = box.src, box.dst
        for count, a, b in zip(box.shape, box.src_stride, box.dst_stride, strict=True):
            steps = np.arange(count)
            src, dst = outer_sum(src, steps * a), outer_sum(dst, steps * b)
        parts.append(np.stack([src, dst, np.full(len(src), box.run)], axis=1))
    if not parts:
        return np.empty((0, 3), np.int64)
    everything = np.concatenate(parts)
    return coalesce(everything[np.argsort(everything[:, 1], kind="stable")])

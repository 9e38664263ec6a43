"""The elements of one page as cells: byte ranges that cross whole, with where they lie on both sides. For pictures."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from regauge.layout.view import View
from regauge.plan.planner import Lane, Plan
from regauge.plan.stripes import owned, packed
from regauge.plan.tiles import Int64

MAX_TOKENS = 128
"""Most tokens of a page that are looked at."""
MAX_DEALT = 1 << 20
"""Most tokens among which those that both ranks hold are looked for."""
MAX_CELLS = 1 << 19
"""Most cells of one array: elements that lie one by one in a large page are cut to fewer tokens."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A byte range that is contiguous on both sides."""

    array: int
    """Index of the array in `Picture.arrays`."""
    token: int
    head: int
    dim: int
    label: str
    page: int
    """Ordinal of the page on this side."""
    offset: int
    """Bytes from the start of the page in its region; for a plane outside the page, from the page with its number in the first plane."""
    nbytes: int
    span: int
    """Cells of the same number cross as one copy; -1 for what only this side has."""
    key: int
    """The same cell on the other side has the same key."""


@dataclass(frozen=True, slots=True)
class Array:
    """A component's elements or its stored scales."""

    name: str
    dtypes: tuple[str, str]
    regions: tuple[str, str]
    strides: tuple[int, int]
    """Bytes from page to page."""


@dataclass(slots=True)
class Picture:
    """One source page and where its cells lie on both sides."""

    arrays: list[Array] = field(default_factory=list)
    source: list[Cell] = field(default_factory=list)
    target: list[Cell] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Lie:
    """Where an array's cells lie on one side, int64[n] each."""

    region: str
    page: Int64
    offset: Int64
    nbytes: Int64


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """One array's cells, int64[n] each."""

    array: int
    token: Int64
    head: Int64
    dim: Int64
    labels: list[str]
    lies: tuple[_Lie, _Lie]
    converts: bool


def page_cells(plan: Plan, pair: tuple[int, int]) -> Picture:
    """Return the cells of the first source page that holds something of a pair of groups, in the pair's first layer."""
    picture = Picture()
    first = plan.layers_of(pair)[0]
    lanes = [lane for lane in plan.lanes if lane.pair == pair and first in lane.layers]
    blocks = [_block(picture, lane) for lane in lanes]
    keys = 0
    for block, span in zip(blocks, _spans(blocks), strict=True):
        for cells, lie in zip((picture.source, picture.target), block.lies, strict=True):
            columns = (block.token, block.head, block.dim, lie.page, lie.offset, lie.nbytes, span)
            for i, (t, h, d, page, offset, size, number) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
                cells.append(Cell(block.array, t, h, d, block.labels[i], page, offset, size, number, keys + i))
        keys += len(block.token)
    for lane in lanes:
        _add_scales(picture, lane)
    for side in (picture.source, picture.target):
        side.sort(key=lambda c: (c.page, c.array, c.offset))
    return picture


def _block(picture: Picture, lane: Lane) -> _Block:
    heads, dims = _segments(lane)
    room = MAX_CELLS // (len(heads) * len(dims))
    tokens = _tokens(lane, max(1, min(lane.src_group.page_size, MAX_TOKENS, room)))
    picture.tokens = max(picture.tokens, len(tokens))
    picture.arrays.append(Array(lane.name, (lane.src_dtype, lane.dst_dtype), (lane.src.region, lane.dst.region),
                                (lane.src.page_stride, lane.dst.page_stride)))  # fmt: skip
    t, h, d = (x.ravel() for x in np.meshgrid(tokens, np.arange(len(heads)), np.arange(len(dims)), indexing="ij"))
    first_head, first_dim = np.array([x[0] for x in heads])[h], np.array([x[0] for x in dims])[d]
    elements = np.array([x[1] - x[0] for x in heads])[h] * np.array([x[1] - x[0] for x in dims])[d]
    lies = []
    for view, table, group, shard in (
        (lane.src, lane.src_heads, lane.src_group, lane.shards[0]),
        (lane.dst, lane.dst_heads, lane.dst_group, lane.shards[1]),
    ):
        page, inside = np.divmod(packed(shard, t), group.page_size)
        offset = view.offset + view.token[inside] + table[first_head] + view.dim[first_dim]
        lies.append(_Lie(view.region, page, offset, elements * view.itemsize))
    many = len(heads), len(dims)
    labels = [_label(x, heads[y], dims[z], many) for x, y, z in zip(t.tolist(), h.tolist(), d.tolist(), strict=True)]
    return _Block(len(picture.arrays) - 1, t, h, d, labels, (lies[0], lies[1]), lane.converts)


def _spans(blocks: list[_Block]) -> list[Int64]:
    """Number the copies: neighbours that continue each other on both sides share one. A conversion's cells are its rows."""
    names = {region: i for i, region in enumerate({lie.region for b in blocks for lie in b.lies})}
    sides = []
    for side in (0, 1):
        lies = [b.lies[side] for b in blocks]
        region = np.concatenate([np.full(len(lie.page), names[lie.region]) for lie in lies])
        sides.append((region, *(np.concatenate([getattr(x, n) for x in lies]) for n in ("page", "offset", "nbytes"))))
    alone = np.concatenate([np.full(len(b.token), b.converts) for b in blocks])
    order = np.lexsort((sides[1][2], sides[1][1], sides[1][0]))
    joins = ~alone[order][1:] & ~alone[order][:-1]
    for columns in sides:
        region, page, offset, nbytes = (c[order] for c in columns)
        joins &= (region[1:] == region[:-1]) & (page[1:] == page[:-1]) & (offset[1:] == offset[:-1] + nbytes[:-1])
    number = np.empty(len(order), np.int64)
    number[order] = np.concatenate(([0], np.cumsum(~joins)))
    return np.split(number, np.cumsum([len(b.token) for b in blocks])[:-1])


def _tokens(lane: Lane, count: int) -> Int64:
    """The first tokens that both ranks hold, as far as they lie in one source page."""
    if lane.src_group.kind == "recurrent":
        return np.zeros(1, np.int64)
    tokens = np.arange(MAX_DEALT)
    for shard in lane.shards:
        tokens = tokens[owned(shard, tokens)]
    page = packed(lane.shards[0], tokens) // lane.src_group.page_size
    together: Int64 = tokens[page == page[:1]]
    return together[:count]


def _add_scales(picture: Picture, lane: Lane) -> None:
    """Stored scales that a conversion reads or writes: they lie on one side only."""
    tokens = _tokens(lane, picture.tokens)
    for cells, scale, group, side in (
        (picture.source, lane.src_scale, lane.src_group, 0),
        (picture.target, lane.dst_scale, lane.dst_group, 1),
    ):
        if scale is None or scale.view is None:
            continue
        view, index, form = scale.view, len(picture.arrays), lane.formats[side]
        dtype = form.dtype if form is not None else ""
        both = (("", dtype), ("", view.region), (0, view.page_stride))
        if side == 0:
            both = ((dtype, ""), (view.region, ""), (view.page_stride, 0))
        picture.arrays.append(Array(f"{lane.name} scale", *both))
        wide = len(view.dim) * view.itemsize
        heads = _cuts([(scale.heads, wide)])
        places = np.divmod(packed(lane.shards[side], tokens), group.page_size)
        for t, page, inside in zip(tokens.tolist(), *(x.tolist() for x in places), strict=True):
            for head, ends in enumerate(heads):
                label = _label(t, ends, (0, 1), (len(heads), 1))
                offset = view.offset + int(view.token[inside]) + int(scale.heads[ends[0]])
                cells.append(Cell(index, t, head, 0, label, page, offset, (ends[1] - ends[0]) * wide, -1, -1))


def _segments(lane: Lane) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Cut heads and dims into ranges that are contiguous on both sides."""
    dims = _cuts([(lane.src.dim, lane.src.itemsize), (lane.dst.dim, lane.dst.itemsize)])
    heads = [(i, i + 1) for i in range(len(lane.src_heads))]
    if len(dims) == 1:
        blocks = [(table, len(v.dim) * v.itemsize) for table, v in _tables(lane)]
        heads = _cuts(blocks)
    return heads, dims


def _tables(lane: Lane) -> tuple[tuple[Int64, View], tuple[Int64, View]]:
    return (lane.src_heads, lane.src), (lane.dst_heads, lane.dst)


def _cuts(tables: list[tuple[Int64, int]]) -> list[tuple[int, int]]:
    n = len(tables[0][0])
    joins = np.ones(n - 1, bool)
    for table, step in tables:
        joins &= np.diff(table) == step
    edges = [0, *(np.flatnonzero(~joins) + 1).tolist(), n]
    return list(itertools.pairwise(edges))


def _label(token: int, head: tuple[int, int], dim: tuple[int, int], many: tuple[int, int]) -> str:
    parts = [f"t{token}"]
    if many[0] > 1:
        parts.append(f"h{head[0]}")
    if many[1] > 1:
        parts.append(f"d{dim[0]}" if dim[1] - dim[0] == 1 else f"d{dim[0]}-{dim[1] - 1}")
    return " ".join(parts)

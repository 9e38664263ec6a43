"""Boxes whose rows are digested: where the keys of every row lie, found as scales are, by address and stride. No I/O.

A box has one more operand for row keys on each side that is digested, and one for token keys. They keep loops apart that would
merge if only bytes counted, so that the rows of `regauge.plan.digest` stay visible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from regauge.errors import PlanError
from regauge.plan.axes import Loop, columns, factor, merge, outer_sum
from regauge.plan.digest import ROW_KEY, Keys, UInt64, array_name, segment_of
from regauge.plan.planner import Lane, ScaleOperand
from regauge.plan.tiles import End, Int64, Keyed, Tiles

_ROW_BYTES = 8 * ROW_KEY


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One operand of the runs of a lane: the address of each run's first token, layers outermost, and what follows."""

    at: Int64
    token: int
    """Bytes from one token to the next."""
    heads: Int64
    """Offset of each head of the lane."""
    dims: Int64
    """Offset of each element of a head."""


class Table:
    """The keys of the tokens [first, end), for the boxes of one call."""

    def __init__(self, keys: Keys, tokens: tuple[int, int]) -> None:
        self.keys = keys
        self._first = tokens[0]
        self.tokens: UInt64 = keys.tokens(*tokens)

    def token_operand(self, starts: Int64, layers: int, heads: int, dim: int) -> Operand:
        """Return the keys of the tokens of runs that start at these positions."""
        at = self.tokens.ctypes.data + 8 * (starts - self._first)
        return Operand(np.tile(at, layers), 8, np.zeros(heads, np.int64), np.zeros(dim, np.int64))

    def row_operand(self, array: str, layers: tuple[int, ...], heads: tuple[int, ...], dim: int, runs: int) -> Rows:
        """Return the keys of the rows of an array; runs of tokens share them."""
        segment = segment_of(dim)
        segments = dim // segment
        table = np.stack([self.keys.rows(array, layer, heads, segments) for layer in layers])
        at = table.ctypes.data + np.arange(len(layers)) * table.strides[0]
        operand = Operand(
            np.repeat(at, runs), 0,
            np.arange(len(heads)) * segments * _ROW_BYTES, np.arange(dim) // segment * _ROW_BYTES,
        )  # fmt: skip
        return Rows(table, operand)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A table of row keys and the operand that points into it."""

    table: UInt64
    operand: Operand


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of `count` tokens of a lane, where its operands lie (source, target, their scales), and what they are."""

    lane: Lane
    count: int
    starts: Int64
    layers: tuple[int, ...]
    src: Operand
    dst: Operand
    src_scale: Operand | None
    dst_scale: Operand | None

    def scale(self, end: End) -> tuple[ScaleOperand | None, Operand | None]:
        """Return the scales of one end."""
        return (self.lane.src_scale, self.src_scale) if end == "src" else (self.lane.dst_scale, self.dst_scale)


def add_keys(plain: Tiles, runs: Runs, table: Table) -> Iterator[Tiles]:
    """Return the boxes that do what `plain` does and digest what it reads and writes, stored scales included.

    Where the two ends cut a head's elements so differently that its row is no box, the row is read again on each end.
    Raises PlanError where one end alone does.
    """
    keyed = _keyed(plain, runs, table)
    lane = runs.lane
    if keyed is not None:
        yield keyed
    else:
        yield plain
        yield _only("src", runs, table, runs.src, lane.name, lane.src_dtype, lane.src.itemsize)
        yield _only("dst", runs, table, runs.dst, lane.name, lane.dst_dtype, lane.dst.itemsize)
    if not lane.converts:
        return
    ends: tuple[End, End] = ("src", "dst")
    for end, scale in zip(ends, lane.formats, strict=True):
        source, operand = runs.scale(end)
        if source is None or operand is None or source.view is None or scale is None:
            continue
        blocks = dataclasses.replace(operand, dims=source.view.dim)
        yield _only(end, runs, table, blocks, f"{lane.name} scale", scale.dtype, source.view.itemsize)


def _rows(runs: Runs, table: Table, name: str, dtype: str, dim: int) -> Rows:
    array = array_name(runs.lane.src_group.kind, name, dtype)
    return table.row_operand(array, runs.layers, runs.lane.heads, dim, len(runs.starts))


def _only(end: End, runs: Runs, table: Table, operand: Operand, name: str, dtype: str, size: int) -> Tiles:
    """Return a box that only reads one array of one end."""
    rows = _rows(runs, table, name, dtype, len(operand.dims))
    tokens = table.token_operand(runs.starts, len(runs.layers), len(operand.heads), len(operand.dims))
    box = _Box([operand, rows.operand, tokens], runs.count, key=1)
    if box.row is None:
        raise PlanError(f"{name}: the elements of a row lie too irregularly to digest them")
    loops, row_axes, run = _cut(merge(box.outer), merge(box.row), size, 1)
    at, keys, token_keys = box.addresses
    shape, stride, key_stride, token_stride = columns(loops, 3)
    keyed = Keyed(
        table.keys.words, keys, key_stride, token_keys, token_stride, row_axes, keep=(rows.table, table.tokens)
    )
    return Tiles(at, at, shape, stride, stride, run, src_keys=keyed, only=end)


class _Box:
    """Operands as loops: `outer` ones, which change row or token keys, and those of a row; None where a row is no box."""

    def __init__(self, operands: list[Operand], count: int, *, key: int) -> None:
        head_loops, head_rest = factor(np.stack([o.heads for o in operands], axis=1))
        dim_loops, dim_rest = factor(np.stack([o.dims for o in operands], axis=1))
        tokens = Loop(count, tuple(o.token for o in operands))
        segments = [x for x in dim_loops if x.strides[key]]
        inner = dim_loops[len(segments) :]
        regular = len(dim_rest) == 1 and not any(x.strides[key] for x in inner)
        self.row = inner if regular else None
        self.outer = sorted([tokens, *head_loops, *segments], key=lambda loop: loop.strides, reverse=True)
        self.addresses = [outer_sum(o.at, head_rest[:, i] + dim_rest[0, i]) for i, o in enumerate(operands)]


def _cut(outer: list[Loop], row: list[Loop], size: int, ends: int) -> tuple[list[Loop], int, int]:
    """Return the loops of a box, how many of them belong to a row, and the run in bytes."""
    if row and row[-1].strides[:ends] == (size,) * ends:
        return [*outer, *row[:-1]], len(row) - 1, row[-1].count * size
    return [*outer, *row], len(row), size


def _keyed(plain: Tiles, runs: Runs, table: Table) -> Tiles | None:
    lane = runs.lane
    src_rows = _rows(runs, table, lane.name, lane.src_dtype, len(lane.src.dim))
    tokens = table.token_operand(runs.starts, len(runs.layers), len(lane.heads), len(lane.src.dim))
    scales = [s for s in (runs.src_scale, runs.dst_scale) if s is not None]
    operands = [runs.src, runs.dst, *scales, src_rows.operand, tokens]
    key = 2 + len(scales)
    tables: list[object] = [src_rows.table, table.tokens]
    if lane.converts:
        dst_rows = _rows(runs, table, lane.name, lane.dst_dtype, len(lane.dst.dim))
        operands.append(dst_rows.operand)
        tables.append(dst_rows.table)
    box = _Box(operands, runs.count, key=key)
    if box.row is None:
        return None
    if lane.converts:
        return _converting(plain, runs, table, box, key, tuple(tables))
    loops, row_axes, run = _cut(merge(box.outer), merge(box.row), lane.src.itemsize, 2)
    src, dst, keys, token_keys = box.addresses
    shape, src_stride, dst_stride, key_stride, token_stride = columns(loops, 4)
    keyed = Keyed(table.keys.words, keys, key_stride, token_keys, token_stride, row_axes, keep=tuple(tables))
    return Tiles(src, dst, shape, src_stride, dst_stride, run, src_keys=keyed)


def _converting(
    plain: Tiles, runs: Runs, table: Table, box: _Box, key: int, tables: tuple[object, ...]
) -> Tiles | None:
    """Give a conversion its keys: loops over blocks of scales lie inside a row, but outside what one scale covers."""
    lane, convert = runs.lane, plain.convert
    assert convert is not None and box.row is not None  # noqa: S101, PT018  # the lane converts, and its rows are boxes
    blocks = [x for x in box.row if any(x.strides[2:key])]
    if blocks != box.row[: len(blocks)]:
        return None
    single = Loop(1, (lane.src.itemsize, lane.dst.itemsize, *[0] * (len(box.addresses) - 2)))
    inner = merge(box.row[len(blocks) :]) or [single]
    blocks = merge(blocks)
    *outer, row = [*merge(box.outer), *blocks, *inner]
    shape, *strides = columns(outer, len(box.addresses))
    row_axes = len(blocks) + len(inner) - 1
    scales = list(zip(box.addresses[2:key], strides[2:key], strict=True))
    src_scale = scales.pop(0) if runs.src_scale else (None, ())
    dst_scale = scales.pop(0) if runs.dst_scale else (None, ())

    def keyed(index: int) -> Keyed:
        return Keyed(table.keys.words, box.addresses[index], strides[index], box.addresses[key + 1], strides[key + 1],
                     row_axes, keep=tables)  # fmt: skip

    return dataclasses.replace(
        plain, src=box.addresses[0], dst=box.addresses[1], shape=shape, src_stride=strides[0], dst_stride=strides[1],
        run=row.count, src_keys=keyed(key), dst_keys=keyed(key + 2),
        convert=dataclasses.replace(
            convert, src_step=row.strides[0], dst_step=row.strides[1], row_axes=len(inner) - 1 if lane.dynamic else 0,
            src_scale=src_scale[0], src_scale_stride=src_scale[1],
            dst_scale=dst_scale[0], dst_scale_stride=dst_scale[1],
        ),
    )  # fmt: skip

"""Lay a box out over the programs of a GPU: which axes are rows, which are columns, what a program's block is.

Pure arithmetic on addresses and strides: no Triton, no memory is touched.

Columns follow the axis along which the target is contiguous, so that stores are. Where the source is contiguous
along another axis, that one becomes the innermost row axis: the compiler then loads along rows, stores along columns and
transposes in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regauge.layout.dtypes import DTYPES
from regauge.plan.tiles import Convert, Int64, Tiles

SRC, DST, SRC_SCALE, DST_SCALE = range(4)

ELEMENTS = 4096
"""Elements of a block at most: 32 in each of 128 threads."""

WARPS = 4

VECTOR = 16
"""Bytes that one thread loads or stores at once at most."""

MAX_STEPS = 2**30
"""Rows or columns of one launch: indices are int32, and padding stays below twice that."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`count` indices; `steps`: bytes from one to the next in the source, the target and their scales."""

    count: int
    steps: tuple[int, int, int, int]
    padded: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """How elements of `size` bytes are accessed.

    Groups of `group` elements lie side by side along rows (`down`) or columns, and begin at multiples of `align` bytes;
    `align` 0: elements lie at any address, and are moved byte by byte.
    """

    size: int
    group: int
    down: bool
    align: int

    def constants(self, name: str) -> dict[str, Any]:
        """Return it as a kernel's constant arguments."""
        return {
            f"{name}_size": self.size,
            f"{name}_group": self.group,
            f"{name}_down": self.down,
            f"{name}_align": self.align,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """One launch: `kernel` is its name in `kernels`, `constants` its constant arguments.

    `axes` is the table that the kernel reads, int64[axes, 6]; `bases` are the addresses of tiles, int64[4, tiles] (source,
    target and their scales, 0 where there are none); `rows` and `columns` are counts, padding included.
    """

    kernel: str
    axes: Int64
    bases: Int64
    rows: int
    columns: int
    programs: int
    constants: dict[str, Any]


def schedule(t: Tiles, *, elements: int = ELEMENTS) -> list[Schedule]:
    """Return the launches that move `t`; none if it is empty. `elements`: of a block at most, a power of two.

    Raises ValueError if one tile has 2^30 rows or columns, or more.
    """
    if t.pieces == 0 or t.run == 0:
        return []
    size = _sizes(t)
    axes = _axes(t, size)
    dynamic = t.convert is not None and t.convert.dynamic
    if dynamic:
        assert t.convert is not None  # noqa: S101  # for the type checker
        cut = len(t.shape) - t.convert.row_axes
        rows, columns = in_order(axes[:cut]), in_order(axes[cut:]) or [Axis(1, (size[0], size[1], 0, 0))]
    else:
        rows, columns = _split(in_order(axes) or [Axis(1, (size[0], size[1], 0, 0))], size)
    tile_rows, width = math.prod(a.count for a in rows), math.prod(a.count for a in columns)
    if tile_rows >= MAX_STEPS or width >= MAX_STEPS:
        raise ValueError(f"a tile of {tile_rows} rows of {width} elements is too large for one launch: cut it")
    per_launch = max(1, MAX_STEPS // tile_rows)
    bases = _bases(t)
    parts = [bases[:, i : i + per_launch] for i in range(0, bases.shape[1], per_launch)]
    return [_launch(t, part, rows, columns, size, elements) for part in parts]


def _launch(
    t: Tiles, bases: Int64, rows: list[Axis], columns: list[Axis], size: tuple[int, int], elements: int
) -> Schedule:
    width = math.prod(a.count for a in columns)
    dynamic = t.convert is not None and t.convert.dynamic
    down = not dynamic and _transposed(rows, columns, size)
    block_rows, block_columns = _block(rows, width, bases.shape[1], down, min(elements, elements * 4 // max(size)))
    if down:
        inner = rows[-1]
        rows = [*rows[:-1], replace(inner, padded=-(-inner.count // block_rows) * block_rows)]
    total = bases.shape[1] * math.prod(a.padded or a.count for a in rows)
    operands = [
        operand(bases[i], rows, columns, i, size[i], (block_rows, block_columns), down and i == SRC)
        for i in (SRC, DST)
    ]  # fmt: skip
    table = [[a.count, a.padded or a.count, *a.steps] for a in (*reversed(rows), *reversed(columns))]
    across = 1 if dynamic else -(-width // block_columns)
    return Schedule(
        kernel="quantize" if dynamic else "relayout",
        axes=np.array(table, np.int64),
        bases=bases,
        rows=total,
        columns=width,
        programs=-(-total // block_rows) * across,
        constants={
            "row_axes": len(rows),
            "column_axes": len(columns),
            "block_rows": block_rows,
            "block_columns": block_columns,
            **operands[SRC].constants("src"),
            **operands[DST].constants("dst"),
            **_conversion(t, bases, rows, columns, -(-width // block_columns)),
        },
    )


def _conversion(t: Tiles, bases: Int64, rows: list[Axis], columns: list[Axis], blocks: int) -> dict[str, Any]:
    c = t.convert or Convert("", "", 0, 0)
    # A quotient can be rounded to a dtype of 16 bits only; for others the rule is defined as plain division.
    rule = "divide" if c.rule == "divide_source" and c.src_dtype not in ("bfloat16", "float16") else c.rule
    axes = [*rows, *columns]
    constants: dict[str, Any] = {
        "src_dtype": c.src_dtype,
        "dst_dtype": c.dst_dtype,
        "src_scaled": c.src_scale is not None,
        **_scale(bases, axes, SRC_SCALE, c.src_scale_dtype, "src"),
        **_scale(bases, axes, DST_SCALE, c.dst_scale_dtype, "dst"),
        "rule": rule,
    }
    if c.dynamic:
        most, floor = (int(x) for x in np.array([DTYPES[c.dst_dtype].max, c.floor], np.float32).view(np.int32))
        return {**constants, "most": most, "floor": floor, "pow2": c.pow2, "blocks": blocks}
    scaled = c.src_scale is not None or c.dst_scale is not None
    return {
        **constants,
        "dst_scaled": c.dst_scale is not None,
        "column_scales": any(a.steps[SRC_SCALE] or a.steps[DST_SCALE] for a in columns),
        "nan_bits": scaled and DTYPES[c.dst_dtype].itemsize > 1,
    }


def _scale(bases: Int64, axes: list[Axis], operand: int, dtype: str, name: str) -> dict[str, int]:
    size = 1 if dtype == "float8_e8m0fnu" else 4
    align = _low_bit(size, _union(bases[operand]), *(a.steps[operand] for a in axes))
    return {f"{name}_scale_size": size, f"{name}_scale_align": size if align == size else 0}


def _sizes(t: Tiles) -> tuple[int, int]:
    """Return the bytes of a source and a target element; of a copy, the largest word that all its addresses allow."""
    if t.convert is not None:
        return DTYPES[t.convert.src_dtype].itemsize, DTYPES[t.convert.dst_dtype].itemsize
    word = largest_word(t.run, *t.src_stride, *t.dst_stride, bases=(t.src, t.dst))
    return word, word


def largest_word(*numbers: int, bases: Sequence[Int64]) -> int:
    """Return the largest power of two up to 8 that divides all `numbers` and addresses."""
    return _low_bit(8, *numbers, *(_union(b) for b in bases))


def _axes(t: Tiles, size: tuple[int, int]) -> list[Axis]:
    """Return the axes of a tile, outermost first, the run's elements last; all of them, also those of one index."""
    none = (0,) * len(t.shape)
    c = t.convert
    src_scale = c.src_scale_stride if c and c.src_scale is not None else none
    dst_scale = c.dst_scale_stride if c and c.dst_scale is not None else none
    steps = zip(t.src_stride, t.dst_stride, src_scale, dst_scale, strict=True)
    axes = [Axis(n, s) for n, s in zip(t.shape, steps, strict=True)]
    if c is None:
        return [*axes, Axis(t.run // size[0], (size[0], size[1], 0, 0))]
    return [*axes, Axis(t.run, (c.src_step, c.dst_step, 0, 0))]


def _bases(t: Tiles) -> Int64:
    c = t.convert
    scales = (c.src_scale, c.dst_scale) if c else (None, None)
    return np.stack([t.src, t.dst, *(np.zeros_like(t.src) if s is None else s for s in scales)])


def in_order(axes: Sequence[Axis]) -> list[Axis]:
    """Sort axes so that the target is written in order, and join what nests."""
    return nest(sorted(axes, key=lambda a: -abs(a.steps[DST])))


def nest(axes: Sequence[Axis]) -> list[Axis]:
    """Drop axes of one index, and join neighbours of which one goes on where the other ends."""
    joined: list[Axis] = []
    for axis in (a for a in axes if a.count > 1):
        if joined and joined[-1].steps == tuple(axis.count * s for s in axis.steps):
            joined[-1] = Axis(joined[-1].count * axis.count, axis.steps)
        else:
            joined.append(axis)
    return joined


def _split(axes: list[Axis], size: tuple[int, int]) -> tuple[list[Axis], list[Axis]]:
    """Split the axes of a box, in the target's order, into rows and columns, innermost last."""
    rows, columns = axes[:-1], axes[-1:]
    if columns[0].steps[SRC] != size[SRC]:
        for axis in rows:
            if axis.steps[SRC] == size[SRC]:
                return [*(a for a in rows if a is not axis), axis], columns
    # Short runs side by side in the target make one row, so that a store is as wide as it can be.
    while rows and math.prod(a.count for a in columns) * size[DST] < 8 * VECTOR:
        inner = columns[0]
        if rows[-1].steps[DST] != inner.count * inner.steps[DST]:
            break
        columns = [rows.pop(), *columns]
    return rows, columns


def _transposed(rows: list[Axis], columns: list[Axis], size: tuple[int, int]) -> bool:
    return bool(rows) and columns[-1].steps[SRC] != size[SRC] and rows[-1].steps[SRC] == size[SRC]


def _block(rows: list[Axis], width: int, tiles: int, down: bool, elements: int) -> tuple[int, int]:
    """Return the rows and columns of a block, powers of two."""
    if down:
        count = min(power_of_two(rows[-1].count), 1 << (elements.bit_length() - 1) // 2)
        return count, min(power_of_two(width), elements // count)
    columns = min(power_of_two(width), elements)
    return min(power_of_two(tiles * math.prod(a.count for a in rows)), elements // columns), columns


def operand(
    bases: Int64, rows: list[Axis], columns: list[Axis], which: int, size: int, block: tuple[int, int], down: bool
) -> Operand:
    """Return how one operand's elements are accessed; `which` is its place in `Axis.steps`."""
    inner = rows[-1] if down else columns[-1]
    contiguous = inner.steps[which] == size
    group = math.gcd(inner.count, block[0 if down else 1]) if contiguous else 1
    steps = [a.steps[which] for a in (*rows, *columns) if not (contiguous and a is inner)]
    align = _low_bit(VECTOR, _union(bases), *steps)
    return Operand(size, group, down, min(align, group * size) if align >= size else 0)


def _union(addresses: Int64) -> int:
    """Return the bits that are set in any of `addresses`."""
    return int(np.bitwise_or.reduce(addresses)) if len(addresses) else 0


def _low_bit(most: int, *numbers: int) -> int:
    """Return the largest power of two, up to `most`, that divides all `numbers`."""
    union = most
    for n in numbers:
        union |= n
    return union & -union


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not less than `n`."""
    return 1 << max(0, n - 1).bit_length()

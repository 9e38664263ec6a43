"""Digest rows that lie in a GPU's memory, or while they are copied there: what `regauge.plan.digest` defines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from regauge.move.triton import hashing
from regauge.move.triton.run import BLOCK, Launch, accelerator, finish, to_device
from regauge.move.triton.schedule import (
    DST,
    ELEMENTS,
    MAX_STEPS,
    SRC,
    Axis,
    Schedule,
    in_order,
    largest_word,
    nest,
    operand,
    power_of_two,
)
from regauge.plan.digest import PRIME
from regauge.plan.tiles import Int64, Keyed


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Boxes as in `Tiles`: base addresses, shape, strides and contiguous bytes.

    The last `keys.row_axes` axes and the run are one row. Unless `dst` is None rows are copied there, too.
    """

    src: Int64
    shape: tuple[int, ...]
    src_stride: tuple[int, ...]
    run: int
    keys: Keyed
    dst: Int64 | None = None
    dst_stride: tuple[int, ...] = ()


def digest(rows: Rows, *, elements: int = BLOCK) -> int:
    """Return the digest of rows, and copy them if they have a target. Waits for the result.

    Addresses are the device's; tables of keys lie in this process's memory and are copied there.

    Raises ConfigError where there is no accelerator, ValueError for boxes too large for one launch.
    """
    place = accelerator()
    if len(rows.src) == 0 or rows.run == 0 or 0 in rows.shape:
        return 0
    launch, sums = prepare(rows, place, elements=elements)
    launch()
    finish(place)
    return value(sums)


def prepare(rows: Rows, device: torch.device, *, elements: int = BLOCK) -> tuple[Launch, torch.Tensor]:
    """Copy what the kernel reads to the device. A launch adds to the tensor, of which `value` is the digest."""
    x = schedule_digest(rows, elements)
    parts, kept = to_device(x, rows.keys.keep, device)
    words = torch.from_numpy(rows.keys.words.view(np.int32).copy()).to(device)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    lanes = -(-x.columns * x.constants["unit"] // 32) * 4
    arguments = (*parts, words, sums, x.rows, x.columns, lanes)
    return Launch(hashing.digest, x, arguments, (*kept, words, sums)), sums


def value(sums: torch.Tensor) -> int:
    """Return the digest from the two sums of halves that a launch left."""
    low, high = sums.tolist()
    total: int = (low + (high << 32)) % PRIME
    return total


def schedule_digest(boxes: Rows, elements: int = ELEMENTS) -> Schedule:
    """Lay rows, of which there are some, out over programs; without a target it counts as the source."""
    keys, src = boxes.keys, boxes.src
    target, target_stride = (src, boxes.src_stride) if boxes.dst is None else (boxes.dst, boxes.dst_stride)
    cut = len(boxes.shape) - keys.row_axes
    steps = zip(boxes.src_stride, target_stride, keys.row_stride, keys.token_stride, strict=True)
    axes = [Axis(n, s) for n, s in zip(boxes.shape, steps, strict=True)]
    columns = nest([*axes[cut:], Axis(boxes.run, (1, 1, 0, 0))])
    # Bytes that lie side by side on both sides are moved in units as large as every address allows.
    run = columns[-1].count if columns and columns[-1].steps[:2] == (1, 1) else 1
    rest = columns[:-1] if run > 1 else columns
    others = [s for a in (*axes[:cut], *rest) for s in a.steps[:2]]
    unit = largest_word(run, *others, bases=(src, target))
    columns = [*rest, *([Axis(run // unit, (unit, unit, 0, 0))] if run > unit else [])]
    columns = columns or [Axis(1, (unit, unit, 0, 0))]
    rows = in_order(axes[:cut])
    units, count = math.prod(a.count for a in columns), len(src) * math.prod(a.count for a in rows)
    if count >= MAX_STEPS:
        raise ValueError(f"{count} rows are too many for one launch: cut the boxes")
    block_lanes = power_of_two(-(-units * unit // 32) * 4)
    block_rows = min(power_of_two(count), max(1, elements // 2 // block_lanes))
    bases = np.stack([src, target, keys.row, keys.token])
    # Only whole lanes are loaded as vectors: smaller units are picked out of their neighbours.
    grouped = columns if unit == 8 else [replace(columns[-1], count=1)]
    sides = [operand(bases[i], rows, grouped, i, unit, (1, block_lanes), False) for i in (SRC, DST)]
    return Schedule(
        kernel="digest",
        axes=np.array([[a.count, a.count, *a.steps] for a in (*reversed(rows), *reversed(columns))], np.int64),
        bases=bases,
        rows=count,
        columns=units,
        programs=-(-count // block_rows),
        constants={
            "row_axes": len(rows),
            "column_axes": len(columns),
            "block_rows": block_rows,
            "block_lanes": block_lanes,
            "unit": unit,
            "src_group": sides[SRC].group,
            "src_align": sides[SRC].align,
            "dst_group": sides[DST].group,
            "dst_align": sides[DST].align,
            "copies": boxes.dst is not None,
        },
    )

"""Small integer work of the planner: factor offset tables into regular loops, merge loops, merge pieces. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regauge.plan.tiles import Int64


@dataclass(frozen=True, slots=True)
class Loop:
    """A regular loop: `count` steps, each `strides[i]` bytes further in operand i (source, target, their scales)."""

    count: int
    strides: tuple[int, ...]


def factor(columns: Int64) -> tuple[list[Loop], Int64]:
    """Write an offset table as nested loops, outermost first, plus what is irregular.

    `columns` is int64[n, operands]: the offset of index i in every operand. Returns loops and rest, int64[m, operands],
    such that the table is the outer sum of the rest and the loops, in index order.
    """
    loops: list[Loop] = []
    rest = columns
    while len(rest) > 1:
        steps = np.diff(rest, axis=0)
        changes = np.nonzero((steps != steps[0]).any(axis=1))[0]
        count = int(changes[0]) + 1 if len(changes) else len(rest)
        if count == 1 or len(rest) % count:
            break
        blocks = rest.reshape(-1, count, rest.shape[1])
        if not (blocks - blocks[:, :1] == blocks[:1] - blocks[:1, :1]).all():
            break
        loops.insert(0, Loop(count, tuple(int(x) for x in steps[0])))
        rest = np.ascontiguousarray(blocks[:, 0])
    return loops, rest


def merge(loops: list[Loop]) -> list[Loop]:
    """Drop loops of one step, and join an outer loop with the inner one that it continues, in every operand."""
    out: list[Loop] = []
    for loop in loops:
        if loop.count == 1:
            continue
        if out and all(o == i * loop.count for o, i in zip(out[-1].strides, loop.strides, strict=True)):
            out[-1] = Loop(out[-1].count * loop.count, loop.strides)
        else:
            out.append(loop)
    return out


def coalesce(pieces: Int64, *labels: Int64) -> Int64:
    """Join pieces, int64[n, 3] of (source, target, bytes), with the next where it continues them on both sides.

    Keeps the order and drops pieces without bytes; may return `pieces` itself. Neighbours whose `labels` (each
    int64[n]: region indices) differ stay apart: two regions may touch.
    """
    kept, full = pieces, pieces[:, 2] > 0
    if not full.all():
        kept, labels = pieces[full], tuple(label[full] for label in labels)
    ends = kept[:-1, :2] + kept[:-1, 2:]
    joins = (ends[:, 0] == kept[1:, 0]) & (ends[:, 1] == kept[1:, 1])
    for label in labels:
        joins &= label[1:] == label[:-1]
    if not joins.any():
        return kept
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    return np.column_stack((kept[first, :2], np.add.reduceat(kept[:, 2], first)))


def outer_sum(bases: Int64, offsets: Int64) -> Int64:
    """Return all sums of a base and an offset, bases outermost, int64[len(bases) * len(offsets)]."""
    return (bases[:, None] + offsets[None, :]).ravel()


def columns(loops: list[Loop], operands: int) -> list[tuple[int, ...]]:
    """Return the counts of loops, and their strides in each operand."""
    return [tuple(x.count for x in loops), *(tuple(x.strides[i] for x in loops) for i in range(operands))]

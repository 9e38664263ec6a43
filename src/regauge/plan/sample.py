"""Page tables for figures: what a transfer between scattered pages looks like, before anyone has pages.

Every second page is taken: neighbours that join by chance would flatter the figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import msgspec
import numpy as np

from regauge.errors import PlanError
from regauge.layout.spec import Layout
from regauge.layout.view import region_sizes
from regauge.plan.boxes import Side, instantiate, pieces
from regauge.plan.planner import Plan
from regauge.plan.tiles import Int64, Tiles

EXACT_PIECES = 1 << 20
"""Most pieces that are expanded to be counted; more are counted on fewer tokens, and scaled."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneBoxes:
    """One array's boxes in its first layer, and in how many layers it lies so."""

    layers: int
    tiles: list[Tiles]

    @property
    def pieces(self) -> int:
        """Runs in all layers."""
        return sum(t.pieces for t in self.tiles) * self.layers


@dataclass(frozen=True, slots=True)
class Spans:
    """The contiguous copies of a pair of groups."""

    count: int
    median: float
    """Half of the spans are at least that long, in bytes."""
    least: int
    nbytes: int
    exact: bool
    """Counted piece by piece; else scaled up from fewer tokens, or counted before neighbours join."""


def roomy(layout: Layout, tokens: int) -> Layout:
    """Return the layout with twice the pages that so many tokens take."""
    groups = [
        msgspec.structs.replace(g, pages=2 * (1 if g.kind == "recurrent" else ceil(tokens / g.page_size)))
        for g in layout.groups
    ]
    return msgspec.structs.replace(layout, groups=groups)


def scattered(plan: Plan, pair: tuple[int, int], tokens: tuple[int, int]) -> tuple[Side, Side]:
    """Return both sides with page tables of scattered pages for tokens [first, end), and regions far apart."""
    sides = []
    for index, layout in zip(pair, (plan.prefill, plan.decode), strict=True):
        group = layout.groups[index]
        origin = tokens[0] // group.page_size * group.page_size
        need = ceil((tokens[1] - origin) / group.page_size)
        bases = {name: i << 44 for i, name in enumerate(region_sizes(layout), 1)}
        sides.append(Side(_apart(group.pages, need), bases, origin))
    return sides[0], sides[1]


def _apart(pages: int, need: int) -> Int64:
    """Even pages first, then odd ones: few neighbours even in a pool that the request fills."""
    if 2 * need <= pages:
        return np.arange(need) * 2
    return np.resize(np.concatenate([np.arange(0, pages, 2), np.arange(1, pages, 2)]), need)


def lane_boxes(plan: Plan, pair: tuple[int, int], sides: tuple[Side, Side], tokens: tuple[int, int]) -> list[LaneBoxes]:
    """Return the boxes of every array of a pair in its first layer: a group's layers lie alike."""
    out = []
    for lane in plan.lanes:
        if lane.pair == pair:
            only = replace(plan, lanes=(lane,))
            tiles = instantiate(only, *sides, tokens, pair=pair, layers=lane.layers[:1])
            out.append(LaneBoxes(len(lane.layers), tiles))
    return out


def spans(plan: Plan, pair: tuple[int, int], boxes: list[LaneBoxes], tokens: tuple[int, int]) -> Spans:
    """Count the spans of all layers together, joined across pages, layers and components where memory allows.

    Above EXACT_PIECES a part of the tokens, whole pages, is counted and scaled; where even that is too much, runs as they are.
    """
    total = sum(b.pieces for b in boxes)
    nbytes = sum(sum(t.pieces * t.run for t in b.tiles) * b.layers for b in boxes)
    if not total:
        return Spans(0, 0.0, 0, 0, exact=True)
    first, end = tokens
    part = end
    if total > EXACT_PIECES:
        page = max(plan.prefill.groups[pair[0]].page_size, plan.decode.groups[pair[1]].page_size)
        some = (end - first) * EXACT_PIECES // total
        part = min(end, first + max(page, some // page * page))
    try:
        cut = (first, part)
        found = pieces(instantiate(plan, *scattered(plan, pair, cut), cut, pair=pair))[:, 2]
    except PlanError:  # more than MAX_PIECES in one page
        return _runs(boxes, total, nbytes)
    if not len(found):  # under context parallelism the part may hold nothing of this pair
        return _runs(boxes, total, nbytes)
    scale = (end - first) / (part - first)
    return Spans(round(len(found) * scale), float(np.median(found)), int(found.min()), nbytes, exact=part == end)


def _runs(boxes: list[LaneBoxes], total: int, nbytes: int) -> Spans:
    runs = sorted((t.run, t.pieces * b.layers) for b in boxes for t in b.tiles)
    seen, median = 0, runs[-1][0]
    for run, count in runs:
        seen += count
        if 2 * seen >= total:
            median = run
            break
    return Spans(total, float(median), runs[0][0], nbytes, exact=False)

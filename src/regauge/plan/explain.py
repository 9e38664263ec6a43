"""Says what a plan does, as a database explains a query. Figures follow from the layouts alone; nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Layout
from regauge.layout.view import View, bytes_per_token
from regauge.plan.boxes import Side, instantiate
from regauge.plan.check import Verdict
from regauge.plan.planner import Lane, Plan, compile
from regauge.plan.tiles import Tiles
from regauge.plan.wire import WireFormat


@dataclass(frozen=True, slots=True)
class LaneCost:
    """What one array costs, for the explained number of tokens in all layers."""

    name: str
    path: str
    reasons: tuple[str, ...]
    source: str
    target: str
    boxes: int
    run_bytes: int
    """Contiguous bytes that one copy or one row of a conversion reads."""
    pieces: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The figures of `explain`."""

    verdict: Verdict
    tokens: int
    lanes: tuple[LaneCost, ...]
    source_bytes: int
    target_bytes: int
    wire_bytes: int
    """Bytes on the wire when staged: codes of the narrower side and their scales."""
    kernel_bytes: int
    """Bytes that kernels read and write when staged: gather at prefill and scatter at decode."""
    seconds_on_link: float | None

    def text(self) -> str:
        """Return the plan as people read it."""
        v = self.verdict
        out = [f"{v.path}  {self.tokens} tokens, {_size(self.source_bytes)} -> {_size(self.target_bytes)}"]
        for lane in self.lanes:
            out.append(f"  {lane.name}: {lane.path}  {lane.source} -> {lane.target}")
            out += [f"      {reason}" for reason in lane.reasons]
            out.append(f"      {lane.boxes} boxes, {lane.pieces} runs of {lane.run_bytes} B")
        out.append(f"  wire   {_size(self.wire_bytes)} when staged")
        out.append(f"  kernel {_size(self.kernel_bytes)} read and written when staged")
        if self.seconds_on_link is not None:
            out.append(f"  link   {self.seconds_on_link * 1e3:.3f} ms at line rate")
        out += [f"  note   {note}" for note in v.notes]
        return "\n".join(out)


def explain(prefill: Layout, decode: Layout, *, tokens: int = 4096, link_gbps: float | None = None) -> Explanation:
    """Explain the transfer of so many tokens between scattered pages. Raises Refused, PlanError.

    `link_gbps` is the link's rate in gigabits per second. Symbolic layouts are given just enough pages.
    """
    plan = compile(_with_pages(prefill, tokens), _with_pages(decode, tokens))
    tiles = {lane.name: _instantiate(plan, lane, tokens) for lane in plan.lanes}
    lanes = tuple(_cost(plan, lane, tiles[lane.name]) for lane in plan.lanes)
    source = int(tokens * _read(plan))
    target = int(tokens * bytes_per_token(decode))
    wire = WireFormat(plan)
    wire_bytes = sum(wire.layer_bytes(pair, tokens) * len(plan.layers_of(pair)) for pair in plan.pairs)
    seconds = wire_bytes * 8 / (link_gbps * 1e9) if link_gbps else None
    kernel = source + 2 * wire_bytes + target
    return Explanation(plan.verdict, tokens, lanes, source, target, wire_bytes, kernel, seconds)


def _read(plan: Plan) -> float:
    """Bytes per token that are read on the prefill side: the heads and layers that the plan carries."""
    total = 0.0
    for lane in plan.lanes:
        scale = lane.src_scale.view if lane.src_scale is not None else None
        stored = 0 if scale is None else len(scale.dim) * scale.itemsize
        total += len(lane.layers) * len(lane.heads) * (len(lane.src.dim) * lane.src.itemsize + stored)
    return total


def _with_pages(layout: Layout, tokens: int) -> Layout:
    # Twice the pages, of which every second is used: neighbours that join by chance would flatter the figures.
    groups = [msgspec.structs.replace(g, pages=2 * -(-tokens // g.page_size)) for g in layout.groups]
    return msgspec.structs.replace(layout, groups=groups)


def _instantiate(plan: Plan, lane: Lane, tokens: int) -> list[Tiles]:
    only = Plan(plan.prefill, plan.decode, plan.verdict, (lane,))
    sides = []
    for layout, group in ((plan.prefill, lane.src_group), (plan.decode, lane.dst_group)):
        names = {v.region.replace("{layer}", str(x)) for g in layout.groups for v in _views(lane) for x in g.layer_ids}
        sides.append(Side(np.arange(0, group.pages, 2), dict.fromkeys(names, 0)))
    return instantiate(only, sides[0], sides[1], (0, tokens))


def _views(lane: Lane) -> tuple[View, ...]:
    return (*lane.views(target=False), *lane.views(target=True))


def _cost(plan: Plan, lane: Lane, tiles: list[Tiles]) -> LaneCost:
    verdict = next(v for v in plan.verdict.lanes if lane.name.split()[0] == v.component)
    size = lane.src.itemsize if lane.converts else 1
    return LaneCost(
        name=lane.name,
        path=verdict.path,
        reasons=verdict.reasons if " " not in lane.name else (),
        source=_array(lane.src_dtype, lane.src_group.page_size, lane, target=False),
        target=_array(lane.dst_dtype, lane.dst_group.page_size, lane, target=True),
        boxes=sum(len(t.src) for t in tiles),
        run_bytes=min(t.run * size for t in tiles),
        pieces=sum(t.pieces for t in tiles),
    )


def _array(dtype: str, page: int, lane: Lane, *, target: bool) -> str:
    scale = lane.dst_scale if target else lane.src_scale
    kind = "" if scale is None else " with stored scales" if scale.view is not None else " with constant scales"
    return f"{dtype} ({DTYPES[dtype].itemsize} B){kind}, page {page}"


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"

"""Says what a plan does and what it costs, as a database explains a query. Figures follow from layouts and constants; nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass

from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Layout, format_layers
from regauge.plan.check import Verdict, worst
from regauge.plan.cost import DEFAULTS, Constants, Decision, Setting, Way, decide
from regauge.plan.planner import Lane, Plan, compile, live
from regauge.plan.sample import LaneBoxes, lane_boxes, roomy, scattered


@dataclass(frozen=True, slots=True)
class LaneCost:
    """One array of a pair of groups: a component's elements, or its stored scales."""

    name: str
    path: str
    reasons: tuple[str, ...]
    source: str
    target: str
    layers: int
    boxes: int
    """Strided boxes that one kernel pass takes, all layers."""
    run_bytes: int
    """Contiguous bytes that one copy, or one row of a conversion, reads; the shortest."""
    pieces: int
    """Runs or rows, all layers, before neighbours join."""
    source_bytes: int
    target_bytes: int


@dataclass(frozen=True, slots=True)
class GroupCost:
    """What a pair of state groups costs."""

    kind: str
    layers: str
    path: str
    pages: tuple[int, int]
    """Tokens per page on either side."""
    lanes: tuple[LaneCost, ...]
    decision: Decision


@dataclass(frozen=True, slots=True)
class Explanation:
    """The figures of `explain`. Byte counts are of all layers of this pair of ranks."""

    verdict: Verdict
    tokens: int
    model: str
    transport: str
    constants: str
    """Where the model's constants come from."""
    link_gbps: float | None
    groups: tuple[GroupCost, ...]
    source_bytes: int
    target_bytes: int
    wire_bytes: int
    """Bytes that cross, in the chosen ways: codes of the narrower side and their scales."""
    kernel_bytes: int
    """Bytes that kernels read and write, both sides, in the chosen ways."""
    staging_bytes: int
    """Largest staging slot in use, on either side."""
    spans: int
    seconds: float
    """Moving alone; what a prefill hides is not counted as hidden."""
    seconds_on_link: float | None
    """The bytes that cross at the link's full rate."""
    accuracy: tuple[str, ...]

    def text(self) -> str:
        """Return the plan as people read it."""
        over = self.transport if self.link_gbps is None else f"{self.transport} at {self.link_gbps:g} Gbit/s"
        out = [
            f"{self.verdict.path}  {self.tokens} tokens of {self.model}, {size(self.source_bytes)} -> "
            f"{size(self.target_bytes)}, over {over}: {duration(self.seconds)}"
            + ("" if self.seconds_on_link is None else f" ({duration(self.seconds_on_link)} at line rate)")
        ]
        for group in self.groups:
            out += ["", *_group_text(group)]
        out += ["", *(f"accuracy   {note}" for note in self.accuracy), f"constants  {self.constants}"]
        return "\n".join(out)


def explain(
    prefill: Layout, decode: Layout, *, tokens: int = 4096, link_gbps: float | None = None,
    constants: Constants = DEFAULTS, setting: Setting | None = None,
) -> Explanation:  # fmt: skip
    """Explain the transfer of so many tokens between scattered pages. Raises Refused, PlanError, ConfigError.

    `link_gbps` is the link's rate in gigabits per second. Both sides are taken to have twice the pages that the tokens need, as if scattered.
    """
    setting = setting or Setting("tcp")
    plan = compile(roomy(prefill, tokens), roomy(decode, tokens))
    groups = tuple(_group(plan, pair, constants, setting, tokens) for pair in plan.pairs)
    chosen = [g.decision.chosen for g in groups]
    lanes = [lane for g in groups for lane in g.lanes]
    wire = sum(w.wire_bytes for w in chosen)
    return Explanation(
        verdict=plan.verdict,
        tokens=tokens,
        model=decode.model.name,
        transport=setting.transport,
        constants=constants.source,
        link_gbps=link_gbps,
        groups=groups,
        source_bytes=sum(lane.source_bytes for lane in lanes),
        target_bytes=sum(lane.target_bytes for lane in lanes),
        wire_bytes=wire,
        kernel_bytes=sum(w.kernel_bytes for w in chosen),
        staging_bytes=max((w.staging_bytes for w in chosen), default=0),
        spans=sum(w.spans.count for w in chosen),
        seconds=sum(w.seconds for w in chosen),
        seconds_on_link=wire * 8 / (link_gbps * 1e9) if link_gbps else None,
        accuracy=_accuracy(plan),
    )


def _accuracy(plan: Plan) -> tuple[str, ...]:
    exact = () if plan.verdict.path == "CONVERT" else ("exact: every byte arrives as it left",)
    return (*exact, *plan.verdict.notes)


def _group(plan: Plan, pair: tuple[int, int], constants: Constants, setting: Setting, length: int) -> GroupCost:
    src, dst = plan.prefill.groups[pair[0]], plan.decode.groups[pair[1]]
    tokens = live(dst, plan.decode, (0, length), length)
    verdicts = [v for v in plan.verdict.lanes if (v.prefill_group, v.decode_group) == pair]
    path = worst(v.path for v in verdicts)
    boxes = lane_boxes(plan, pair, scattered(plan, pair, tokens), tokens)
    return GroupCost(
        kind=dst.kind,
        layers=format_layers(plan.layers_of(pair)),
        path=path,
        pages=(src.page_size, dst.page_size),
        lanes=_lanes(plan, pair, boxes),
        decision=decide(plan, pair, constants, setting, tokens, boxes),
    )


def _lanes(plan: Plan, pair: tuple[int, int], boxes: list[LaneBoxes]) -> tuple[LaneCost, ...]:
    lanes = [lane for lane in plan.lanes if lane.pair == pair]
    out = []
    for lane, found in zip(lanes, boxes, strict=True):
        component = lane.name.split(" ")[0]
        verdict = next(
            v for v in plan.verdict.lanes if v.component == component and (v.prefill_group, v.decode_group) == pair
        )
        itemsize = lane.src.itemsize if lane.converts else 1
        elements = sum(t.pieces * t.run for t in found.tiles) * found.layers * itemsize // lane.src.itemsize
        rows = elements // len(lane.src.dim)  # (layer, token, head)
        out.append(
            LaneCost(
                name=lane.name,
                path=verdict.path,
                reasons=verdict.reasons if component == lane.name else (),
                source=_array(lane, target=False),
                target=_array(lane, target=True),
                layers=found.layers,
                boxes=sum(len(t.src) for t in found.tiles) * found.layers,
                run_bytes=min((t.run * itemsize for t in found.tiles), default=0),
                pieces=found.pieces,
                source_bytes=elements * lane.src.itemsize + rows * _stored(lane, target=False),
                target_bytes=elements * lane.dst.itemsize + rows * _stored(lane, target=True),
            )
        )
    return tuple(out)


def _stored(lane: Lane, *, target: bool) -> int:
    """Bytes of the scales that a conversion reads or writes beside each (token, head)."""
    scale = lane.dst_scale if target else lane.src_scale
    return 0 if scale is None or scale.view is None else len(scale.view.dim) * scale.view.itemsize


def _array(lane: Lane, *, target: bool) -> str:
    scale, dtype = (lane.dst_scale, lane.dst_dtype) if target else (lane.src_scale, lane.src_dtype)
    heads, dim = len(lane.dst_heads), len(lane.dst.dim)
    kind = "" if scale is None else " with stored scales" if scale.view is not None else " with constant scales"
    shape = f"{heads} x {dim}" if heads > 1 else f"{dim}"
    return f"{dtype} {shape}{kind}" if dtype in DTYPES else f"{dtype} scales, {shape}"


def _group_text(group: GroupCost) -> list[str]:
    d = group.decision
    page = (
        f"page {group.pages[0]}" if group.pages[0] == group.pages[1] else f"page {group.pages[0]} -> {group.pages[1]}"
    )
    at = f", converted at {d.chosen.convert_at}" if d.chosen.convert_at else ""
    out = [
        f"{group.kind}, layers {group.layers}, {page}: {group.path}, {d.chosen.mode}{at}, {duration(d.chosen.seconds)}",
        f"  because  {d.why}",
        f"  spans    {_spans(d.chosen)}",
        f"  bytes    {size(d.chosen.wire_bytes)} cross, {size(d.chosen.kernel_bytes)} read and written by kernels",
        f"  memory   {size(d.chosen.staging_bytes)} of staging on either side",
    ]
    for lane in group.lanes:
        alike = lane.source == lane.target
        out.append(f"  {lane.name:8} {lane.path}  {lane.source}" + ("" if alike else f" -> {lane.target}"))
        out += [f"           {reason}" for reason in lane.reasons]
        out.append(f"           {lane.boxes} boxes, {lane.pieces} runs of {size(lane.run_bytes)}")
    out.append(f"  {'way':8} {'estimate':>10}  parts")
    for way in d.ways:
        mark = "*" if way.mode == d.chosen.mode else " "
        took = "-" if way.refused and not way.parts else duration(way.seconds)
        parts = ", ".join(f"{name} {duration(x)}" for name, x in way.parts.items())
        beside = "; scatter runs beside the next chunk's gather" if way.mode == "staged" and way.parts else ""
        told = f"not possible: {way.refused}" if way.refused else f"{parts}{beside}"
        out.append(f" {mark}{way.mode:8} {took:>10}  {told}")
    return out


def _spans(way: Way) -> str:
    if not way.spans.count:
        return f"none: kernels write the peer's memory, {way.writes} passes"
    about = "" if way.spans.exact else "about "
    return f"{about}{way.spans.count}, median {size(way.spans.median)}, least {size(way.spans.least)}, in {way.writes} writes"


def size(nbytes: float) -> str:
    """Return a byte count in the largest binary unit that keeps it above one."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def duration(seconds: float) -> str:
    """Return a time with a unit that people read: us, ms or s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"

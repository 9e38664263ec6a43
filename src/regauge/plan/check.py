"""Which path a pair of layouts takes, and why; or why it takes none. The same answer from both ends.

DIRECT: whole pages, as they lie. REMAP: the same bytes at other places. CONVERT: other bytes. REFUSED: no correct path.
NONE: the two ranks hold nothing in common. What other ranks of the same side hold (tensor, pipeline and context parallelism)
is theirs to send: see `regauge.plan.ranks`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

import numpy as np

from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Component, Group, Layout, Model, Rope, Scale, Shard, State, format_layers, scale_table
from regauge.layout.view import component_view, scale_view

Path = Literal["NONE", "DIRECT", "REMAP", "CONVERT", "REFUSED"]
_RANK: dict[Path, int] = {"NONE": 0, "DIRECT": 1, "REMAP": 2, "CONVERT": 3, "REFUSED": 4}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One clash: the field, what each side says, and what to change."""

    field: str
    prefill: str
    decode: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: prefill has {self.prefill}, decode has {self.decode}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class LaneVerdict:
    """The path of one component over the layers that a prefill group and a decode group share."""

    component: str
    prefill_group: int
    decode_group: int
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    """Global heads that both ranks hold."""
    path: Path
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of `check`."""

    path: Path
    lanes: tuple[LaneVerdict, ...]
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]
    pair: str
    """SHA-256, in hex, over both layouts' digests: both ends of a connection compare it."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason of every lane, each once, in order."""
        return tuple(dict.fromkeys(r for lane in self.lanes for r in lane.reasons))


Judge = Callable[[Layout, Layout], Verdict]
"""Compares a prefill and a decode layout: `check`, or something stricter such as `regauge.plan.gate.Gate.check`."""


def check(prefill: Layout, decode: Layout, *, whole: bool = True) -> Verdict:
    """Compare two sound layouts (see `layout.validate`), each of one rank.

    With `whole`, a side that does not hold all that its rank should is refused; without, what both hold is compared.
    """
    refusals = list(_model_clashes(prefill.model, decode.model))
    lanes: list[LaneVerdict] = []
    if not refusals:
        if whole:
            refusals += [*_incomplete(prefill, "prefill"), *_incomplete(decode, "decode"), *_missing(prefill, decode)]
        lanes += _lanes(prefill, decode)
        refusals += [r for lane in lanes for r in _inconvertible(prefill, decode, lane)]
    path = worst(lane.path for lane in lanes)
    return Verdict(
        path="REFUSED" if refusals else path,
        lanes=tuple(lanes),
        refusals=tuple(refusals),
        notes=tuple(_notes(prefill, decode, lanes)),
        pair=hashlib.sha256(f"{prefill.digest()} {decode.digest()}".encode()).hexdigest(),
    )


def worst(paths: Iterable[Path]) -> Path:
    """Return the path that asks most; NONE of no paths."""
    return max(paths, key=_RANK.__getitem__, default="NONE")


def _model_clashes(p: Model, d: Model) -> Iterator[Refusal]:
    same_model = "Serve the same model on both sides."
    if p.name != d.name:
        yield Refusal("model.name", p.name, d.name,
                      "Serve the same model on both sides, or give it the same model.name if the weights are the same.")  # fmt: skip
    if p.num_layers != d.num_layers:
        yield Refusal("model.num_layers", str(p.num_layers), str(d.num_layers), same_model)
    if p.revision and d.revision and p.revision != d.revision:
        yield Refusal("model.revision", p.revision, d.revision, "Load the same revision of the weights on both sides.")
    ours, theirs = ({(x.kind, x.layer_ids): x for x in m.states} for m in (p, d))
    if ours.keys() != theirs.keys():
        yield Refusal(
            "model.states",
            _states(p),
            _states(d),
            "Describe the same kinds of state for the same layers on both sides.",
        )
        return
    for key, state in ours.items():
        alone = sum(kind == state.kind for kind, _ in ours) == 1
        yield from _state_clashes(
            state, theirs[key], f"model.states[{state.kind}{'' if alone else ' ' + state.layers}]"
        )


def _states(model: Model) -> str:
    return ", ".join(f"{x.kind} in layers {x.layers}" for x in model.states)


def _state_clashes(p: State, d: State, path: str) -> Iterator[Refusal]:
    same = "Serve the same model on both sides; heads count those of all ranks together, and padding is described with strides."
    if sorted(p.arrays) != sorted(d.arrays):
        yield Refusal(f"{path}.arrays", ", ".join(sorted(p.arrays)), ", ".join(sorted(d.arrays)), same)
        return
    for name in p.arrays:
        for field in ("heads", "dim"):
            a, b = getattr(p.arrays[name], field), getattr(d.arrays[name], field)
            if a != b:
                yield Refusal(f"{path}.arrays.{name}.{field}", str(a), str(b), same)
    if p.window != d.window:
        yield Refusal(
            f"{path}.window", str(p.window), str(d.window), "Serve the same model with the same window on both sides."
        )
    yield from _rope_clashes(p.rope, d.rope, f"{path}.rope")


def _rope_clashes(p: Rope | None, d: Rope | None, path: str) -> Iterator[Refusal]:
    if (p is None) != (d is None):
        yield Refusal(path, "none" if p is None else "rotary", "none" if d is None else "rotary",
                      "Keys carry the rotation in their bytes: give both sides the same rope.")  # fmt: skip
    elif p is not None and d is not None:
        for name in ("theta", "dim", "interleaved", "scaling"):
            a, b = getattr(p, name), getattr(d, name)
            if a != b:
                yield Refusal(f"{path}.{name}", str(a) or "none", str(b) or "none",
                              "Keys carry the rotation in their bytes: start both engines with the same rope settings.")  # fmt: skip


def _incomplete(layout: Layout, side: str) -> Iterator[Refusal]:
    """States that the rank's layers keep and no group holds: sent without them, answers would be fluent and wrong."""
    held = {(g.kind, c.name, x) for g in layout.groups for c in g.components for x in g.layer_ids}
    layers = {x for _, _, x in held}
    stage = range(min(layers), max(layers) + 1) if layout.shard.pp_size > 1 else range(layout.model.num_layers)
    for state in layout.model.states:
        for name in state.arrays:
            gone = tuple(x for x in sorted(state.layer_ids) if x in stage and (state.kind, name, x) not in held)
            if gone:
                yield Refusal(f"groups ({side})", *_both(side, f"no {state.kind} {name} of layers {format_layers(gone)}"),
                              f"Describe where the {side} side keeps it; a rank of pipeline stages says so in shard.pp_size.")  # fmt: skip


def _both(side: str, text: str) -> tuple[str, str]:
    model = "a model that keeps it"
    return (text, model) if side == "prefill" else (model, text)


def _missing(prefill: Layout, decode: Layout) -> Iterator[Refusal]:
    """Heads that decode needs and neither this prefill rank nor another of its tensor-parallel group holds."""
    if prefill.shard.tp_size > 1:
        return
    have = {
        (g.kind, c.name, layer): prefill.heads(g, c)
        for g in prefill.groups
        for c in g.components
        for layer in g.layer_ids
    }
    for index, group in enumerate(decode.groups):
        for component in group.components:
            wanted = decode.heads(group, component)
            for held in {have.get((group.kind, component.name, layer), wanted) for layer in group.layer_ids}:
                if not set(wanted) <= set(held):
                    yield Refusal(f"groups[{index}].{component.name}.heads", f"heads {_span(held)}", f"heads {_span(wanted)}",
                                  "Describe every head on the prefill side, or say which rank of how many this is.")  # fmt: skip


def _lanes(prefill: Layout, decode: Layout) -> Iterator[LaneVerdict]:
    for j, dst in enumerate(decode.groups):
        for i, src in enumerate(prefill.groups):
            layers = tuple(sorted(set(src.layer_ids) & set(dst.layer_ids)))
            if src.kind != dst.kind or not layers or not share_tokens(prefill.shard, decode.shard):
                continue
            for b in dst.components:
                a = next((c for c in src.components if c.name == b.name), None)
                if a is None:
                    continue
                held = prefill.heads(src, a)
                heads = tuple(h for h in decode.heads(dst, b) if h in held)
                if heads:
                    sides = _Sides(prefill, decode, src, dst, a, b, heads)
                    convert, remap = tuple(_convert_reasons(sides)), tuple(_remap_reasons(sides))
                    path: Path = "CONVERT" if convert else "REMAP" if remap else "DIRECT"
                    yield LaneVerdict(b.name, i, j, layers, heads, path, convert + remap)


def share_tokens(p: Shard, d: Shard) -> bool:
    """Say whether some token lies on both ranks: whether a stripe of one overlaps a stripe of the other.

    Stripes start at multiples of their periods; the differences of those are the multiples of the periods' greatest common divisor.
    """
    period = gcd(p.cp_size * p.cp_stripe, d.cp_size * d.cp_stripe)
    low = p.cp_rank * p.cp_stripe - (d.cp_rank + 1) * d.cp_stripe + 1
    high = (p.cp_rank + 1) * p.cp_stripe - 1 - d.cp_rank * d.cp_stripe
    return high // period * period >= low


@dataclass(frozen=True, slots=True)
class _Sides:
    """One component on both sides."""

    prefill: Layout
    decode: Layout
    src: Group
    dst: Group
    a: Component
    b: Component
    heads: tuple[int, ...]


def _inconvertible(prefill: Layout, decode: Layout, lane: LaneVerdict) -> Iterator[Refusal]:
    """Conversions that no kernel does."""
    if lane.path != "CONVERT":
        return
    src, dst = prefill.groups[lane.prefill_group], decode.groups[lane.decode_group]
    a, b = src.component(lane.component), dst.component(lane.component)
    path = f"groups[{lane.decode_group}].{b.name}"
    if any(DTYPES[c.dtype].opaque or (c.scale is not None and c.scale.dtype == "float8_e4m3fn") for c in (a, b)):
        yield Refusal(f"{path}.dtype", f"{a.dtype} with scale {_scale_name(a.scale)}",
                      f"{b.dtype} with scale {_scale_name(b.scale)}",
                      "This format is moved and not converted: use the same one on both sides.")  # fmt: skip
    if b.scale is not None and b.scale.at is not None and not DTYPES[b.dtype].takes_scales:
        yield Refusal(
            f"{path}.scale", a.dtype, f"{b.dtype} with stored scales", "Store scales beside 8-bit codes only."
        )
    if a.scale is not None and a.scale.at is not None and b.scale is not None and b.scale.at is not None:
        rows = a.dim // a.scale.blocks(a.dim), b.dim // b.scale.blocks(b.dim)
        if rows[0] % rows[1]:
            yield Refusal(f"{path}.scale.block", f"a scale per {rows[0]} elements", f"one per {rows[1]}",
                          "A decode scale must not span several of prefill's: use blocks that divide them.")  # fmt: skip


def _same_scale(s: _Sides) -> bool:
    """Say whether the codes mean the same values on both sides: then they cross as they are."""
    x, y = s.a.scale, s.b.scale
    if (x is not None and x.at is not None) or (y is not None and y.at is not None):
        if x is None or y is None or x.at is None or y.at is None:
            return False
        return x.blocks(s.a.dim) == y.blocks(s.b.dim) and x.dtype == y.dtype
    tables = [
        _constants(c, g, [h - layout.heads(g, c)[0] for h in s.heads])
        for c, g, layout in ((s.a, s.src, s.prefill), (s.b, s.dst, s.decode))
    ]
    return all(tables[0][layer] == tables[1][layer] for layer in set(s.src.layer_ids) & set(s.dst.layer_ids))


def _constants(component: Component, group: Group, heads: list[int]) -> dict[int, list[float]]:
    """Return the constant scale of each head, by layer; no scale is a scale of one."""
    scale = component.scale or Scale("tensor", values=1.0)
    rows = scale_table(scale, len(group.layer_ids), component.heads)
    return {layer: [row[h] for h in heads] for layer, row in zip(group.layer_ids, rows, strict=True)}


def _convert_reasons(s: _Sides) -> Iterator[str]:
    if s.a.dtype != s.b.dtype:
        yield f"dtype {s.a.dtype} -> {s.b.dtype}"
    if not _same_scale(s):
        yield f"scale {_scale_name(s.a.scale)} -> {_scale_name(s.b.scale)}"


def _scale_name(scale: Scale | None) -> str:
    if scale is None:
        return "none"
    per = f"{scale.per} of {scale.block}" if scale.per == "block" else scale.per
    stored = "" if scale.dtype == "float32" else f" ({scale.dtype})"
    return f"per {per}" + (stored if scale.at else " (constant)")


def _remap_reasons(s: _Sides) -> Iterator[str]:
    src, dst, a, b = s.src, s.dst, s.a, s.b
    if src.page_size != dst.page_size:
        yield f"page size {src.page_size} -> {dst.page_size}"
    ours, theirs = s.prefill.heads(src, a), s.decode.heads(dst, b)
    if ours != theirs:
        yield f"heads {_span(ours)} -> {_span(theirs)}"
    stripes = [(x.cp_rank, x.cp_size, x.cp_stripe) for x in (s.prefill.shard, s.decode.shard)]
    if stripes[0] != stripes[1]:
        yield "tokens " + " -> ".join(f"{rank} of {size} in stripes of {stripe}" for rank, size, stripe in stripes)
    if a.at.order.split() != b.at.order.split():
        yield f"axis order '{a.at.order}' -> '{b.at.order}'"
    same_regions = _same_regions(src, dst)
    if not same_regions:
        yield "regions " + ", ".join(c.at.region for c in src.components) + " -> " + ", ".join(
            c.at.region for c in dst.components)  # fmt: skip
    va, vb = component_view(src, a), component_view(dst, b)
    alike = src.page_size == dst.page_size and a.heads == b.heads
    if alike and not all(
        np.array_equal(getattr(va, n) * vb.itemsize, getattr(vb, n) * va.itemsize) for n in ("token", "head", "dim")
    ):
        yield "strides inside the page differ"
    elif alike and (va.outside or vb.outside):
        yield "pages are not blocks of their own"
    elif alike and same_regions and _place_in_page(src, a) * vb.itemsize != _place_in_page(dst, b) * va.itemsize:
        yield "components lie at other places of the page"
    elif alike and a.scale is not None and a.scale.at is not None and b.scale is not None and b.scale.at is not None:
        sa, sb = scale_view(src, a), scale_view(dst, b)
        if not all(np.array_equal(getattr(sa, n), getattr(sb, n)) for n in ("token", "head", "dim")):
            yield "scales lie differently inside the page"


def _place_in_page(group: Group, component: Component) -> int:
    """Return the bytes from the first component of the region's page to this one; 0 where each has pages of its own."""
    first = next(c for c in group.components if c.at.region == component.at.region)
    view = component_view(group, component)
    offset = view.offset - component_view(group, first).offset
    return offset if abs(offset) < view.page_stride else 0


def _same_regions(src: Group, dst: Group) -> bool:
    """Say whether components share regions in the same way; the regions' names do not matter."""

    def shape(group: Group) -> list[int]:
        names = [c.at.region for c in group.components]
        return [names.index(n) for n in names]

    return shape(src) == shape(dst) and [c.name for c in src.components] == [c.name for c in dst.components]


def _notes(prefill: Layout, decode: Layout, lanes: list[LaneVerdict]) -> Iterator[str]:
    for lane in lanes:
        a = prefill.groups[lane.prefill_group].component(lane.component)
        b = decode.groups[lane.decode_group].component(lane.component)
        if lane.path != "CONVERT":
            continue
        if DTYPES[b.dtype].whole and _unscaled(b, decode.groups[lane.decode_group]):
            yield f"{b.name}: values are rounded to whole numbers: give {b.dtype} a scale"
        if DTYPES[b.dtype].itemsize < DTYPES[a.dtype].itemsize:
            yield f"{b.name}: values are rounded to {b.dtype}; beyond +-{DTYPES[b.dtype].max:g} x scale they saturate"
        elif b.dtype == "float16" and a.dtype == "bfloat16":
            yield f"{b.name}: beyond +-65504 values saturate; below 6e-8 they become 0"
        elif DTYPES[b.dtype].itemsize > DTYPES[a.dtype].itemsize:
            yield f"{b.name}: every {a.dtype} code is exact in {b.dtype}" + (
                "" if a.scale is None else " before its scale"
            )


def _unscaled(c: Component, group: Group) -> bool:
    """Say whether codes are the values themselves: no scale, or constants of 1."""
    stored = c.scale is not None and c.scale.at is not None
    return not stored and all(x == 1.0 for row in _constants(c, group, list(range(c.heads))).values() for x in row)


def _span(heads: range) -> str:
    return f"{heads[0]}-{heads[-1]}" if len(heads) > 1 else str(heads[0])

"""Which path a pair of layouts takes, and why; or why it takes none. The same answer from both ends.

DIRECT: whole pages, as they lie. REMAP: the same bytes at other places. CONVERT: other bytes. REFUSED: no correct path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Component, Group, Layout, Scale, format_layers, scale_table
from regauge.layout.view import component_view, scale_view

Path = Literal["DIRECT", "REMAP", "CONVERT", "REFUSED"]
_RANK: dict[Path, int] = {"DIRECT": 0, "REMAP": 1, "CONVERT": 2, "REFUSED": 3}


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


def check(prefill: Layout, decode: Layout) -> Verdict:
    """Compare two sound layouts (see `layout.spec.validate`)."""
    refusals = list(_model_clashes(prefill, decode))
    lanes: list[LaneVerdict] = []
    if not refusals:
        refusals += _missing(prefill, decode)
        lanes += _lanes(prefill, decode)
    path: Path = max((lane.path for lane in lanes), key=_RANK.__getitem__, default="REFUSED")
    return Verdict(
        path="REFUSED" if refusals else path,
        lanes=tuple(lanes),
        refusals=tuple(refusals),
        notes=tuple(_notes(prefill, decode, lanes)),
        pair=hashlib.sha256(f"{prefill.digest()} {decode.digest()}".encode()).hexdigest(),
    )


def _model_clashes(prefill: Layout, decode: Layout) -> Iterator[Refusal]:
    p, d = prefill.model, decode.model
    remedies = {
        "name": "Serve the same model on both sides, or give it the same model.name if the weights are the same.",
        "num_layers": "Serve the same model on both sides.",
        "kv_heads": "Serve the same model on both sides; model.kv_heads counts the heads of all ranks together.",
        "head_dim": "Serve the same model on both sides; describe padding with strides, not with a larger head dim.",
        "value_dim": "Serve the same model on both sides.",
    }
    for name, remedy in remedies.items():
        if getattr(p, name) != getattr(d, name):
            yield Refusal(f"model.{name}", str(getattr(p, name)), str(getattr(d, name)), remedy)
    if p.revision and d.revision and p.revision != d.revision:
        yield Refusal("model.revision", p.revision, d.revision, "Load the same revision of the weights on both sides.")
    if (p.rope is None) != (d.rope is None):
        yield Refusal("model.rope", "none" if p.rope is None else "rotary", "none" if d.rope is None else "rotary",
                      "Keys carry the rotation in their bytes: give both sides the same rope.")  # fmt: skip
    elif p.rope is not None and d.rope is not None:
        for name in ("theta", "dim", "interleaved", "scaling"):
            a, b = getattr(p.rope, name), getattr(d.rope, name)
            if a != b:
                yield Refusal(f"model.rope.{name}", str(a) or "none", str(b) or "none",
                              "Keys carry the rotation in their bytes: start both engines with the same rope settings.")  # fmt: skip


def _missing(prefill: Layout, decode: Layout) -> list[Refusal]:
    """What decode needs and this prefill rank does not hold."""
    out = []
    lacking = sorted(set(decode.heads) - set(prefill.heads))
    if lacking:
        out.append(Refusal("shard", f"KV heads {_span(prefill.heads)}", f"KV heads {_span(decode.heads)}",
                           "One prefill rank must hold every head of the decode rank: lower the prefill side's tp_size "
                           "or raise the decode side's."))  # fmt: skip
    have = {(g.kind, c.name, layer) for g in prefill.groups for c in g.components for layer in g.layer_ids}
    for index, group in enumerate(decode.groups):
        for component in group.components:
            gone = tuple(x for x in group.layer_ids if (group.kind, component.name, x) not in have)
            if gone:
                out.append(Refusal(f"groups[{index}].{component.name}", f"nothing for layers {format_layers(gone)}",
                                   f"layers {group.layers}", "Describe those layers on the prefill side."))  # fmt: skip
    return out


def _lanes(prefill: Layout, decode: Layout) -> Iterator[LaneVerdict]:
    for j, dst in enumerate(decode.groups):
        for i, src in enumerate(prefill.groups):
            layers = tuple(sorted(set(src.layer_ids) & set(dst.layer_ids)))
            if src.kind != dst.kind or not layers:
                continue
            for b in dst.components:
                a = next((c for c in src.components if c.name == b.name), None)
                if a is None:
                    continue
                convert = tuple(_convert_reasons(a, b, src, dst, prefill, decode))
                remap = tuple(_remap_reasons(a, b, src, dst, prefill, decode))
                path: Path = "CONVERT" if convert else "REMAP" if remap else "DIRECT"
                yield LaneVerdict(b.name, i, j, layers, path, convert + remap)


def _same_scale(a: Component, b: Component, src: Group, dst: Group, prefill: Layout, decode: Layout) -> bool:
    """Say whether the codes mean the same values on both sides: then they cross as they are."""
    x, y = a.scale, b.scale
    if (x is not None and x.at is not None) or (y is not None and y.at is not None):
        return x is not None and y is not None and x.at is not None and y.at is not None
    common = [h for h in decode.heads if h in prefill.heads]
    tables = [
        _constants(c, g, [h - layout.heads[0] for h in common])
        for c, g, layout in ((a, src, prefill), (b, dst, decode))
    ]
    return all(tables[0][layer] == tables[1][layer] for layer in set(src.layer_ids) & set(dst.layer_ids))


def _constants(component: Component, group: Group, heads: list[int]) -> dict[int, list[float]]:
    """Return the constant scale of each head, by layer; no scale is a scale of one."""
    scale = component.scale or Scale("tensor", values=1.0)
    rows = scale_table(scale, len(group.layer_ids), component.heads)
    return {layer: [row[h] for h in heads] for layer, row in zip(group.layer_ids, rows, strict=True)}


def _convert_reasons(
    a: Component, b: Component, src: Group, dst: Group, prefill: Layout, decode: Layout
) -> Iterator[str]:
    if a.dtype != b.dtype:
        yield f"dtype {a.dtype} -> {b.dtype}"
    if not _same_scale(a, b, src, dst, prefill, decode):
        yield f"scale {_scale_name(a.scale)} -> {_scale_name(b.scale)}"


def _scale_name(scale: Scale | None) -> str:
    if scale is None:
        return "none"
    return f"per {scale.per}" + ("" if scale.at else " (constant)")


def _remap_reasons(
    a: Component, b: Component, src: Group, dst: Group, prefill: Layout, decode: Layout
) -> Iterator[str]:
    if src.page_size != dst.page_size:
        yield f"page size {src.page_size} -> {dst.page_size}"
    if tuple(prefill.heads) != tuple(decode.heads):
        yield f"KV heads {_span(prefill.heads)} -> {_span(decode.heads)}"
    if a.at.order.split() != b.at.order.split():
        yield f"axis order '{a.at.order}' -> '{b.at.order}'"
    if not _same_regions(src, dst):
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
    elif alike and a.scale is not None and a.scale.at is not None and b.scale is not None and b.scale.at is not None:
        sa, sb = scale_view(src, a), scale_view(dst, b)
        if not all(np.array_equal(getattr(sa, n), getattr(sb, n)) for n in ("token", "head")):
            yield "scales lie differently inside the page"


def _same_regions(src: Group, dst: Group) -> bool:
    """Say whether components share regions in the same way; the regions' names do not matter."""

    def shape(group: Group) -> list[int]:
        names = [c.at.region for c in group.components]
        return [names.index(n) for n in names]

    return shape(src) == shape(dst) and [c.name for c in src.components] == [c.name for c in dst.components]


def _notes(prefill: Layout, decode: Layout, lanes: list[LaneVerdict]) -> Iterator[str]:
    for lane in lanes:
        a = next(c for c in prefill.groups[lane.prefill_group].components if c.name == lane.component)
        b = next(c for c in decode.groups[lane.decode_group].components if c.name == lane.component)
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

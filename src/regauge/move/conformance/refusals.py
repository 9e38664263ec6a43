"""When a refusal is right, said a second time: from what the bytes mean, without asking the planner.

A pair of sides must be refused for one of these causes and for nothing else; the suite counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from regauge.layout.spec import Component, Layout, Model, scale_table

_MOVED_ONLY = ("float4_e2m1fn_x2",)
_MOVED_ONLY_SCALES = ("float8_e4m3fn",)
_CODES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8")

Key = tuple[str, str, int]
"""Kind, component, layer."""


def causes(prefill: Sequence[Layout], decode: Sequence[Layout]) -> tuple[str, ...]:
    """Return every cause for which a pair of sides, all ranks of each, must be refused; none: it must be carried."""
    if cause := _other_model(prefill[0].model, decode[0].model):
        return (cause,)
    ours, theirs = _formats(prefill), _formats(decode)
    kept = {(s.kind, name, x) for s in prefill[0].model.states for name in s.arrays for x in s.layer_ids}
    found = [f"{side} lacks a state" for side, has in (("prefill", ours), ("decode", theirs)) if kept - has.keys()]
    for key in ours.keys() & theirs.keys():
        for a, scales in ours[key]:
            for b, wanted in theirs[key]:
                found += _clashes(a, b, constants_alike=set(scales) == set(wanted))
    return tuple(sorted(set(found)))


def _other_model(a: Model, b: Model) -> str:
    if a.name != b.name:
        return "another model"
    if a.revision and b.revision and a.revision != b.revision:
        return "another revision"
    return "" if a.identity() == b.identity() else "the same name for another model"


def _formats(side: Sequence[Layout]) -> dict[Key, list[tuple[Component, tuple[float, ...]]]]:
    """Return how each array of each layer is written, with its constant scales, by rank without repeats."""
    out: dict[Key, list[tuple[Component, tuple[float, ...]]]] = {}
    for layout in side:
        for group in layout.groups:
            for c in group.components:
                stored = c.scale is not None and c.scale.at is not None
                rows = scale_table(c.scale, len(group.layer_ids), c.heads) if c.scale and not stored else None
                for i, layer in enumerate(group.layer_ids):
                    one = (c, tuple(rows[i]) if rows else () if stored else (1.0,) * c.heads)
                    known = out.setdefault((group.kind, c.name, layer), [])
                    if one not in known:
                        known.append(one)
    return out


def _clashes(a: Component, b: Component, *, constants_alike: bool) -> Iterator[str]:
    if _as_they_are(a, b, constants_alike=constants_alike):
        return
    if any(c.dtype in _MOVED_ONLY or (c.scale is not None and c.scale.dtype in _MOVED_ONLY_SCALES) for c in (a, b)):
        yield "a format that is moved only"
    if b.scale is None or b.scale.at is None:
        return
    if b.dtype not in _CODES:
        yield "scales beside wide elements"
    if a.scale is not None and a.scale.at is not None:
        covers, wanted = a.dim // a.scale.blocks(a.dim), b.dim // b.scale.blocks(b.dim)
        if covers % wanted:
            yield "a new scale over several old ones"


def _as_they_are(a: Component, b: Component, *, constants_alike: bool) -> bool:
    """Say whether a code means the same value on both sides."""
    stored = [c.scale for c in (a, b) if c.scale is not None and c.scale.at is not None]
    if a.dtype != b.dtype or len(stored) == 1:
        return False
    if not stored:
        return constants_alike
    return stored[0].dtype == stored[1].dtype and stored[0].blocks(a.dim) == stored[1].blocks(b.dim)

"""Does a declared layout say where an engine's bytes lie? The comparison, without the engine.

The engine has written a `Pattern`, round by round, and its regions were read after each. Every element must lie, in every
round, where the declared layout says; nothing else may have changed. If one does not, the first is named with the place
where its bytes were found and with what would explain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regauge.layout.probe.pattern import Pattern
from regauge.layout.probe.snapshot import Memory, PlacedArray, arrays, grid
from regauge.layout.probe.suspects import Elsewhere, explain
from regauge.layout.spec import Group, Layout
from regauge.layout.view import View, component_view, scale_view

FILLS = (0xA5, 0x5A)
"""What a region's bytes are set to before a round, in turn; two, so that a byte written with one of them shows."""
MAX_STRAYS = 8


@dataclass(frozen=True, slots=True)
class Covered:
    """What of one group was written and compared."""

    kind: str
    layers: tuple[int, ...]
    tokens: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stray:
    """Bytes that changed and are none of those written."""

    region: str
    first: int
    end: int
    holds: str
    """What the layout says lies there; empty: nothing, as in padding."""

    def __str__(self) -> str:
        return f"bytes {self.first:#x} to {self.end - 1:#x} of {self.region} changed: {self.holds or 'padding'}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer. Verified: every written element lies where declared, and nothing else that the layout knows changed."""

    verified: bool
    rounds: int
    elements: int
    covered: tuple[Covered, ...]
    first: Elsewhere | None
    strays: tuple[Stray, ...]


def verify(layout: Layout, pattern: Pattern, memory: Memory) -> Verdict:
    """Compare what the engine wrote with what the layout declares."""
    first: Elsewhere | None = None
    count = 0
    known = list(arrays(layout, pattern))
    for array in known:
        for layer in range(array.shape[0]):
            good = array.match(memory, grid(array, layer))
            count += good.size
            if not good.all():
                place = np.unravel_index(int(np.argmin(good)), good.shape)
                first = explain(layout, pattern, memory, array, (layer, *(int(i) for i in place)))
                break
        if first is not None:
            break
    strays = () if first is not None else _strays(layout, memory, known)
    fine = first is None and not any(s.holds for s in strays)
    return Verdict(fine, pattern.rounds, count, _covered(layout, pattern), first, strays)


def _covered(layout: Layout, pattern: Pattern) -> tuple[Covered, ...]:
    seen: dict[int, Covered] = {}
    for f in pattern.fields:
        pages = -(-f.tokens // layout.groups[f.group].page_size)
        seen[f.group] = Covered(f.kind, f.layers, f.tokens, tuple(pattern.tables[f.group][:pages].tolist()))
    return tuple(seen.values())


def _strays(layout: Layout, memory: Memory, known: Sequence[PlacedArray]) -> tuple[Stray, ...]:
    changed = np.zeros(len(memory.rounds[0]), bool)
    for step, flat in enumerate(memory.rounds):
        changed |= flat != FILLS[step % len(FILLS)]
    for array in known:
        for layer in range(array.shape[0]):
            at = array.addresses(memory, grid(array, layer))
            changed[at[..., None] + np.arange(array.view.itemsize)] = False
    found: list[Stray] = []
    for name, (start, size) in memory.starts.items():
        spots = np.flatnonzero(changed[start : start + size])
        runs = np.split(spots, np.flatnonzero(np.diff(spots) > 1) + 1) if len(spots) else []
        for run in runs[: MAX_STRAYS - len(found)]:
            first, end = int(run[0]), int(run[-1]) + 1
            holds = next((h for byte in run[:64].tolist() if (h := _holder(layout, name, byte))), "")
            found.append(Stray(name, first, end, holds))
    return tuple(found)


def _holder(layout: Layout, region: str, byte: int) -> str:
    """Return which element, if any, a byte belongs to."""
    for group in layout.groups:
        for c in group.components:
            views = [(c.name, component_view(group, c))]
            if c.scale is not None and c.scale.at is not None:
                views.append((f"scale of {c.name}", scale_view(group, c)))
            for label, view in views:
                for i, layer in enumerate(group.layer_ids):
                    if view.region.replace("{layer}", str(layer)) == region and (
                        text := _element(view, group, byte - view.offset - i * view.layer_stride)
                    ):
                        return f"{label}, layer {layer}, {text}"
    return ""


def _element(view: View, group: Group, rest: int) -> str:
    """Return the page and place in it of a byte that lies `rest` bytes after the start of page 0."""
    inner = view.token[:, None, None] + view.head[None, :, None] + view.dim[None, None, :]
    pages = np.arange(group.pages) * view.page_stride
    for page in np.flatnonzero((pages <= rest) & (rest < pages + view.page_bytes)).tolist():
        at = rest - pages[page] - inner
        hits = np.argwhere((at >= 0) & (at < view.itemsize))
        if len(hits):
            token, head, dim = hits[0].tolist()
            return f"page {page}, token {token} of the page, head {head}, dim {dim}"
    return ""

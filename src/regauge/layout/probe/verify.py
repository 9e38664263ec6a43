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
from regauge.layout.probe.snapshot import Bools, Memory, PlacedArray, arrays, grid
from regauge.layout.probe.suspects import Elsewhere, explain
from regauge.layout.spec import Group, Layout
from regauge.layout.view import View, array_views, page_runs

FILLS = (0xA5, 0x5A)
"""What a region's bytes are set to before a round, in turn; two, so that a byte written with one of them shows."""
MAX_STRAYS = 8
MARKED = 1 << 22
"""Bytes of elements that are marked at once, in pages: bounds the memory that their addresses take."""


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
    hit, strays = (False, ()) if first is not None else _strays(layout, memory, known)
    return Verdict(first is None and not hit, pattern.rounds, count, _covered(layout, pattern), first, strays)


def _covered(layout: Layout, pattern: Pattern) -> tuple[Covered, ...]:
    seen: dict[int, Covered] = {}
    for f in pattern.fields:
        pages = -(-f.tokens // layout.groups[f.group].page_size)
        seen[f.group] = Covered(f.kind, f.layers, f.tokens, tuple(pattern.tables[f.group][:pages].tolist()))
    return tuple(seen.values())


def _strays(layout: Layout, memory: Memory, known: Sequence[PlacedArray]) -> tuple[bool, tuple[Stray, ...]]:
    """Return whether elements that nobody wrote changed, and the first runs of bytes that did: those with elements first."""
    changed = _changed(memory, known)
    hits = np.flatnonzero(changed & _held(layout, memory))
    edges = np.flatnonzero(np.diff(changed, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    first = np.append(hits, len(changed))[np.searchsorted(hits, starts)]  # held byte at or after the start of each run
    listed = np.argsort(first >= ends, kind="stable")[:MAX_STRAYS].tolist()
    found: list[Stray] = []
    for start, end, hit in zip(*(x[listed].tolist() for x in (starts, ends, first)), strict=True):
        name, byte = memory.where(start)
        holds = _holder(layout, *memory.where(hit)) if hit < end else ""
        found.append(Stray(name, byte, byte + end - start, holds))
    return len(hits) > 0, tuple(found)


def _changed(memory: Memory, known: Sequence[PlacedArray]) -> Bools:
    """Return which bytes of the regions changed in a round and are none of those written, bool[n]."""
    changed = np.zeros(len(memory.rounds[0]), bool)
    for start, size in memory.starts.values():
        for step, flat in enumerate(memory.rounds):
            changed[start : start + size] |= flat[start : start + size] != FILLS[step % len(FILLS)]
    for array in known:
        for layer in range(array.shape[0]):
            at = array.addresses(memory, grid(array, layer))
            changed[at[..., None] + np.arange(array.view.itemsize)] = False
    return changed


def _held(layout: Layout, memory: Memory) -> Bools:
    """Return which bytes belong to an element of the layout, whether the pattern writes it or not, bool[n]."""
    held = np.zeros(len(memory.rounds[0]), bool)
    for group in layout.groups:
        for _, view in (named for c in group.components for named in array_views(group, c)):
            for i, layer in enumerate(group.layer_ids):
                start, size = memory.starts.get(view.region.replace("{layer}", str(layer)), (0, 0))
                _hold(held[start : start + size], view, view.offset + i * view.layer_stride, group.pages)
    return held


def _hold(region: Bools, view: View, offset: int, pages: int) -> None:
    """Mark the elements of all pages of a layer, page 0 of which begins at `offset`, as far as the region goes."""
    runs, size = page_runs(view)
    inner = (runs[:, None] + np.arange(size)).ravel()
    pages = min(pages, -(-max(len(region) - offset, 0) // view.page_stride))
    at_once = max(1, MARKED // len(inner))
    for page in range(0, pages, at_once):
        starts = offset + np.arange(page, min(page + at_once, pages)) * view.page_stride
        at = starts[:, None] + inner
        region[at[at < len(region)]] = True


def _holder(layout: Layout, region: str, byte: int) -> str:
    """Return which element, if any, a byte belongs to."""
    for group in layout.groups:
        for c in group.components:
            for label, view in array_views(group, c):
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

"""Where, in a dump, do the pages of known numbers lie, if they are packed in a given way?

A page of one layer is looked for as a whole: its elements have fixed distances, so that any one of them says where the page
must start. What lies between pages and layers is measured, not assumed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from regauge.layout.probe.codes import Bytes
from regauge.layout.probe.pattern import mix
from regauge.layout.probe.placing import placement, view_of, with_placement
from regauge.layout.probe.snapshot import Memory
from regauge.layout.spec import Component, Group, Placement
from regauge.layout.view import Int64, View

PICKS = 24
MAX_TRIED = 16
MAX_KEPT = 256
MAX_KEPT_BYTES = 256 << 20
"""Of addresses of codes: a code that is frequent in a large dump has very many."""


class Finder:
    """Looks for pages in the regions of a dump."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._flat = memory.rounds[0]
        self._spots: dict[bytes, Int64] = {}
        self._kept = 0

    def spots(self, code: Bytes) -> Int64:
        """Return all addresses that hold a code, uint8[itemsize]."""
        key = code.tobytes()
        if key not in self._spots:
            found: Int64 = np.flatnonzero(self._flat[: len(self._flat) - len(code) + 1] == code[0])
            for i, byte in enumerate(code[1:], 1):
                found = found[self._flat[found + i] == byte]
            if found.nbytes > MAX_KEPT_BYTES:
                return found
            if len(self._spots) >= MAX_KEPT or self._kept + found.nbytes > MAX_KEPT_BYTES:
                self._spots.clear()
                self._kept = 0
            self._spots[key] = found
            self._kept += found.nbytes
        return self._spots[key]

    def run(self, codes: Bytes, offsets: Int64) -> Int64:
        """Return the addresses a at which, for all i, codes[i] lies at a + offsets[i]; uint8[n, itemsize], int64[n]."""
        found: Int64 = self.spots(codes[0]) - offsets[0]
        for code, offset in zip(codes[1:], offsets[1:], strict=True):
            found = self._holding(found, code, int(offset))
        return found

    def _holding(self, found: Int64, code: Bytes, offset: int) -> Int64:
        found = found[(found + offset >= 0) & (found + offset + len(code) <= len(self._flat))]
        for i, byte in enumerate(code):
            found = found[self._flat[found + offset + i] == byte]
        return found

    def page(self, codes: Bytes, offsets: Int64, guess: int | None) -> int | None:
        """Return where a page starts: uint8[tokens, heads, dim, itemsize] at int64[tokens, heads, dim]; None: nowhere."""
        flat_codes, flat_offsets = codes.reshape(-1, codes.shape[-1]), offsets.ravel()
        if guess is not None and self._all(flat_codes, flat_offsets, guess):
            return guess
        picks = (mix(np.arange(PICKS), 5) % np.uint64(len(flat_offsets))).astype(np.int64)
        found = self.run(flat_codes[picks], flat_offsets[picks])
        for start in found[:MAX_TRIED].tolist():
            if self._all(flat_codes, flat_offsets, start):
                return int(start)
        return None

    def _all(self, codes: Bytes, offsets: Int64, start: int) -> bool:
        at = offsets + start
        if at.min() < 0 or at.max() + codes.shape[1] > len(self._flat):
            return False
        return bool((self._flat[at[:, None] + np.arange(codes.shape[1])] == codes).all())

    def pages(self, codes: Bytes, view: View, size: int, table: Int64) -> tuple[Int64, int]:
        """Look for all pages of all layers: uint8[layers, tokens, heads, dim, itemsize].

        Returns where each starts, int64[layers, pages], and how many were found; all or nothing of the first page's layer.
        """
        layers, tokens = codes.shape[:2]
        count = -(-tokens // size)
        starts = np.full((layers, count), -1, np.int64)
        inner = view.head[None, :, None] + view.dim[None, None, :]
        found = 0
        for layer in range(layers):
            for page in range(count):
                part = codes[layer, page * size : (page + 1) * size]
                offsets = view.token[: len(part), None, None] + inner
                start = self.page(part, offsets, _guess(starts, layer, page, view, table))
                if start is None:
                    return starts, found
                starts[layer, page] = start
                found += 1
        return starts, found


def _guess(starts: Int64, layer: int, page: int, view: View, table: Int64) -> int | None:
    if page:
        before = starts[layer - 1] if layer else None
        if before is not None:
            return int(starts[layer, 0] + before[page] - before[0])
        return int(starts[0, 0] + (table[page] - table[0]) * view.page_stride)
    if layer > 1:
        return int(2 * starts[layer - 1, 0] - starts[layer - 2, 0])
    return int(starts[0, 0] + view.layer_stride) if layer else None


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Where the pages of one array lie: evenly apart."""

    region: str
    """With `{layer}` where every layer has its own."""
    offset: int
    """Of page 0 of the group's first layer; negative: the dump begins after it."""
    page_stride: int
    layer_stride: int | None
    """None: a region for each layer, or one layer alone."""


def fit(
    starts: Int64, view: View, layers: Sequence[int], positions: Sequence[int], table: Int64, memory: Memory
) -> Fit | None:  # fmt: skip
    """Return the even distances that explain where pages start, int64[layers, pages]; None: there are none.

    `layers` are global numbers, `positions` their places in the group.
    """
    pages = table[: starts.shape[1]]
    stride = view.page_stride
    if len(pages) > 1:
        stride, rest = divmod(int(starts[0, 1] - starts[0, 0]), int(pages[1] - pages[0]))
        if rest:
            return None
    zero = starts - pages * stride
    first = zero[:, 0]
    if (zero != first[:, None]).any():
        return None
    low = int(view.token.min() + view.head.min() + view.dim.min())
    names = [memory.where(int(s[0]) + low)[0] for s in starts]
    offsets = [int(a) - memory.starts[name][0] for a, name in zip(first, names, strict=True)]
    if len(set(names)) > 1:
        region = _template(layers, names)
        return Fit(region, offsets[0], stride, None) if region and len(set(offsets)) == 1 else None
    if len(layers) == 1:
        return Fit(names[0], offsets[0], stride, None)
    step, rest = divmod(offsets[1] - offsets[0], positions[1] - positions[0])
    base = offsets[0] - positions[0] * step
    if rest or any(o != base + p * step for o, p in zip(offsets, positions, strict=True)):
        return None
    return Fit(names[0], base, stride, step)


def _template(layers: Sequence[int], names: Sequence[str]) -> str | None:
    """Return the name of which `{layer}` makes the names of all layers."""
    for number in re.finditer(rf"(?<!\d){layers[0]}(?!\d)", names[0]):
        text = f"{names[0][: number.start()]}{{layer}}{names[0][number.end() :]}"
        if all(text.replace("{layer}", str(x)) == name for x, name in zip(layers, names, strict=True)):
            return text
    return None


def placed(group: Group, component: Component, where: Fit, *, stored: bool) -> Placement:
    """Return how a component's elements (or stored scales) lie as measured; strides are given where the order says others."""
    view = view_of(group, component, stored=stored)
    own_region = "{layer}" in where.region
    order = placement(component, stored=stored).order.split()
    axes = [a for a in order if a != "kv" and not (a == "layer" and own_region)]
    if not own_region and "layer" not in axes:
        axes = ["layer", *axes]
    strides = {"page": where.page_stride} | ({} if where.layer_stride is None else {"layer": where.layer_stride})
    for axis in axes:
        name, _, inner = axis.partition(":")
        if name in ("token", "head", "dim"):
            step = _step(getattr(view, name), axes, name, inner=bool(inner))
            strides |= {axis: step} if step else {}
    out = Placement(" ".join(axes), where.region, max(where.offset, 0), strides)
    for axis in list(strides):
        fewer = msgspec.structs.replace(out, strides=_without(out.strides, axis))
        if _equal(group, *(with_placement(component, at, stored=stored) for at in (fewer, out)), stored=stored):
            out = fewer
    return out


def _step(offsets: Int64, axes: Sequence[str], name: str, *, inner: bool) -> int:
    width = next((int(a.partition(":")[2]) for a in axes if a.startswith(f"{name}:")), 1)
    index = 1 if inner else width
    if len(offsets) <= index or (inner and width == 1):
        return 0
    return int(offsets[index] - offsets[0])


def _without(strides: dict[str, int], axis: str) -> dict[str, int]:
    return {a: s for a, s in strides.items() if a != axis}


def _equal(group: Group, one: Component, two: Component, *, stored: bool) -> bool:
    alone = [msgspec.structs.replace(group, components=[c], pages=0) for c in (one, two)]
    a, b = (view_of(g, c, stored=stored) for g, c in zip(alone, (one, two), strict=True))
    return (
        a.layer_stride == b.layer_stride
        and a.page_stride == b.page_stride
        and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("token", "head", "dim"))
    )

"""What a dump tells of known numbers without a candidate: their dtype, and the distances between neighbours.

Runs of neighbouring elements are looked for at every distance; where one is found, so are those of other tokens and heads,
and from where they lie follow all distances, as long as they are even, or even within lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES
from regauge.layout.probe.codes import Bytes
from regauge.layout.probe.known import Known
from regauge.layout.probe.locate import Finder
from regauge.layout.probe.pattern import mix
from regauge.layout.spec import Component, Group, Layout, Placement
from regauge.layout.validate import validate
from regauge.layout.view import Int64

RUN = 4
ROWS = 12
MOST = 256
"""Elements along an axis that are looked at; the rest must follow, or the layout made of the distances finds no pages."""
NEAREST = 2048
"""Every distance up to so many elements is tried; beyond, those that the shape suggests."""


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Distances along one axis."""

    inner: int
    width: int
    """Elements that are `inner` bytes apart; 0: all."""
    outer: int = 0

    def __str__(self) -> str:
        return (
            f"{self.inner} bytes"
            if not self.width
            else f"{self.inner} bytes in lanes of {self.width}, {self.outer} between"
        )


def measure(known: Known, finder: Finder, dtypes: Sequence[str]) -> tuple[list[str], Layout | None]:
    """Return a line for each component, and a layout with the distances if all were found."""
    texts: list[str] = []
    groups: list[Group] | None = []
    for index, group in enumerate(known.layout.groups):
        components: list[Component] = []
        for c in group.components if known.layers[index] else ():
            text, found = _component(known, finder, index, c, dtypes)
            texts.append(f"{c.name}: {text}")
            if found is not None:
                components.append(found)
        if len(components) < len(group.components):
            groups = None
        elif groups is not None:
            groups.append(msgspec.structs.replace(group, components=components))
    if not groups:
        return texts, None
    try:
        return texts, validate(msgspec.structs.replace(known.layout, groups=groups))
    except LayoutError:
        return texts, None


def _component(
    known: Known, finder: Finder, index: int, component: Component, dtypes: Sequence[str]
) -> tuple[str, Component | None]:  # fmt: skip
    size = known.layout.groups[index].page_size
    for dtype in dict.fromkeys([component.dtype, *dtypes]):
        if DTYPES[dtype].opaque:
            continue
        same = dtype == component.dtype
        tried = component if same else msgspec.structs.replace(component, dtype=dtype, scale=None)
        codes = known.codes(index, tried)[0, :size]
        step = _dim_step(finder, codes)
        if step is None:
            continue
        axes = {name: _along(finder, codes, step, axis) for axis, name in enumerate(("token", "head", "dim"))}
        text = f"{dtype}, " + ", ".join(
            f"{n} step {s or 'uneven'}" for (n, s), size in zip(axes.items(), codes.shape, strict=False) if size > 1
        )
        if any(s is None for s in axes.values()) or (tried.scale is not None and tried.scale.at is not None):
            return text, None
        order = {name: s for name, s in axes.items() if s is not None}
        return text, msgspec.structs.replace(tried, at=_placement(order, codes.shape))
    return "no trace in any dtype", None


def _dim_step(finder: Finder, codes: Bytes) -> int | None:
    """Return the distance of neighbours along dim at which most rows are found; uint8[tokens, heads, dim, itemsize]."""
    tokens, heads, dim, itemsize = codes.shape
    length = min(RUN, dim)
    picks = (mix(np.arange(ROWS), 11) % np.uint64(tokens * heads)).astype(np.int64)
    rows = codes.reshape(tokens * heads, dim, itemsize)[picks, :length]
    for step in _distances(codes.shape):
        offsets = np.arange(length) * step
        if len(finder.run(rows[0], offsets)) and sum(len(finder.run(r, offsets)) > 0 for r in rows) * 4 >= 3 * ROWS:
            return step
    return None


def _distances(shape: tuple[int, ...]) -> Iterator[int]:
    tokens, heads, dim, itemsize = shape
    seen: set[int] = set()
    suggested = [a * b * c for a in (1, tokens) for b in (1, heads, 2 * heads) for c in (1, dim, 2)]
    for n in (*range(1, NEAREST), *suggested):
        if n not in seen:
            seen.add(n)
            yield n * itemsize


def _along(finder: Finder, codes: Bytes, step: int, axis: int) -> _Steps | None:
    """Return the distances along an axis of a page, from where runs of it lie."""
    length = min(RUN, codes.shape[2])
    count = min(codes.shape[axis], MOST)
    places: list[int] = []
    for i in range(0, count, length if axis == 2 else 1):
        index = [0, 0, 0]
        index[axis] = i
        run = codes[index[0], index[1], index[2] : index[2] + length]
        found = finder.run(run, np.arange(len(run)) * step)
        if not len(found):
            return None
        near = found if not places else found[np.argsort(np.abs(found - places[-1]), kind="stable")]
        places += (int(near[0]) + np.arange(len(run)) * step).tolist() if axis == 2 else [int(near[0])]
    return _even(np.array(places[:count], np.int64) - places[0])


def _even(offsets: Int64) -> _Steps | None:
    """Return the step that offsets, int64[n], follow, or the two of lanes; None: they follow none."""
    if len(offsets) == 1:
        return _Steps(0, 0)
    inner = int(offsets[1])
    odd = np.flatnonzero(offsets != np.arange(len(offsets)) * inner)
    if not len(odd):
        return _Steps(inner, 0)
    width = int(odd[0])
    index = np.arange(len(offsets))
    outer = int(offsets[width])
    even = (offsets == index // width * outer + index % width * inner).all()
    return _Steps(inner, width, outer) if even and width > 1 else None


def _placement(axes: dict[str, _Steps], shape: tuple[int, ...]) -> Placement:
    """Return an order, widest distance first, with all its strides; layer and page are measured apart."""
    strides: list[tuple[int, str]] = []
    for (name, steps), size in zip(axes.items(), shape, strict=False):
        if size == 1:
            strides.append((0, name))
        elif steps.width:
            strides += [(steps.outer, name), (steps.inner, f"{name}:{steps.width}")]
        else:
            strides.append((steps.inner, name))
    strides.sort(key=lambda x: (-x[0], x[1]))
    return Placement(" ".join(["layer", "page", *(n for _, n in strides)]), strides={n: s for s, n in strides if s > 0})

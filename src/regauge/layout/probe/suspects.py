"""What would explain that elements lie elsewhere: the ways in which engines' layouts differ from what is said of them.

A suspect is the declared layout with one thing changed. It is named only if it explains every written element of the array.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES
from regauge.layout.probe.pattern import Pattern, mix
from regauge.layout.probe.placing import placement, with_placement
from regauge.layout.probe.snapshot import Memory, PlacedArray, grid
from regauge.layout.spec import Component, Group, Layout, Placement, parse_order
from regauge.layout.view import Int64, View

MAX_NAMED = 2
SAMPLE = 4096
Index = tuple[int, ...]
Suspects = Iterator[tuple[str, PlacedArray]]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The first element that does not lie where the layout says."""

    array: str
    kind: str
    layer: int
    token: int
    head: int
    dim: int
    expected: tuple[str, int] | None
    """Region, and byte in it; None: the engine has no such byte."""
    found: tuple[tuple[str, int], ...]
    """Where its bytes are."""
    looks_like: tuple[str, ...]
    """What explains all elements of the array."""
    steps: tuple[str, ...]
    """Distances between neighbours that are not as declared."""

    def __str__(self) -> str:
        expected = "in no region of the engine" if self.expected is None else f"at byte {_place(*self.expected)}"
        found = f"found at byte {' and '.join(_place(*x) for x in self.found)}" if self.found else "found nowhere"
        text = f"{self.array}, layer {self.layer}, token {self.token}, head {self.head}, dim {self.dim}: "
        text += f"expected {expected}, {found}"
        hints = [f"looks like: {' / '.join(self.looks_like)}"] if self.looks_like else []
        return f"{text} ({'; '.join([*hints, *self.steps])})" if hints or self.steps else text


def _place(region: str, offset: int) -> str:
    return f"{offset:#x} of {region}"


def explain(layout: Layout, pattern: Pattern, memory: Memory, array: PlacedArray, index: Index) -> Elsewhere:
    """Say where an element of an array, (layer, token, head, dim), lies instead, and why."""
    expected = _address(array, memory, index)
    found = _find(array, pattern, memory, index)
    places = tuple(memory.where(x) for x in found)
    suspects: Suspects = iter(())
    if expected >= 0:
        suspects = _suspects(layout, array, found[0] - expected if found else 0)
    elif found:
        suspects = _other_region(array, places[0][0], array.field.layers[index[0]])
    layer, token, head, dim = index
    return Elsewhere(
        array.label, array.field.kind, array.field.layers[layer], token, head, dim,
        memory.where(expected) if expected >= 0 else None, places, tuple(_named(memory, suspects)),
        tuple(_steps(pattern, memory, array, index, found)) if found and expected >= 0 else ())  # fmt: skip


def _as_arrays(index: Index) -> tuple[Int64, ...]:
    return tuple(np.array([i]) for i in index)


def _address(array: PlacedArray, memory: Memory, index: Index) -> int:
    return int(array.addresses(memory, _as_arrays(index))[0])


def _find(array: PlacedArray, pattern: Pattern, memory: Memory, index: Index) -> list[int]:
    codes = np.stack([array.codes(_as_arrays(index), step)[0] for step in range(pattern.rounds)])
    return memory.find(codes)


def _steps(pattern: Pattern, memory: Memory, array: PlacedArray, index: Index, found: Sequence[int]) -> Iterator[str]:
    """Compare the distance to the next element along each axis with the declared one."""
    size, table = array.group.page_size, array.table
    for name, axis, by in (("layer", 0, 1), ("page", 1, size), ("token", 1, 1), ("head", 2, 1), ("dim", 3, 1)):
        if name == "token" and size == 1:
            continue
        other = list(index)
        forward = other[axis] + by < array.shape[axis] and (name != "token" or index[1] % size + 1 < size)
        other[axis] += by if forward else -by
        if other[axis] < 0:
            continue
        sign = 1 if forward else -1
        spots = _find(array, pattern, memory, tuple(other))
        there = _address(array, memory, tuple(other))
        if not spots or there < 0:
            continue  # nowhere, or the engine has no such byte: there is no distance to compare
        declared = sign * (there - _address(array, memory, index))
        measured = sign * (spots[0] - found[0])
        if name == "layer" and memory.where(spots[0])[0] != memory.where(found[0])[0]:
            continue  # a region of its own
        if name == "page":
            jump = int(table[index[1] // size + sign] - table[index[1] // size])
            if measured % jump:
                continue  # the engine's pages are of another size
            measured, declared = sign * measured // jump, sign * declared // jump
        if measured != declared:
            yield f"{name} step {measured} bytes, declared {declared}"


def _named(memory: Memory, suspects: Suspects) -> list[str]:
    """Return the suspects that explain everything; of those that say the same in other words, the first."""
    out: list[str] = []
    seen: list[View] = []
    for text, suspect in suspects:
        if len(out) == MAX_NAMED:
            break
        if _explains(memory, suspect) and (
            suspect.dims is not None or not any(_same(suspect.view, view) for view in seen)
        ):
            out.append(text)
            seen.append(suspect.view)
    return out


def _same(one: View, two: View) -> bool:
    plain = ("itemsize", "region", "offset", "layer_stride", "page_stride")
    return all(getattr(one, name) == getattr(two, name) for name in plain) and all(
        np.array_equal(getattr(one, name), getattr(two, name)) for name in ("token", "head", "dim")
    )


def _explains(memory: Memory, suspect: PlacedArray) -> bool:
    """Whether all elements lie as the suspect says; a sample of them is looked at first, since most suspects are innocent."""
    shape = suspect.shape
    total = int(np.prod(shape))
    try:
        for count in (32, SAMPLE):
            picks = (mix(np.arange(count), 3) % np.uint64(total)).astype(np.int64)
            if not suspect.match(memory, tuple(np.unravel_index(picks, shape))).all():
                return False
        return all(bool(suspect.match(memory, grid(suspect, layer)).all()) for layer in range(shape[0]))
    except (LayoutError, ValueError):  # an order that this geometry cannot have
        return False


def _suspects(layout: Layout, array: PlacedArray, shift: int) -> Suspects:
    """Plain explanations come first: they are named rather than roundabout ones for the same bytes."""
    yield from _exchanged(array)
    yield from _without_lanes(array)
    yield from _swapped_axes(array)
    yield from _page_sizes(array)
    yield from _rotated(layout, array)
    yield from _dtypes(array)
    yield from _permuted(array)
    yield from _in_lanes(array)
    yield from _shifted(array, shift)


def _other_region(array: PlacedArray, region: str, layer: int) -> Suspects:
    """In a region that the layout does not name, alone or along a `kv` axis with the other components."""
    head, dot, tail = region.rpartition(".")
    name = f"{head}.{{layer}}" if dot and tail == str(layer) else region
    axes = [a for a in _axes(array) if a not in ("layer", "kv")]
    layers = [] if name != region else ["layer"]
    for order in ([*layers, *axes], [*axes[:1], *layers, *axes[1:]]):
        yield f"in region {name}: order '{' '.join(order)}'", _ordered(array, " ".join(order), name)
        for place in range(len(order) + 1):
            with_kv = " ".join([*order[:place], "kv", *order[place:]])
            at = Placement(with_kv, name)
            together = [msgspec.structs.replace(c, at=at) for c in array.group.components]
            group = msgspec.structs.replace(array.group, components=together)
            text = f"in region {name} together with the others: order '{with_kv}'"
            yield text, _with(array, msgspec.structs.replace(array.component, at=at), group)


def _placed(array: PlacedArray, at: Placement) -> PlacedArray:
    """The array with another placement, in its group too: `kv` counts the components that have that axis."""
    return _with(array, with_placement(array.component, at, stored=array.stored))


def _with(array: PlacedArray, component: Component, group: Group | None = None) -> PlacedArray:
    group = group or array.group
    components = [component if c.name == component.name else c for c in group.components]
    return replace(array, component=component, group=msgspec.structs.replace(group, components=components))


def _ordered(array: PlacedArray, order: str, region: str = "") -> PlacedArray:
    at = placement(array.component, stored=array.stored)
    return _placed(array, Placement(order, region or at.region, 0 if region else at.offset))


def _shifted(array: PlacedArray, shift: int) -> Suspects:
    at = placement(array.component, stored=array.stored)
    if shift and at.offset + shift >= 0:
        where = f"{abs(shift)} bytes further {'on' if shift > 0 else 'back'}"
        yield f"all of it {where}", _placed(array, msgspec.structs.replace(at, offset=at.offset + shift))


def _exchanged(array: PlacedArray) -> Suspects:
    """K where V should be, or the scales of one where those of the other should be."""
    one = array.component
    for two in array.group.components:
        if two.name == one.name or (two.heads, two.dim, two.dtype) != (one.heads, one.dim, one.dtype):
            continue
        text = f"{one.name.upper()} and {two.name.upper()} swapped"
        if array.stored:
            a, b = one.scale, two.scale
            if a is not None and b is not None and b.at is not None and (a.per, a.block) == (b.per, b.block):
                yield text, _placed(array, b.at)
        elif one.at == two.at:  # they lie along the kv axis
            names = {one.name: two, two.name: one}
            order = [names.get(c.name, c) for c in array.group.components]
            yield text, replace(array, group=msgspec.structs.replace(array.group, components=order))
        else:
            yield text, _placed(array, two.at)


def _axes(array: PlacedArray) -> list[str]:
    return placement(array.component, stored=array.stored).order.split()


def _swapped_axes(array: PlacedArray) -> Suspects:
    axes = _axes(array)
    for i, j in itertools.combinations(range(len(axes)), 2):
        order = list(axes)
        order[i], order[j] = order[j], order[i]
        if not _sound(order):
            continue
        pair = {axes[i], axes[j]}
        name = array.component.name.upper()
        text = f"{name} transposed" if pair == {"token", "dim"} else f"axes {axes[i]} and {axes[j]} swapped"
        yield f"{text}: order '{' '.join(order)}'", _ordered(array, " ".join(order))


def _permuted(array: PlacedArray) -> Suspects:
    axes = [a for a in _axes(array) if ":" not in a]
    if len(axes) <= 6:
        for order in itertools.permutations(axes):
            text = " ".join(order)
            yield f"order '{text}'", _ordered(array, text)


def _sound(order: Sequence[str]) -> bool:
    try:
        parse_order(" ".join(order), required=())
    except LayoutError:
        return False
    return True


def _page_sizes(array: PlacedArray) -> Suspects:
    size, pages = array.group.page_size, array.group.pages
    for k in range(1, 8):
        for other in (size << k, size >> k):
            if not 1 <= other <= 1 << 16 or other == size:
                continue
            for count in (pages, max(1, pages * size // other)):
                group = msgspec.structs.replace(array.group, page_size=other, pages=count)
                yield f"page size {other}", replace(array, group=group)


def _both_ways(array: PlacedArray) -> tuple[list[str], list[str]]:
    """The axes without lanes, and those with token and dim exchanged."""
    plain = [a for a in _axes(array) if ":" not in a]
    return plain, [{"token": "dim", "dim": "token"}.get(a, a) for a in plain]


def _without_lanes(array: PlacedArray) -> Suspects:
    plain, turned = _both_ways(array)
    for order in (plain, turned) if plain != _axes(array) else ():
        yield f"no lanes: order '{' '.join(order)}'", _ordered(array, " ".join(order))


def _in_lanes(array: PlacedArray) -> Suspects:
    plain, turned = _both_ways(array)
    if array.stored or "token" not in plain or "dim" not in plain:
        return
    for axis, width in itertools.product(("dim", "token"), (2, 4, 8, 16, 32)):
        for order in (plain, turned):
            text = " ".join([*order, f"{axis}:{width}"])
            yield f"{axis} in lanes of {width}: order '{text}'", _ordered(array, text)


def _rotated(layout: Layout, array: PlacedArray) -> Suspects:
    """The two halves of the rotated part woven into pairs, or pairs unwoven."""
    if array.stored or array.component.name not in ("k", "rope"):
        return
    rope = layout.model.state(array.field.kind, array.field.layers[0]).rope
    dim = array.component.dim
    part = min(rope.dim, dim) if rope is not None else dim
    if part % 2:
        return
    woven = np.arange(dim)
    woven[:part] = np.arange(part).reshape(2, -1).T.ravel()
    unwoven = np.argsort(woven)
    yield "rope halves interleaved", replace(array, dims=woven)
    yield "rope pairs taken apart into halves", replace(array, dims=unwoven)


def _dtypes(array: PlacedArray) -> Suspects:
    if array.stored:
        return
    component = array.component
    size = DTYPES[component.dtype].itemsize
    for name, info in DTYPES.items():
        if name == component.dtype or info.opaque:
            continue
        at = component.at if info.itemsize == size else msgspec.structs.replace(component.at, strides={})
        yield f"dtype {name}", _with(array, msgspec.structs.replace(component, dtype=name, at=at))

"""From a layout's axis orders to byte offsets: the strided view of each array. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES, SCALE_DTYPES
from regauge.layout.overlaps import Box, Search
from regauge.layout.spec import Component, Group, Layout, Placement, parse_order, required_axes

Int64 = npt.NDArray[np.int64]
MAX_CHECKED = 1 << 22
"""Most elements of one component in one page: 4,096 tokens of 8 heads of 128."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Where the elements of one array lie.

    Element (layer, page, token in page, head, dim) has the byte offset
    `layer_offset(i) + page * page_stride + token[t] + head[h] + dim[d]` in its region.
    """

    itemsize: int
    region: str
    """Region name; `{layer}` stands for the global layer number."""
    offset: int
    layer_stride: int
    """Bytes between layers of one region; 0 where every layer has its own region."""
    page_stride: int
    token: Int64
    """Offset of each token of a page, int64[page_size]."""
    head: Int64
    """Offset of each head of this rank, int64[heads]."""
    dim: Int64
    """Offset of each element of a head, int64[dim]."""
    outside: tuple[str, ...]
    """Axes of size > 1 that lie outside the page axis: for these a page is not one block."""

    @property
    def page_bytes(self) -> int:
        """Bytes from a page's first element to past its last, this array alone."""
        return int(self.token.max() + self.head.max() + self.dim.max()) + self.itemsize

    def layer_bases(self, layer_ids: tuple[int, ...], wanted: tuple[int, ...], bases: Mapping[str, int]) -> Int64:
        """Return the address of page 0 for each wanted layer, int64[len(wanted)].

        `layer_ids` are the layers of the group in memory order. Raises LayoutError for a region without a base.
        """
        out = np.empty(len(wanted), np.int64)
        position = {layer: i for i, layer in enumerate(layer_ids)}
        for i, layer in enumerate(wanted):
            name = self.region.replace("{layer}", str(layer))
            try:
                out[i] = bases[name] + self.offset + position[layer] * self.layer_stride
            except KeyError:
                raise LayoutError(f"no address for region {name!r}", path="regions") from None
        return out


def component_view(group: Group, component: Component) -> View:
    """Return the view of a component's elements."""
    return _view(group, component.at, component, DTYPES[component.dtype].itemsize, component.dim)


def scale_view(group: Group, component: Component) -> View:
    """Return the view of a component's stored scales: its `dim` numbers the blocks. The scale must be stored."""
    scale = component.scale
    if scale is None or scale.at is None:
        raise LayoutError("has no stored scales", path=f"components.{component.name}.scale")
    return _view(group, scale.at, component, SCALE_DTYPES[scale.dtype], scale.blocks(component.dim))


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis as written in an order. `inner`: size of the inner part of a split axis; None: a whole axis or an outer part."""

    name: str
    inner: int | None
    size: int
    stride: int
    outer: int
    """Indices of the whole axis that one index of this part stands for."""

    def offsets(self, whole: int) -> Int64:
        """Return what the axis adds to the offset of each of `whole` indices."""
        return np.arange(whole) // self.outer % self.size * self.stride


def _axes(group: Group, at: Placement, component: Component, itemsize: int, dim: int) -> list[_Axis]:
    """Return the axes of an array, outermost first."""
    axes = parse_order(at.order, required=required_axes(group.kind))
    whole = {
        "layer": len(group.layer_ids),
        "page": max(group.pages, 1),
        "kv": sum("kv" in c.at.order.split() for c in group.components) if at is component.at else 1,
        "token": group.page_size,
        "head": component.heads,
        "dim": dim,
    }
    out: list[_Axis] = []
    step = itemsize
    for name, inner in reversed(axes):
        split = next((n for a, n in axes if a == name and n is not None), 1)
        if whole[name] % split:
            raise LayoutError(f"{name} of size {whole[name]} cannot be split by {split}", path=at.order)
        size = inner if inner is not None else whole[name] // split
        stride = at.strides.get(name if inner is None else f"{name}:{inner}", step)
        out.append(_Axis(name, inner, size, stride, 1 if inner is not None else split))
        step = stride * size
    return out[::-1]


def _offset(group: Group, at: Placement, component: Component, axes: list[_Axis]) -> int:
    """Return the offset of the first element, past the components that come before it along `kv`."""
    kv = next((axis.stride for axis in axes if axis.name == "kv"), 0) if at is component.at else 0
    return at.offset + (_kv_index(group, component) * kv if kv else 0)


def _view(group: Group, at: Placement, component: Component, itemsize: int, dim: int) -> View:
    axes = _axes(group, at, component, itemsize, dim)
    sizes = {"token": group.page_size, "head": component.heads, "dim": dim}
    offsets = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
    for axis in axes:
        if axis.name in offsets:
            offsets[axis.name] += axis.offsets(sizes[axis.name])
    stride = {axis.name: axis.stride for axis in axes if axis.inner is None}
    before = [axis.name for axis in axes[: [axis.name for axis in axes].index("page")]]
    return View(
        itemsize=itemsize,
        region=at.region,
        offset=_offset(group, at, component, axes),
        layer_stride=stride.get("layer", 0),
        page_stride=stride["page"],
        token=offsets["token"],
        head=offsets["head"],
        dim=offsets["dim"],
        outside=tuple(name for name in before if sizes.get(name, 1) > 1),
    )


def _kv_index(group: Group, component: Component) -> int:
    sharing = [c.name for c in group.components if "kv" in c.at.order.split()]
    return sharing.index(component.name)


def array_views(group: Group, component: Component) -> list[tuple[str, View]]:
    """Return the views of a component's elements and, if it stores them, of its scales, by what a person calls them."""
    arrays = [(component.name, component_view(group, component))]
    if component.scale is not None and component.scale.at is not None:
        arrays.append((f"scale of {component.name}", scale_view(group, component)))
    return arrays


def page_runs(view: View) -> tuple[Int64, int]:
    """Return the offsets of the runs of bytes of a page, int64[n], and their length: axes that lie densely inside each other are one."""
    starts, size = np.zeros(1, np.int64), view.itemsize
    tables = [table for table in (view.dim, view.head, view.token) if len(table) > 1]
    for table in sorted(tables, key=lambda table: int(table[1] - table[0])):
        if len(starts) == 1 and np.array_equal(table, np.arange(len(table)) * size):
            size *= len(table)
        else:
            starts = (starts[:, None] + table[None, :]).ravel()
    return starts, size


def region_sizes(layout: Layout) -> dict[str, int]:
    """Return the bytes that each region needs for the groups' pages, by region name. Raises LayoutError when symbolic."""
    sizes: dict[str, int] = {}
    for index, group in enumerate(layout.groups):
        if not group.pages:
            raise LayoutError("the layout is symbolic: say how many pages the pool has", path=f"groups[{index}].pages")
        layers = group.layer_ids
        for component in group.components:
            for _, view in array_views(group, component):
                last = view.offset + (group.pages - 1) * view.page_stride + view.page_bytes
                for i, layer in enumerate(layers):
                    name = view.region.replace("{layer}", str(layer))
                    sizes[name] = max(sizes.get(name, 0), last + i * view.layer_stride)
    return sizes


def bytes_per_token(layout: Layout) -> int:
    """Return the bytes that one token takes in all layers of this rank: elements and stored scales, without padding.

    Recurrent groups, whose bytes do not grow with the tokens, do not count.
    """
    total = 0
    for group in layout.groups:
        for c in group.components if group.kind != "recurrent" else ():
            total += len(group.layer_ids) * element_bytes(c)
    return total


def element_bytes(component: Component) -> int:
    """Return the bytes of one token (recurrent: one record) in one layer: elements and stored scales, without padding."""
    scale = component.scale
    stored = 0 if scale is None or scale.at is None else scale.blocks(component.dim) * SCALE_DTYPES[scale.dtype]
    return component.heads * (component.dim * DTYPES[component.dtype].itemsize + stored)


def check_memory(layout: Layout) -> Layout:
    """Return the layout itself if no two elements, of whichever groups, share a byte.

    Raises LayoutError that names the two arrays, or a page of more than MAX_CHECKED elements: a peer's layout must not cost
    arbitrary memory; nor arbitrary time, see `overlaps.MAX_STEPS`. A symbolic layout is checked as if it had one page.
    """
    taken: dict[str, list[_Taken]] = {}
    for index, group in enumerate(layout.groups):
        largest = max(group.page_size * c.heads * c.dim for c in group.components)
        if largest > MAX_CHECKED:
            raise LayoutError(
                f"a page of {largest} elements; at most {MAX_CHECKED} are checked", path=f"groups[{index}]"
            )
        for array in (x for c in group.components for x in _taken(index, group, c)):
            names = [array.region.replace("{layer}", str(layer)) for layer in group.layer_ids]
            for name in dict.fromkeys(names):
                taken.setdefault(name, []).append(array)
    search = Search()
    # The regions of layers that lie alike hold the same arrays: they are looked at once.
    for arrays, region in {tuple(map(id, arrays)): (arrays, region) for region, arrays in taken.items()}.values():
        for i, one in enumerate(arrays):
            if search.within(one.box):
                raise one.overlap(one, region)
            for other in arrays[:i]:
                if search.between(other.box, one.box):
                    raise one.overlap(other, region)
    return layout


@dataclass(frozen=True, slots=True)
class _Taken:
    """The memory of one array: of all its layers, or of one where each has a region of its own."""

    name: str
    group: int
    region: str
    box: Box

    def overlap(self, other: _Taken, region: str) -> LayoutError:
        near = self.group == other.group
        names = sorted({x.name if near else f"{x.name} of groups[{x.group}]" for x in (self, other)})
        return LayoutError(
            f"elements of {' and '.join(names)} overlap in region {region!r}", path=f"groups[{self.group}]"
        )


def _taken(index: int, group: Group, component: Component) -> Iterator[_Taken]:
    arrays = [(component.name, component.at, DTYPES[component.dtype].itemsize, component.dim)]
    if (scale := component.scale) is not None and scale.at is not None:
        arrays.append((f"scale of {component.name}", scale.at, SCALE_DTYPES[scale.dtype], scale.blocks(component.dim)))
    for name, at, itemsize, dim in arrays:
        axes = _axes(group, at, component, itemsize, dim)
        mine = [(axis.stride, axis.size) for axis in axes if axis.name != "kv"]
        yield _Taken(name, index, at.region, Box.of(_offset(group, at, component, axes), itemsize, mine))

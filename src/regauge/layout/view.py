"""From a layout's axis orders to byte offsets: the strided view of each array. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES, SCALE_DTYPES
from regauge.layout.spec import Component, Group, Layout, Placement, parse_order, required_axes

Int64 = npt.NDArray[np.int64]
MAX_CHECKED = 1 << 22
"""Elements of one component in one page that `check_memory` looks at: 4,096 tokens of 8 heads of 128."""


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


def _view(group: Group, at: Placement, component: Component, itemsize: int, dim: int) -> View:
    axes = parse_order(at.order, required=required_axes(group.kind))
    whole = {
        "layer": len(group.layer_ids),
        "page": max(group.pages, 1),
        "kv": sum("kv" in c.at.order.split() for c in group.components) if at is component.at else 1,
        "token": group.page_size,
        "head": component.heads,
        "dim": dim,
    }
    sizes = []
    for name, inner in axes:
        split = next((n for a, n in axes if a == name and n is not None), 1)
        if whole[name] % split:
            raise LayoutError(f"{name} of size {whole[name]} cannot be split by {split}", path=at.order)
        sizes.append(inner if inner is not None else whole[name] // split)
    strides = [0] * len(axes)
    step = itemsize
    for i in reversed(range(len(axes))):
        name, inner = axes[i]
        strides[i] = at.strides.get(name if inner is None else f"{name}:{inner}", step)
        step = strides[i] * sizes[i]
    offsets = {name: np.zeros(whole[name], np.int64) for name in ("token", "head", "dim")}
    for (name, inner), stride in zip(axes, strides, strict=True):
        if name in offsets:
            index = np.arange(whole[name])
            split = next((n for a, n in axes if a == name and n is not None), 1)
            offsets[name] += (index % split if inner is not None else index // split) * stride
    by_name = {name: stride for (name, inner), stride in zip(axes, strides, strict=True) if inner is None}
    before = [name for name, _ in axes[: [a for a, _ in axes].index("page")]]
    outside = tuple(n for n in before if n in offsets and whole[n] > 1)
    kv_index = _kv_index(group, component) if "kv" in by_name and at is component.at else 0
    return View(
        itemsize=itemsize,
        region=at.region,
        offset=at.offset + kv_index * by_name.get("kv", 0),
        layer_stride=by_name.get("layer", 0),
        page_stride=by_name["page"],
        token=offsets["token"],
        head=offsets["head"],
        dim=offsets["dim"],
        outside=outside,
    )


def _kv_index(group: Group, component: Component) -> int:
    sharing = [c.name for c in group.components if "kv" in c.at.order.split()]
    return sharing.index(component.name)


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


def bytes_per_token(layout: Layout) -> float:
    """Return the bytes that one token takes in all layers of this rank: elements and stored scales, without padding.

    Recurrent groups, whose bytes do not grow with the tokens, do not count.
    """
    total = 0.0
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
    """Return the layout itself if no two elements share a byte.

    Looks at every byte of the first two pages of the first two layers of each group; strides that collide, collide there.
    Raises LayoutError that names the two arrays, or a page of more than MAX_CHECKED elements: a peer's layout must not cost
    arbitrary memory.
    """
    for index, group in enumerate(layout.groups):
        largest = max(group.page_size * c.heads * c.dim for c in group.components)
        if largest > MAX_CHECKED:
            raise LayoutError(
                f"a page of {largest} elements; at most {MAX_CHECKED} are checked", path=f"groups[{index}]"
            )
        taken: dict[str, list[tuple[str, Int64, Int64]]] = {}
        for component in group.components:
            for name, view in array_views(group, component):
                for region, (starts, size) in _sample(group, view).items():
                    taken.setdefault(region, []).append((name, starts, starts + size))
        for region, arrays in taken.items():
            first, end = (np.concatenate([array[i] for array in arrays]) for i in (1, 2))
            order = np.argsort(first, kind="stable")
            if (first[order][1:] < np.maximum.accumulate(end[order])[:-1]).any():
                names = " and ".join(sorted({name for name, _, _ in arrays}))
                raise LayoutError(f"elements of {names} overlap in region {region!r}", path=f"groups[{index}]")
    return layout


def array_views(group: Group, component: Component) -> list[tuple[str, View]]:
    """Return the views of a component's elements and, if it stores them, of its scales, by what a person calls them."""
    arrays = [(component.name, component_view(group, component))]
    if component.scale is not None and component.scale.at is not None:
        arrays.append((f"scale of {component.name}", scale_view(group, component)))
    return arrays


def _sample(group: Group, view: View) -> dict[str, tuple[Int64, int]]:
    """Return where runs of bytes of the first pages and layers begin, and how long they are, by region."""
    inner, size = page_runs(view)
    pages = np.arange(min(2, max(group.pages, 1))) * view.page_stride
    out: dict[str, list[Int64]] = {}
    for i, layer in enumerate(group.layer_ids[:2]):
        region = view.region.replace("{layer}", str(layer))
        starts = view.offset + i * view.layer_stride + (pages[:, None] + inner[None, :]).ravel()
        out.setdefault(region, []).append(starts)
    return {region: (np.concatenate(parts), size) for region, parts in out.items()}


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

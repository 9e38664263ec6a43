"""Where a layout says that elements lie, to compare with tensors of the shapes that engines allocate."""

from __future__ import annotations

import numpy as np

from regauge.layout.spec import Group
from regauge.layout.view import Int64, View, component_view, scale_view


def where(group: Group, name: str) -> Int64:
    """Byte offset of each element of a component in its region, int64[layers, pages, tokens, heads, dim]."""
    return _offsets(group, component_view(group, group.component(name)))


def where_scales(group: Group, name: str) -> Int64:
    """The same of a component's stored scales."""
    return _offsets(group, scale_view(group, group.component(name)))


def regions(group: Group, name: str) -> tuple[str, ...]:
    """Region of each layer of a component."""
    region = group.component(name).at.region
    return tuple(region.replace("{layer}", str(layer)) for layer in group.layer_ids)


def _offsets(group: Group, view: View) -> Int64:
    layers = np.arange(len(group.layer_ids)) * view.layer_stride
    pages = np.arange(max(group.pages, 1)) * view.page_stride
    inner = view.token[:, None, None] + view.head[:, None] + view.dim
    out: Int64 = view.offset + layers[:, None, None, None, None] + pages[:, None, None, None] + inner
    return out


def counted(*shape: int, itemsize: int = 1) -> Int64:
    """A tensor of that shape that holds each element's own byte offset."""
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape) * itemsize

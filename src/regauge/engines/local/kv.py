"""The local engine's paged KV pool, in any layout that the planner can reach.

What the model computes is dense: [tokens, KV heads, head dim] in the compute dtype. Writing is a plan from that dense layout
to the pool's, reading is the plan back; both are compiled once and instantiated once per step for all layers. A pool of
8-bit codes is therefore quantised on write and dequantised at attention by the same kernels that carry transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from regauge.engines.local.model import Segment
from regauge.errors import ConfigError
from regauge.layout.spec import Component, Group, Layout, Placement
from regauge.move import kernels
from regauge.move.bound import Memory, bind, slab_bytes
from regauge.move.memory import Slab
from regauge.plan import Side, compile, instantiate
from regauge.plan.tiles import Convert, Int64, Tiles

_STEP = ("page token head dim", ".{layer}")
"""All layers share one buffer, [tokens, heads, dim]: what lies there is one layer at a time."""
_KIND = tuple(f.name for f in fields(Convert) if f.name not in ("src_scale", "dst_scale", "keep"))
"""What boxes that are joined have in common: all but their addresses, so that a field that is added counts too."""


def allocate(layout: Layout, name: str = "kv") -> Memory:
    """Allocate zeroed memory for a layout that has pages. Close the slab after use.

    Zeroed, because a page holds tokens that no request has written: NaN there would be of no consequence, but must not surprise.
    """
    slab = Slab(slab_bytes(layout), name)
    return Memory(bind(layout, slab), slab)


class PagedKV:
    """A `KVStore` on a pool of any layout. Used by one thread.

    `max_new` is the most new tokens of a step, `max_context` the most tokens of one request. Raises ConfigError for a layout that does
    not hold all of the model's layers and heads in one group.
    """

    def __init__(self, memory: Memory, *, dtype: torch.dtype, max_new: int, max_context: int, threads: int = 1) -> None:
        layout = memory.layout
        model = layout.model
        group, shard = layout.groups[0], layout.shard
        if (
            len(layout.groups) != 1 or group.kind != "attention" or len(group.layer_ids) != model.num_layers
            or (shard.tp_size, shard.cp_size) != (1, 1)
        ):  # fmt: skip
            raise ConfigError("the local engine keeps all layers and heads in one group: give such a layout")
        self.page_size = group.page_size
        self._layers = group.layer_ids
        self._pool = memory.bases
        self._threads = threads
        name = str(dtype).removeprefix("torch.")
        shapes = [(a.heads, a.dim) for a in map(model.states[0].arrays.__getitem__, ("k", "v"))]
        self._new = [torch.zeros(max_new, *shape, dtype=dtype) for shape in shapes]
        self._all = [torch.zeros(max_context, *shape, dtype=dtype) for shape in shapes]
        self._write = compile(dense(layout, name, max_new, *_STEP), layout)
        self._read = compile(layout, dense(layout, name, max_context, *_STEP))
        self._segments: Sequence[Segment] = ()
        self._writes: _Steps = _Steps(len(self._layers))
        self._reads: list[_Steps] = []

    def begin(self, segments: Sequence[Segment]) -> None:
        """Prepare for a step; see `KVStore`."""
        self._segments = segments
        self._writes, self._reads = _Steps(len(self._layers)), []
        offset = 0
        for s in segments:
            pool = Side(s.pages, self._pool)
            new = self._side(self._new, s.start - offset)
            self._writes.add(instantiate(self._write, new, pool, (s.start, s.start + s.count)))
            read = _Steps(len(self._layers))
            read.add(instantiate(self._read, pool, self._side(self._all, 0), (0, s.start + s.count)))
            self._reads.append(read)
            offset += s.count

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the new tokens of all segments; see `KVStore`."""
        for buffer, fresh in zip(self._new, (k, v), strict=True):
            buffer[: len(fresh)].copy_(fresh)
        kernels.run(self._writes.layer(layer), threads=self._threads)

    def read(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values of a segment; see `KVStore`."""
        kernels.run(self._reads[index].layer(layer), threads=self._threads)
        end = self._segments[index].start + self._segments[index].count
        k, v = (buffer[:end].transpose(0, 1) for buffer in self._all)
        return k, v

    def _side(self, buffers: list[torch.Tensor], origin: int) -> Side:
        bases = {
            f"{name}.{layer}": t.data_ptr() for layer in self._layers for name, t in zip("kv", buffers, strict=True)
        }
        return Side(np.zeros(1, np.int64), bases, origin)


def dense(layout: Layout, dtype: str, tokens: int, order: str, suffix: str = "") -> Layout:
    """Return a layout of the same model, tokens in one page, that lies in plain arrays: regions are components' names and `suffix`."""
    group = layout.groups[0]
    components = [Component(c.name, dtype, c.heads, c.dim, Placement(order, c.name + suffix)) for c in group.components]
    return Layout(layout.model, [Group(group.kind, group.layers, tokens, components, pages=1)], layout.shard)


class _Steps:
    """Boxes of all layers, kept layer by layer; boxes of the same shape are joined."""

    def __init__(self, layers: int) -> None:
        self._count = layers
        self._kinds: dict[tuple[Any, ...], tuple[Tiles, list[list[Int64 | None]]]] = {}
        self._joined: list[tuple[Tiles, list[Int64 | None]]] | None = None

    def add(self, tiles: Sequence[Tiles]) -> None:
        for t in tiles:
            c = t.convert
            kind = () if c is None else tuple(getattr(c, name) for name in _KIND)
            key = (t.shape, t.src_stride, t.dst_stride, t.run, *kind)
            columns = [t.src, t.dst, c.src_scale if c else None, c.dst_scale if c else None]
            rows = [None if x is None else x.reshape(self._count, -1) for x in columns]
            self._kinds.setdefault(key, (t, []))[1].append(rows)
        self._joined = None

    def layer(self, index: int) -> list[Tiles]:
        if self._joined is None:
            self._joined = [
                (t, [None if parts[0][i] is None else np.concatenate([p[i] for p in parts], axis=1) for i in range(4)])
                for t, parts in self._kinds.values()
            ]
        return [_replace(t, [None if c is None else c[index] for c in columns]) for t, columns in self._joined]


def _replace(t: Tiles, columns: list[Int64 | None]) -> Tiles:
    src, dst, src_scale, dst_scale = columns
    assert src is not None and dst is not None  # noqa: PT018, S101  # boxes have both
    c = t.convert
    if c is not None:
        c = replace(c, src_scale=src_scale, dst_scale=dst_scale)
    return Tiles(src, dst, t.shape, t.src_stride, t.dst_stride, t.run, c)

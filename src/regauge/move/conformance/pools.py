"""Memory of random bytes for layouts, page tables scattered over it, and one request whose KV cache lies there.

The request has `LENGTH` tokens. Decode already holds the first `PREFIX` of them, so the rest is sent: neither number is a
multiple of a page size, unless pages are single tokens. Window layers hold their live window only, and what a page table would name before it is page 0.
Everything that is not of the request is random bytes too: reading or writing it shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import msgspec
import numpy as np

from regauge.layout.elements import NUMPY_DTYPES
from regauge.layout.spec import Component, Group, Layout, Placement, Shard, format_layers, scale_table
from regauge.layout.view import component_view, region_sizes, scale_view
from regauge.plan.boxes import Side
from regauge.plan.planner import live
from regauge.plan.reference import Bytes, addresses, places, side_of, store, transfer
from regauge.plan.stripes import owned
from regauge.plan.tiles import Int64

LENGTH = 173
PREFIX = 37
_PAD = 64


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The memory of one rank, and where the request's pages lie in it."""

    layout: Layout
    memory: Bytes
    bases: dict[str, int]
    """Offset of each region in `memory`."""
    tables: tuple[tuple[Int64, int], ...]
    """For each group its page table, and the position of the first token of its first page."""

    def side(self, group: int) -> Side:
        """Return where a group's tokens lie, in addresses: for kernels."""
        return side_of(self.memory, self.bases, *self.tables[group])

    def offsets(self, group: int) -> Side:
        """Return where a group's tokens lie, in offsets into `memory`: for the reference."""
        return Side(self.tables[group][0], self.bases, self.tables[group][1])

    def copy(self) -> Pool:
        """Return the same pool with memory of its own."""
        return Pool(self.layout, self.memory.copy(), self.bases, self.tables)


def generator(seed: int, *names: str) -> np.random.Generator:
    """Return the random numbers of a name: the same wherever and in whatever order pairs are run."""
    return np.random.default_rng([seed, *(zlib.crc32(name.encode()) for name in names)])


def tokens_of(layout: Layout, group: Group, first: int = 0) -> tuple[int, int]:
    """Return the tokens of the request, from `first` on, that a group keeps, as `instantiate` takes them."""
    return live(group, layout, (first, LENGTH), LENGTH)


def random_pool(layout: Layout, rng: np.random.Generator, *, decode: bool) -> Pool:
    """Return a rank's pool of random bytes, with page tables of the request.

    `decode`: the page tables of every other layout start at the page that holds the first token that is sent.
    """
    late = decode and bool(rng.integers(2)) and layout.shard.cp_size == 1
    tables, groups = [], []
    for group in layout.groups:
        table, origin, pages = _table(layout, group, rng, late=late)
        tables.append((table, origin))
        groups.append(msgspec.structs.replace(group, pages=max(pages, group.pages)))
    layout = msgspec.structs.replace(layout, groups=groups)
    bases, end = {}, _PAD
    for name, size in region_sizes(layout).items():
        bases[name] = end
        end += -(-size // _PAD) * _PAD + _PAD
    return Pool(layout, rng.integers(0, 256, end, np.uint8), bases, tuple(tables))


def _table(layout: Layout, group: Group, rng: np.random.Generator, *, late: bool) -> tuple[Int64, int, int]:
    """Return a page table, the position of its first token, and how many pages the pool must have."""
    if group.kind == "recurrent":
        pages = max(group.pages, 4)
        return np.array([rng.integers(1, pages)], np.int64), 0, pages
    first, _ = tokens_of(layout, group)
    start = tokens_of(layout, group, PREFIX)[0] if late else 0
    origin = start // group.page_size * group.page_size
    held = int(owned(layout.shard, np.arange(LENGTH)).sum()) - origin
    count = -(-held // group.page_size)
    # Page 0 is the engines' dummy: no token lies there.
    pages = max(group.pages, count + 1 + int(rng.integers(3)))
    table = 1 + rng.permutation(pages - 1)[:count].astype(np.int64)
    if layout.shard.cp_size == 1:
        table[: max(0, first - origin) // group.page_size] = 0
    return table, origin, pages


def whole(ranks: Sequence[Layout]) -> Layout:
    """Return one rank that holds, in the format of these ranks, all that the model keeps, laid out plainly."""
    groups: list[Group] = []
    constants = _by_head(ranks)
    taken: set[tuple[str, int]] = set()
    for layout in ranks:
        for group in layout.groups:
            layers = tuple(x for x in group.layer_ids if (group.kind, x) not in taken)
            if layers:
                groups.append(_plain(layout, group, layers, f"{len(groups)}", constants))
                taken |= {(group.kind, x) for x in layers}
    return Layout(ranks[0].model, groups, Shard())


_Constants = Mapping[tuple[str, str, int, int], float]
"""Constant scales by kind, array, layer and global head."""


def _by_head(ranks: Sequence[Layout]) -> _Constants:
    """Return the constant scales of all ranks: each has those of its own heads."""
    found: dict[tuple[str, str, int, int], float] = {}
    for layout in ranks:
        for group in layout.groups:
            for c in group.components:
                if c.scale is None or c.scale.at is not None:
                    continue
                rows = scale_table(c.scale, len(group.layer_ids), c.heads)
                for layer, row in zip(group.layer_ids, rows, strict=True):
                    for head, value in zip(layout.heads(group, c), row, strict=True):
                        found[group.kind, c.name, layer, head] = value
    return found


def _plain(layout: Layout, group: Group, layers: tuple[int, ...], region: str, constants: _Constants) -> Group:
    state = layout.model.state(group.kind, layers[0])
    components = []
    for c in group.components:
        heads = state.arrays[c.name].heads
        at = Placement("layer page token head dim", f"{region}.{c.name}")
        scale = c.scale
        if scale is not None and scale.at is not None:
            order = "layer page token head" + (" dim" if scale.per == "block" else "")
            scale = msgspec.structs.replace(scale, at=Placement(order, f"{at.region}.scale"))
        elif scale is not None:
            # A head that no rank holds has none: the pair is refused.
            rows = [[constants.get((group.kind, c.name, x, h), 1.0) for h in range(heads)] for x in layers]
            scale = msgspec.structs.replace(scale, values=rows if scale.per == "head" else [row[0] for row in rows])
        components.append(Component(c.name, c.dtype, heads, c.dim, at, scale))
    return Group(group.kind, format_layers(layers), 1 if group.kind == "recurrent" else LENGTH, components, 1)


def truth(ranks: Sequence[Layout], rng: np.random.Generator) -> Pool:
    """Return one pool with all that the model keeps of the request, in the format of these ranks.

    Even tokens are random bytes: NaN, infinities, subnormals, huge values. Odd ones, and most heads of recurrent states, are what
    caches hold: bytes alone would leave nothing but zeros and largest values after a conversion.
    """
    layout = whole(ranks)
    pool = random_pool(layout, rng, decode=False)
    pool = Pool(pool.layout, pool.memory, pool.bases, tuple((np.zeros(1, np.int64), 0) for _ in layout.groups))
    for index, group in enumerate(layout.groups):
        position = np.arange(group.page_size)
        for c in group.components:
            where = addresses(component_view(group, c), group, pool.offsets(index), position, group.layer_ids)
            plain = where[:, :, 1::2] if group.kind == "recurrent" else where[:, 1::2]
            if c.dtype in ("float32", "bfloat16", "float16"):
                values = rng.normal(0, 2, plain.shape).astype(np.float32)
                store(pool.memory, plain, values.astype(NUMPY_DTYPES[c.dtype]))
            if c.scale is not None and c.scale.at is not None:
                where = addresses(scale_view(group, c), group, pool.offsets(index), position, group.layer_ids)
                store(pool.memory, where, _scales(c.scale.dtype, where.shape, rng))
    return pool


def _scales(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if dtype == "float32":
        return np.exp(rng.normal(0, 3, shape)).astype(np.float32)
    if dtype == "float8_e8m0fnu":
        return rng.integers(107, 147, shape).astype(np.uint8)  # 2^-20 .. 2^19
    return np.abs(rng.normal(0, 1, shape)).astype(ml_dtypes.float8_e4m3fn)


def spread(from_: Pool, to: Pool, first: int) -> None:
    """Write the request's tokens from `first` on into a rank's pool, element by element: by the reference."""
    for j, b in enumerate(to.layout.groups):
        tokens = tokens_of(to.layout, b, first)
        if tokens[0] == tokens[1]:
            continue
        for i, a in enumerate(from_.layout.groups):
            if a.kind == b.kind and set(a.layer_ids) & set(b.layer_ids):
                transfer(from_.layout, to.layout, from_.memory, to.memory, from_.offsets(i), to.offsets(j), tokens,
                         pair=(i, j))  # fmt: skip


def element_addresses(pool: Pool, group: int, component: Component, *, scales: bool = False) -> tuple[Int64, Int64]:
    """Return the offset of every element of the request that is sent to a rank, and which tokens those are.

    int64[layers, tokens, heads, dim] and int64[tokens]; of its stored scales if asked for, `dim` then being the blocks.
    """
    g = pool.layout.groups[group]
    first, end = tokens_of(pool.layout, g, PREFIX)
    tokens = np.arange(first, end)
    tokens = tokens[owned(pool.layout.shard, tokens)]
    position = places(pool.layout.shard, pool.tables[group][1], tokens.tolist())
    view = scale_view(g, component) if scales else component_view(g, component)
    return addresses(view, g, pool.offsets(group), position, g.layer_ids), tokens

"""What an engine's memory held after each round of a `Pattern`, and what a layout says that it must hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES
from regauge.layout.probe.codes import Bytes, Floats, computed_scale, encode, quotient, rounded
from regauge.layout.probe.pattern import Field, Pattern
from regauge.layout.probe.placing import view_of
from regauge.layout.spec import Component, Group, Layout
from regauge.layout.view import Int64, View

MAX_BYTES = 2 << 30
"""Of all rounds together."""
MAX_FOUND = 4
_GAP = 16  # between regions, so that no element is found across two

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """An engine's regions after every round, laid end to end."""

    starts: Mapping[str, tuple[int, int]]
    """Start and size of every region."""
    rounds: tuple[Bytes, ...]

    @classmethod
    def of(cls, snapshots: Iterable[Mapping[str, Bytes]], rounds: int) -> Memory:
        """Join what is read after each of `rounds` rounds, copying each before the next is asked for.

        Raises LayoutError if the regions differ between rounds, and after the first if they are too large.
        """
        starts: dict[str, tuple[int, int]] = {}
        end = 0
        joined: list[Bytes] = []
        for _, snapshot in zip(range(rounds), snapshots, strict=True):
            sizes = {name: data.size for name, data in snapshot.items()}
            if not joined:
                for name, size in sizes.items():
                    starts[name] = (end, size)
                    end += size + _GAP
                if end * rounds > MAX_BYTES:
                    raise LayoutError(f"{end} bytes in {rounds} rounds, at most {MAX_BYTES}: probe a pool of fewer pages",
                                      path="regions")  # fmt: skip
            if sizes != {name: size for name, (_, size) in starts.items()}:
                raise LayoutError("the engine's regions changed between rounds", path="regions")
            flat = np.zeros(end, np.uint8)
            for name, data in snapshot.items():
                flat[starts[name][0] : starts[name][0] + data.size] = data
            joined.append(flat)
        return cls(starts, tuple(joined))

    def where(self, address: int) -> tuple[str, int]:
        """Return the region of an address, and the offset in it."""
        for name, (start, size) in self.starts.items():
            if start <= address < start + size:
                return name, address - start
        raise LayoutError(f"address {address} lies in no region", path="regions")

    def find(self, codes: Bytes) -> list[int]:
        """Return the addresses, MAX_FOUND at most, that hold the codes, uint8[rounds, itemsize], one after each round."""
        spots: Int64 = np.flatnonzero(self.rounds[0][: -codes.shape[1]] == codes[0, 0])
        for flat, code in zip(self.rounds, codes, strict=True):
            for i, byte in enumerate(code):
                spots = spots[flat[spots + i] == byte]
        bounds = np.array(list(self.starts.values()), np.int64).reshape(-1, 2)
        begin, size = bounds[np.searchsorted(bounds[:, 0], spots, side="right") - 1].T
        spots = spots[spots + codes.shape[1] <= begin + size]  # not in the gap between two regions, nor across it
        return [int(x) for x in spots[:MAX_FOUND]]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedArray:
    """The elements, or the stored scales, of one component: where a layout puts them and what they must hold."""

    field: Field
    group: Group
    component: Component
    stored: bool
    """Its scales."""
    table: Int64
    dims: Int64 | None = None
    """Element d of memory holds element dims[d] of the head."""

    @property
    def label(self) -> str:
        """What a person calls it."""
        return f"scale of {self.component.name}" if self.stored else self.component.name

    @property
    def view(self) -> View:
        """Where its elements lie."""
        return view_of(self.group, self.component, stored=self.stored)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(layers, tokens, heads, dim); of scales, `dim` is the blocks."""
        layers, tokens, heads, dim = self.field.shape
        return layers, tokens, heads, dim // self.field.row if self.stored else dim

    def addresses(self, memory: Memory, index: tuple[Int64, ...]) -> Int64:
        """Return where elements (layer, token, head, dim) lie in `memory`, int64[...]; -1: in no region."""
        return self._addresses(memory, index, self.view)

    def _addresses(self, memory: Memory, index: tuple[Int64, ...], view: View) -> Int64:
        layer, token, head, dim = index
        size = self.group.page_size
        starts, ends = self._bounds(memory, view)
        page = token // size
        at = view.token[token % size] + self.table[np.minimum(page, len(self.table) - 1)] * view.page_stride
        at = at + view.head[head] + view.dim[dim] + starts[layer]
        inside = (page < len(self.table)) & (at + view.itemsize <= ends[layer])
        return np.where(inside, at, -1)

    def _bounds(self, memory: Memory, view: View) -> tuple[Int64, Int64]:
        starts = np.zeros(len(self.field.layers), np.int64)
        ends = np.full(len(self.field.layers), -1, np.int64)
        ids = self.group.layer_ids
        for i, layer in enumerate(self.field.layers):
            found = memory.starts.get(view.region.replace("{layer}", str(layer)))
            if found is not None:
                starts[i] = found[0] + view.offset + ids.index(layer) * view.layer_stride
                ends[i] = sum(found)
        return starts, ends

    def codes(self, index: tuple[Int64, ...], step: int) -> Bytes:
        """Return what elements hold after a round, uint8[..., itemsize]."""
        layer, token, head, dim = index
        _, tokens, heads, count = self.shape
        if self.dims is not None:
            dim = self.dims[dim]
        numbers = ((layer * tokens + token) * heads + head) * count + dim
        field, component = self.field, self.component
        scale = component.scale
        if self.stored:
            assert scale is not None  # noqa: S101  # arrays of scales are made for components that store them
            return encode(computed_scale(self._peak(numbers, step), component.dtype, scale), scale.dtype)
        if component.dtype == field.component.dtype:
            return field.codes(numbers, step)
        values = field.values(numbers, step)
        if scale is not None and scale.at is not None:
            own = computed_scale(self._peak(numbers // field.row, step), component.dtype, scale)
            values = quotient(values, own, scale.rule, field.source)
        elif field.constant is not None and scale is not None:
            values = quotient(values, field.constant[layer, head], scale.rule, field.source)
        return encode(values, component.dtype)

    def _peak(self, rows: Int64, step: int) -> Floats:
        most = np.float32(DTYPES[self.field.component.dtype].max)
        return rounded(self.field.scale(rows, step) * most, self.field.source)

    def match(self, memory: Memory, index: tuple[Int64, ...]) -> Bools:
        """Return which elements lie where the layout says, in every round."""
        view = self.view
        at = self._addresses(memory, index, view)
        good: Bools = at >= 0
        spread = np.maximum(at, 0)[..., None] + np.arange(view.itemsize)
        for step, flat in enumerate(memory.rounds):
            if not good.any():
                break
            good = good & (flat[spread] == self.codes(index, step)).all(axis=-1)
        return good


def arrays(layout: Layout, pattern: Pattern) -> Iterator[PlacedArray]:
    """Return every array of a layout that the pattern covers: each component, then its scales."""
    for field in pattern.fields:
        group = layout.groups[field.group]
        table = pattern.tables[field.group]
        yield PlacedArray(field, group, field.component, stored=False, table=table)
        if field.scales is not None:
            yield PlacedArray(field, group, field.component, stored=True, table=table)


def grid(array: PlacedArray, layer: int) -> tuple[Int64, ...]:
    """Return the index of all elements of a layer."""
    _, tokens, heads, dim = array.shape
    return np.full((1, 1, 1), layer), *np.ogrid[:tokens, :heads, :dim]

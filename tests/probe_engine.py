"""An engine for the probe that writes with the planner's element-by-element reference, into a layout of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from regauge.layout.probe.codes import Bytes, Floats
from regauge.layout.probe.known import Known
from regauge.layout.spec import Component, Group, Kind, Layout, Placement
from regauge.layout.view import region_sizes
from regauge.plan import Side
from regauge.plan.reference import transfer


class ReferenceEngine:
    """Its pool lies as `layout` says, whatever is declared to the probe."""

    def __init__(
        self, layout: Layout, dtype: str = "float32", usable: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.usable = usable or {}
        sizes = region_sizes(layout)
        starts = np.cumsum([0, *sizes.values()]).tolist()
        self._bases = dict(zip(sizes, starts, strict=False))
        self._sizes = sizes
        self._memory = np.zeros(starts[-1], np.uint8)

    def fill(self, byte: int) -> None:
        self._memory[:] = byte

    def read(self) -> Mapping[str, Bytes]:
        return {name: self._memory[start : start + self._sizes[name]] for name, start in self._bases.items()}

    def write(self, kind: Kind, layer: int, pages: npt.NDArray[np.int64], values: Mapping[str, Floats]) -> None:
        tokens = len(next(iter(values.values())))
        components, bases, parts, end = [], {}, [], 0
        for name, array in values.items():
            at = Placement("page token head dim", f"{name}.{{layer}}")
            components.append(Component(name, "float32", *array.shape[1:], at))
            bases[f"{name}.{layer}"] = end
            parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            end += parts[-1].size
        # A recurrent group has a page for each record; elsewhere all tokens lie in one page of the source.
        single = kind == "recurrent"
        source = Group(kind, str(layer), 1 if single else tokens, components, pages=tokens if single else 1)
        dense = Layout(self.layout.model, [source], self.layout.shard)
        side = Side(np.arange(tokens if single else 1), bases)
        target = Side(pages, self._bases)
        transfer(dense, self.layout, np.concatenate(parts), self._memory, side, target, (0, tokens))


def dump(known: Known, layout: Layout, *, noise: int = 0) -> dict[str, Bytes]:
    """Return the regions of a pool in `layout` after known numbers were written, among random bytes."""
    engine = ReferenceEngine(layout)
    rng = np.random.default_rng(noise)
    engine._memory[:] = rng.integers(0, 256, engine._memory.size)
    for index, values in enumerate(known.values):
        for position, layer in enumerate(known.layers[index]):
            given = {name: array[position] for name, array in values.items()}
            engine.write(known.layout.groups[index].kind, layer, known.tables[index], given)
    return {name: data.copy() for name, data in engine.read().items()}

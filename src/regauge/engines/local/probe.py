"""The local engine's pool, opened to the probe: values go in as the model's keys and values do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from regauge.engines.local.kv import PagedKV, allocate
from regauge.engines.local.model import Segment
from regauge.errors import EngineError
from regauge.layout.probe.codes import Bytes, Floats
from regauge.layout.spec import Kind, Layout
from regauge.layout.view import region_sizes


class LocalCache:
    """A pool of its own in a layout that has pages; see `regauge.engines.probe.Cache`. A context manager.

    `dtype` is what the model computes in. Raises ConfigError for a layout that the local engine cannot have.
    """

    def __init__(self, layout: Layout, dtype: str = "float32") -> None:
        self._memory = allocate(layout, "probe")
        self._layout = layout
        self._dtype = dtype
        self._begun: tuple[list[int], int] = ([], 0)
        most = layout.groups[0].pages * layout.groups[0].page_size
        try:
            self._kv = PagedKV(self._memory, dtype=getattr(torch, dtype), max_new=most, max_context=most)
        except BaseException:  # whatever broke, the memory is given back, and the error goes on
            self._memory.slab.close()
            raise

    @property
    def layout(self) -> Layout:
        """What the pool was made from."""
        return self._layout

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return self._dtype

    @property
    def usable(self) -> Mapping[int, Sequence[int]]:
        """All pages."""
        return {}

    def fill(self, byte: int) -> None:
        """Set every byte of the pool."""
        self._memory.slab.array[:] = byte

    def write(self, kind: Kind, layer: int, pages: npt.NDArray[np.int64], values: Mapping[str, Floats]) -> None:
        """Write as a step of the model does; see `Cache`. Raises EngineError for values of another shape than the model's."""
        group = self._layout.groups[0]
        if kind != group.kind or layer not in group.layer_ids:
            raise EngineError(f"the local pool keeps no {kind} state of layer {layer}")
        k, v = (torch.from_numpy(np.ascontiguousarray(values[name])) for name in ("k", "v"))
        for name, tensor in (("k", k), ("v", v)):
            own = group.component(name)
            if tuple(tensor.shape[1:]) != (own.heads, own.dim):
                raise EngineError(f"{name} is {own.heads} heads of {own.dim}, not {list(tensor.shape[1:])}")
        if self._begun != (pages.tolist(), len(k)):  # a step's layers share its plan
            self._kv.begin([Segment("probe", pages, 0, len(k))])
            self._begun = (pages.tolist(), len(k))
        self._kv.write(group.layer_ids.index(layer), k, v)

    def read(self) -> Mapping[str, Bytes]:
        """Return the regions, in place."""
        memory = self._memory
        sizes = region_sizes(self._layout)
        starts = {name: base - memory.slab.address for name, base in memory.bases.items()}
        return {name: memory.slab.array[starts[name] : starts[name] + sizes[name]] for name in sizes}

    def close(self) -> None:
        """Give the memory back."""
        self._memory.slab.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""The probe's side of an engine: what an adapter implements so that a declared layout can be checked against real bytes.

An adapter needs no model and no scheduler: it makes a small pool with the engine's own code, calls the engine's own
cache-write operation, and hands out the pool's bytes. For vLLM that is the attention backend's `reshape_and_cache` on a
tensor that its allocator made; for SGLang, `set_kv_buffer` of the pool's class. Tensors on the CPU are read in place with
`storage_bytes`; those of a device are copied to the host first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from regauge.errors import EngineError
from regauge.layout.probe import pattern
from regauge.layout.probe.codes import Bytes, Floats
from regauge.layout.probe.snapshot import Memory
from regauge.layout.probe.verify import FILLS, Verdict, verify
from regauge.layout.spec import Kind, Layout


class Cache(Protocol):
    """An engine's KV pool that the probe may overwrite: never one that requests use."""

    @property
    def layout(self) -> Layout:
        """What the adapter declares; with its number of pages. Its regions' names are those of `read`."""

    @property
    def dtype(self) -> str:
        """What the write operation takes: float32, bfloat16 or float16."""

    @property
    def usable(self) -> Mapping[int, Sequence[int]]:
        """Pages that may be written, by group; a group that is not named: all. SGLang's page 0 and vLLM's null block may not."""

    def fill(self, byte: int) -> None:
        """Set every byte of every region."""

    def write(self, kind: Kind, layer: int, pages: npt.NDArray[np.int64], values: Mapping[str, Floats]) -> None:
        """Write one layer of one request through the engine's own operation.

        `values`: for each component float32[tokens, heads, dim], exact in `dtype`, heads of this rank. Token t goes to the engine's
        page `pages[t // P]`, P being the engine's own page size, whatever the layout says: a wrong declaration of it must show.
        Of a recurrent state, "token" t is the record at `pages[t]`.
        """

    def read(self) -> Mapping[str, Bytes]:
        """Return the bytes of every region, uint8[n], by name; views of live memory will do."""


def probe(cache: Cache, declared: Layout | None = None, *, layers: Sequence[int] | None = None) -> Verdict:
    """Check a layout against the bytes that an engine writes. Everything in the pool is overwritten.

    `declared`: default: what the adapter says. `layers`: default: all, or some where they are many. Raises LayoutError for a layout
    that cannot be probed, EngineError if the engine does not take what the layout says it holds.
    """
    layout = declared or cache.layout
    values = pattern.make(layout, source=cache.dtype, usable=cache.usable, layers=layers)
    return verify(layout, values, Memory.of(_rounds(cache, layout, values), values.rounds))


def require(cache: Cache, what: str) -> None:
    """Check a cache against its own declaration, and leave it zeroed. Raises EngineError that names `what` and the first element elsewhere."""
    verdict = probe(cache)
    cache.fill(0)
    if not verdict.verified:
        found = verdict.first or "; ".join(map(str, verdict.strays))
        raise EngineError(f"{what} does not lie as its preset declares, and is refused: {found}")


def slots(pages: npt.NDArray[np.int64], page_size: int, tokens: int) -> npt.NDArray[np.int64]:
    """Return the engine's slot numbers, int64[tokens], of tokens that lie one after another in these pages."""
    numbers = np.arange(tokens)
    return pages[numbers // page_size] * page_size + numbers % page_size


def _rounds(cache: Cache, layout: Layout, values: pattern.Pattern) -> Iterator[Mapping[str, Bytes]]:
    """Write round by round; what is read after each is gone when the next begins."""
    for step in range(values.rounds):
        cache.fill(FILLS[step % len(FILLS)])
        _write(cache, layout, values, step)
        yield cache.read()


def _write(cache: Cache, layout: Layout, values: pattern.Pattern, step: int) -> None:
    for index, group in enumerate(layout.groups):
        fields = [f for f in values.fields if f.group == index]
        for position, layer in enumerate(fields[0].layers if fields else ()):
            given = {f.component.name: f.values(f.numbers(position), step) for f in fields}
            try:
                cache.write(group.kind, layer, values.tables[index], given)
            except (ValueError, IndexError, KeyError, RuntimeError) as error:
                shapes = ", ".join(f"{name} {list(v.shape)}" for name, v in given.items())
                raise EngineError(
                    f"the engine did not take {group.kind} of layer {layer} ({shapes}; tokens, heads, dim), which the "
                    f"declared layout holds: {error}"
                ) from error


def storage_bytes(tensor: Any) -> Bytes:
    """Return all bytes of a CPU torch tensor's storage, uint8[n], in place and whatever its shape and strides say.

    The tensor must outlive the result. Raises EngineError for a tensor of a device.
    """
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu":
        raise EngineError(f"a tensor on {storage.device}: copy it to the host first")
    buffer = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(buffer, np.uint8)

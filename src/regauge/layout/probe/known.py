"""Known numbers in a file: what a user writes through an engine, so that a dump of its pages can be searched for them.

The file is a `.npz` of numpy arrays, none of them pickled; G is a group's number in the layout, from 0:

| array | type | holds |
|---|---|---|
| `layout` | uint8[n] | JSON of a layout: the model, page sizes and dtypes that the numbers were chosen for; not where anything lies |
| `G.layers` | int64[L] | numbers of the layers to write |
| `G.pages` | int64[n] | page table: token t goes to page `pages[t // page size]` |
| `G.NAME` | float32[L, T, heads, dim] | the numbers of component NAME; exact in the dtype that was asked for |
"""

from __future__ import annotations

import lzma
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from regauge.errors import LayoutError
from regauge.layout import files
from regauge.layout.probe import pattern
from regauge.layout.probe.codes import Bytes, Floats, computed_scale, encode, quotient
from regauge.layout.spec import Component, Layout, scale_table
from regauge.layout.view import Int64

MAX_FILE_BYTES = 1 << 30
MAX_DUMP_BYTES = 1 << 30
_BROKEN = (
    OSError, ValueError, OverflowError, EOFError, MemoryError, tokenize.TokenError,  # numpy, of an array's header or size
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError,  # the last: encrypted, or packed in an unknown way
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Numbers that an engine was given."""

    layout: Layout
    """Says the model, page sizes and dtypes; not where anything lies."""
    layers: tuple[tuple[int, ...], ...]
    """Layers written, by group."""
    tables: tuple[Int64, ...]
    """Page table, by group."""
    values: tuple[dict[str, Floats], ...]
    """By group and component: float32[layers, tokens, heads, dim]."""

    @classmethod
    def of(cls, layout: Layout, made: pattern.Pattern) -> Known:
        """Return the numbers of a pattern's first round."""
        layers: list[tuple[int, ...]] = [()] * len(layout.groups)
        values: list[dict[str, Floats]] = [{} for _ in layout.groups]
        for field in made.fields:
            layers[field.group] = field.layers
            values[field.group][field.component.name] = np.stack(
                [field.values(field.numbers(i), 0) for i in range(len(field.layers))]
            )
        return cls(layout, tuple(layers), made.tables, tuple(values))

    def scales(self, group: int, component: Component) -> Floats | None:
        """Return the scales that a cache with this component computes, float32[layers, tokens, heads, blocks]; None: none."""
        scale = component.scale
        if scale is None or scale.at is None:
            return None
        values = self.values[group][component.name]
        rows = values.reshape(*values.shape[:3], scale.blocks(component.dim), -1)
        return computed_scale(np.abs(rows).max(axis=-1), component.dtype, scale)

    def codes(self, group: int, component: Component) -> Bytes:
        """Return what a cache with this component holds, uint8[layers, tokens, heads, dim, itemsize]."""
        values, scale = self.values[group][component.name], component.scale
        if scale is None:
            return encode(values, component.dtype)
        own = self.scales(group, component)
        if own is not None:
            factor = np.repeat(own, values.shape[-1] // own.shape[-1], axis=-1)
        else:
            ids = self.layout.groups[group].layer_ids
            table = scale_table(scale, len(ids), component.heads)
            factor = np.array([table[ids.index(x)] for x in self.layers[group]], np.float32)[:, None, :, None]
        return encode(quotient(values, factor, scale.rule, "float32"), component.dtype)

    def save(self, path: Path) -> None:
        """Write the file. Raises LayoutError where that is not possible."""
        arrays: dict[str, npt.NDArray[Any]] = {
            "layout": np.frombuffer(files.encode(self.layout, format="json"), np.uint8)
        }
        for index, values in enumerate(self.values):
            arrays[f"{index}.layers"] = np.array(self.layers[index], np.int64)
            arrays[f"{index}.pages"] = self.tables[index]
            arrays |= {f"{index}.{name}": array for name, array in values.items()}
        try:
            with path.open("wb") as out:
                np.savez(out, allow_pickle=False, **arrays)
        except OSError as error:
            raise LayoutError(f"cannot be written: {error.strerror}", path=str(path)) from error


def load(path: Path) -> Known:
    """Read a file that `Known.save` wrote. Raises LayoutError that names the array that is missing or wrong."""
    arrays = _arrays(path)
    layout = files.decode(_take(arrays, "layout", np.uint8, 1).tobytes(), format="json")
    layers, tables, values = [], [], []
    for index, group in enumerate(layout.groups):
        own = tuple(int(x) for x in _take(arrays, f"{index}.layers", np.int64, 1))
        table = _take(arrays, f"{index}.pages", np.int64, 1)
        if not set(own) <= set(group.layer_ids) or (len(table) and table.min() < 0):
            raise LayoutError("layers or pages that the layout does not have", path=f"{path}: {index}")
        if len(set(own)) < len(own) or len(np.unique(table)) < len(table):
            raise LayoutError("a layer or page is given twice", path=f"{path}: {index}")
        here: dict[str, Floats] = {}
        for component in group.components if own else ():
            array = _take(arrays, f"{index}.{component.name}", np.float32, 4)
            tokens = array.shape[1]
            if array.shape != (len(own), tokens, component.heads, component.dim) or not 1 <= tokens <= (
                len(table) * group.page_size
            ):
                raise LayoutError(f"shape {list(array.shape)} does not fit the layout and the pages",
                                  path=f"{path}: {index}.{component.name}")  # fmt: skip
            here[component.name] = array
        layers.append(own)
        tables.append(table)
        values.append(here)
    return Known(layout, tuple(layers), tuple(tables), tuple(values))


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_FILE_BYTES:
            raise LayoutError(f"{size} bytes of arrays, at most {MAX_FILE_BYTES}", path=str(path))
        with np.load(path, allow_pickle=False) as stored:
            return {name: np.asarray(stored[name]) for name in stored.files}  # what is no array, numpy returns as bytes
    except _BROKEN as error:
        raise LayoutError(f"is no pattern file (.npz): {error}", path=str(path)) from error


def _take(arrays: dict[str, npt.NDArray[Any]], name: str, dtype: Any, axes: int) -> npt.NDArray[Any]:
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.ndim != axes:
        found = "missing" if array is None else f"{array.dtype} of {array.ndim} axes"
        raise LayoutError(f"expected {np.dtype(dtype).name} of {axes} axes, found {found}", path=name)
    return array


def read_dump(path: Path) -> Bytes:
    """Return the bytes of a dump: raw, or of the one array in a `.npy` file. Raises LayoutError for a file that is too large."""
    try:
        size = path.stat().st_size
        if not 0 < size <= MAX_DUMP_BYTES:
            raise LayoutError(f"{size} bytes; a dump has 1 to {MAX_DUMP_BYTES}", path=str(path))
        if path.suffix == ".npy":
            array = np.lib.format.open_memmap(path, mode="r")  # its header cannot claim more than the file has
            return np.frombuffer(array.tobytes(), np.uint8)
        return np.fromfile(path, np.uint8)
    except _BROKEN as error:
        raise LayoutError(f"cannot be read: {error}", path=str(path)) from error

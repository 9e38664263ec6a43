"""Tiles over their own buffers, which every backend must fill with the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regauge.move import kernels, reference
from regauge.plan.tiles import Convert, Int64, Tiles

ISAS = ("portable", "avx2") if kernels.isa() == "avx2" else ("portable",)
DTYPES = tuple(reference.ITEMSIZE)
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
EIGHT_BIT = (*FP8, "int8")
GUARD = 192
RULES = kernels.RULES

SCALES: tuple[float, ...] = (0.37, 0.0123, -3.3, 1e-30, 1e30, 1e-42, 2.0**-126, 2.0, 0.0, np.inf)


def address(array: np.ndarray, *offsets: int) -> Int64:
    return np.array([array.ctypes.data + o for o in (offsets or (0,))], np.int64)


def filler() -> tuple[Tiles, tuple[np.ndarray, np.ndarray]]:
    """A copy that lifts a call's output over the size from which on stores bypass the cache; with its buffers."""
    a, b = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    return Tiles(address(a), address(b), (), (), (), len(a)), (a, b)


@dataclass
class Case:
    """Tiles over their own buffers: run them anywhere, from the same start, and compare all bytes of all outputs."""

    tiles: Tiles
    outputs: Sequence[np.ndarray]
    keep: Sequence[np.ndarray]

    def run(self, **how: object) -> list[np.ndarray]:
        before = [o.copy() for o in self.outputs]
        stream = how.pop("stream", False)
        extra, _buffers = filler()
        kernels.run([self.tiles, extra] if stream else [self.tiles], **how)  # type: ignore[arg-type]
        results = [o.copy() for o in self.outputs]
        for output, start in zip(self.outputs, before, strict=True):
            output[...] = start
        return results

    def check(self, *, threads: int = 1, stream: bool = False) -> None:
        expected = self.run(backend="numpy")
        for isa in ISAS:
            for got, want in zip(self.run(isa=isa, threads=threads, stream=stream), expected, strict=True):
                assert np.array_equal(got, want), f"isa {isa}"


def row(codes: np.ndarray, src: str, dst: str, **scales: object) -> Case:
    """One row of all `codes` in order; `scales`: src_scale, dst_scale (as stored), and what else `Convert` takes."""
    out = np.full(len(codes) * reference.ITEMSIZE[dst] + 2 * GUARD, 0xA5, np.uint8)
    keep, outputs = [codes], [out]
    for name in ("src_scale", "dst_scale"):
        if name in scales:
            stored = np.uint8 if scales.get(f"{name}_dtype", "float32") != "float32" else np.float32
            array = np.array([scales[name]], stored)
            keep.append(array)
            if scales.get("dynamic") and name == "dst_scale":
                outputs.append(array)
            scales[name] = address(array)
    convert = Convert(src, dst, codes.dtype.itemsize, reference.ITEMSIZE[dst], **scales)  # type: ignore[arg-type]
    return Case(Tiles(address(codes), address(out, GUARD), (), (), (), len(codes), convert), outputs, keep)


def codes_of(dtype: str) -> np.ndarray:
    size = reference.ITEMSIZE[dtype]
    if size < 4:
        return np.arange(256**size, dtype=f"u{size}")
    return np.random.default_rng(3).integers(0, 2**32, 30_011, dtype=np.uint32)


def strides_in(order: Sequence[int], shape: Sequence[int], size: int, pad: int) -> tuple[int, ...]:
    """Byte strides of axes that lie in `order` (outermost first), elements of `size` bytes, `pad` bytes after each axis."""
    strides, at = [0] * len(shape), size
    for axis in reversed(order):
        strides[axis] = at
        at = at * shape[axis] + pad
    return tuple(strides)


def span(shape: Sequence[int], strides: Sequence[int], size: int) -> int:
    return size + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)

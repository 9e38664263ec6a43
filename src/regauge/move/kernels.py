"""Run tiles: gather, scatter, transpose and convert strided boxes in memory, natively or with the numpy reference.

What a conversion computes, bit for bit, is defined in `regauge.move.reference`. Addresses are trusted: that they stay
inside their regions is the planner's duty. Boxes of one call must not overlap in the target, nor target and source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from regauge import _native
from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Rule
from regauge.move import gpu, reference
from regauge.plan.tiles import Convert, Int64, Tiles

Backend = Literal["native", "numpy", "triton"]
Isa = Literal["auto", "avx2", "portable"]

MAX_AXES = 8
RULES: tuple[Rule, ...] = get_args(Rule)
MIN_FLOOR, MAX_FLOOR = 2.0**-126, 2.0**127


def isa() -> str:
    """Return the instruction set that `isa="auto"` picks on this CPU: "avx2" or "portable"."""
    return _native.isa()


def run(tiles: Sequence[Tiles], *, threads: int = 1, backend: Backend = "native", isa: Isa = "auto") -> None:
    """Copy or convert every tile, with the GIL released.

    `threads` share the work of one `Tiles` when its output exceeds 512 KiB. Output of more than 1 MiB in one
    call bypasses the cache. Every backend and every `isa` writes the same bytes.

    Addresses are of this process's memory; for the backend "triton" of the current accelerator's, as torch names it.

    Raises ValueError for malformed tiles, before anything is written, and ConfigError where triton or a GPU is missing.
    """
    check(tiles, threads=threads, backend=backend, isa=isa)
    moving = [t for t in tiles if t.only is None]
    if backend == "numpy":
        for t in moving:
            reference.run(t)
        return
    if backend == "triton":
        gpu.run(moving)
        return
    total = output_bytes(moving)
    for group in groups(moving):
        _native.run_together([_part(t) for t in group], threads, total, isa)


def check(tiles: Sequence[Tiles], *, threads: int, backend: Backend, isa: Isa) -> None:
    """Raise ValueError for malformed tiles or arguments of `run`."""
    for i, t in enumerate(tiles):
        _check(t, f"tiles[{i}]")
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    if isa not in ("auto", "avx2", "portable"):
        raise ValueError(f"isa must be auto, avx2 or portable, not {isa!r}")
    if backend not in ("native", "numpy", "triton"):
        raise ValueError(f"backend must be native, numpy or triton, not {backend!r}")


def groups(tiles: Sequence[Tiles]) -> list[list[Tiles]]:
    """Return tiles in groups that are run together: their targets interleave, like codes and what is copied beside them."""
    groups: list[list[Tiles]] = []
    for t in tiles:
        if groups and _interleave(groups[-1][0], t):
            groups[-1].append(t)
        else:
            groups.append([t])
    return groups


def _interleave(a: Tiles, b: Tiles) -> bool:
    if (a.convert is None and b.convert is None) or len(a.dst) != len(b.dst) or len(a.dst) == 0:
        return False
    step, apart = max(a.dst_stride, default=0), int(b.dst[0]) - int(a.dst[0])
    return abs(apart) < step and bool((b.dst - a.dst == apart).all())


def _part(t: Tiles) -> _native.Part:
    """Return a box as the native module takes it."""
    c = t.convert
    if c is None:
        return _native.copy_part(t.src, t.dst, t.shape, t.src_stride, t.dst_stride, t.run)
    return _native.convert_part(
        t.src,
        t.dst,
        t.shape,
        t.src_stride,
        t.dst_stride,
        t.run,
        c.src_dtype,
        c.dst_dtype,
        c.src_step,
        c.dst_step,
        c.rule,
        c.row_axes,
        c.src_scale,
        c.src_scale_stride,
        c.dst_scale,
        c.dst_scale_stride,
        c.dynamic,
        c.floor,
        c.pow2,
        c.src_scale_dtype == "float8_e8m0fnu",
        c.dst_scale_dtype == "float8_e8m0fnu",
    )


def output_bytes(tiles: Sequence[Tiles]) -> int:
    """Return the bytes that tiles write; one call's sum decides on how it stores."""
    return sum(_output_bytes(t) for t in tiles if t.only is None)


def _output_bytes(t: Tiles) -> int:
    size = 1 if t.convert is None else reference.ITEMSIZE[t.convert.dst_dtype]
    return len(t.src) * math.prod(t.shape) * t.run * size


def _check(t: Tiles, where: str) -> None:
    if len(t.shape) > MAX_AXES:
        raise ValueError(f"{where}.shape has {len(t.shape)} axes; at most {MAX_AXES} are supported")
    if t.run < 0 or any(n < 0 for n in t.shape):
        raise ValueError(f"{where}: shape {t.shape} and run {t.run} must not be negative")
    axes, count = len(t.shape), len(t.src)
    check_operand(t.src, t.src_stride, count, axes, f"{where}.src")
    check_operand(t.dst, t.dst_stride, count, axes, f"{where}.dst")
    if t.convert is not None:
        _check_convert(t.convert, count, axes, f"{where}.convert")


def _check_convert(c: Convert, count: int, axes: int, where: str) -> None:
    for dtype in (c.src_dtype, c.dst_dtype):
        if dtype not in reference.ITEMSIZE:
            raise ValueError(f"{where}: unknown dtype {dtype!r}; known: {', '.join(reference.ITEMSIZE)}")
    if c.rule not in RULES:
        raise ValueError(f"{where}.rule must be one of {', '.join(RULES)}, not {c.rule!r}")
    if not 0 <= c.row_axes <= axes:
        raise ValueError(f"{where}.row_axes is {c.row_axes}; the shape has {axes} axes")
    for name, base, stride in (
        ("src_scale", c.src_scale, c.src_scale_stride),
        ("dst_scale", c.dst_scale, c.dst_scale_stride),
    ):
        if base is None:
            continue
        check_operand(base, stride, count, axes, f"{where}.{name}")
        if any(stride[axes - c.row_axes :]):
            raise ValueError(f"{where}.{name}_stride must be 0 along the last {c.row_axes} axes: they are one row")
    for name, dtype in (("src_scale_dtype", c.src_scale_dtype), ("dst_scale_dtype", c.dst_scale_dtype)):
        if dtype not in reference.SCALE_ITEMSIZE:
            raise ValueError(f"{where}.{name} must be one of {', '.join(reference.SCALE_ITEMSIZE)}, not {dtype!r}")
    if c.dynamic:
        _check_dynamic(c, where)


def _check_dynamic(c: Convert, where: str) -> None:
    if c.dst_scale is None or not DTYPES[c.dst_dtype].takes_scales:
        raise ValueError(f"{where}: dynamic scales need an 8-bit target and dst_scale, where they are stored")
    if not MIN_FLOOR <= c.floor <= MAX_FLOOR:
        raise ValueError(f"{where}.floor is {c.floor}; computed scales need one from 2**-126 to 2**127")
    if c.dst_scale_dtype != "float32" and not c.pow2:
        raise ValueError(f"{where}: computed scales of {c.dst_scale_dtype} are powers of two: set pow2")


def check_operand(base: Int64, stride: tuple[int, ...], count: int, axes: int, where: str) -> None:
    """Raise ValueError unless an operand has one int64 address per tile and one stride per axis."""
    if base.dtype != "int64" or base.ndim != 1 or not base.flags.c_contiguous:
        raise ValueError(
            f"{where} must be a contiguous one-dimensional int64 array, not {base.dtype}{list(base.shape)}"
        )
    if len(base) != count:
        raise ValueError(f"{where} has {len(base)} addresses; src has {count}")
    if len(stride) != axes:
        raise ValueError(f"{where}_stride has {len(stride)} strides; shape has {axes} axes")

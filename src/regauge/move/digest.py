"""Run tiles and digest what they read and write, or only read what lies somewhere and digest that.

What a digest is: `regauge.plan.digest`. Both sums are over logical elements, so that the source's and the target's agree between any
two layouts when nothing was converted. Addresses are trusted, as in `regauge.move.kernels`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regauge import _native
from regauge.move import gpu, kernels, reference
from regauge.move.kernels import Backend, Isa
from regauge.plan.digest import PRIME, ROW_BYTES, ROW_KEY, WORDS, UInt64, add, rows_digest
from regauge.plan.tiles import End, Int64, Keyed, Tiles


@dataclass(frozen=True, slots=True)
class Sums:
    """Digests of the elements that were read and of those that were written; parts of a transfer add up."""

    src: int = 0
    dst: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums((self.src + other.src) % PRIME, (self.dst + other.dst) % PRIME)


@dataclass(frozen=True, slots=True, eq=False)
class _Box:
    """Rows of bytes on one side of some tiles."""

    at: Int64
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    run: int
    keys: Keyed


def run(
    tiles: Sequence[Tiles], *, of: End | None = None, threads: int = 1, backend: Backend = "native", isa: Isa = "auto"
) -> Sums:
    """Copy or convert every tile, as `kernels.run` does, and digest what is read and what is written.

    Copies are digested in the pass that moves them. Conversions are read before and after: their codes are fewer bytes than
    what they are made of or become, and two passes that each stream cost less than one that does both. With `of` only that end
    is asked for, and the sum of the other is not. A side without keys counts as 0. Raises ValueError for malformed tiles, and
    when no tile has keys, before anything is written.
    """
    kernels.check(tiles, threads=threads, backend=backend, isa=isa)
    _check_all(tiles)
    moving = [t for t in tiles if t.only is None]
    alone = [
        t for group in kernels.groups(moving) if len(group) == 1 and (t := group[0]).convert is None and t.src_keys
    ]
    fused = [] if backend == "numpy" else alone
    together = {id(t) for t in fused}
    apart = [t for t in tiles if id(t) not in together]
    src = [] if of == "dst" else [_digest(box, threads, backend, isa) for box in _boxes(apart, "src")]
    nbytes = kernels.output_bytes(tiles)
    copied = [_copy(t, keys, threads, nbytes, backend, isa) for t in fused if (keys := t.src_keys)]
    kernels.run([t for t in apart if t.only is None], threads=threads, backend=backend, isa=isa)
    dst = [] if of == "src" else [_digest(box, threads, backend, isa) for box in _boxes(apart, "dst")]
    return Sums(add([*src, *copied]), add([*dst, *copied]))


def _copy(t: Tiles, keys: Keyed, threads: int, nbytes: int, backend: Backend, isa: Isa) -> int:
    if backend == "triton":
        return gpu.digest((t.src, t.src_stride), (t.dst, t.dst_stride), t.shape, t.run, keys)
    return _native.digest_tiles(
        t.src, t.dst, t.shape, t.src_stride, t.dst_stride, t.run, _operands(keys), keys.words, threads, nbytes, isa
    )


def _operands(keys: Keyed) -> _native.KeyOperands:
    return keys.row, keys.row_stride, keys.token, keys.token_stride, keys.row_axes


def read(tiles: Sequence[Tiles], of: End, *, threads: int = 1, backend: Backend = "native", isa: Isa = "auto") -> int:
    """Digest what now lies at the sources or targets of tiles, and write nothing.

    Equals the sum that `run` returned for that side, unless an element has changed since, or never arrived.
    Raises ValueError as `run` does.
    """
    kernels.check(tiles, threads=threads, backend=backend, isa=isa)
    _check_all(tiles)
    return add(_digest(box, threads, backend, isa) for box in _boxes(tiles, of))


def _boxes(tiles: Sequence[Tiles], of: End) -> list[_Box]:
    return [_box(t, of, keys) for t in tiles if t.only in (None, of) and (keys := _keys(t, of))]


def _keys(t: Tiles, of: End) -> Keyed | None:
    return t.src_keys if of == "src" or t.convert is None else t.dst_keys


def _box(t: Tiles, of: End, keys: Keyed) -> _Box:
    at, stride = (t.src, t.src_stride) if of == "src" else (t.dst, t.dst_stride)
    if t.convert is None:
        return _Box(at, t.shape, stride, t.run, keys)
    dtype, step = (
        (t.convert.src_dtype, t.convert.src_step) if of == "src" else (t.convert.dst_dtype, t.convert.dst_step)
    )
    inner = dataclasses.replace(
        keys,
        row_stride=(*keys.row_stride, 0),
        token_stride=(*keys.token_stride, 0),
        row_axes=keys.row_axes + 1,
    )
    return _Box(at, (*t.shape, t.run), (*stride, step), reference.ITEMSIZE[dtype], inner)


def _digest(box: _Box, threads: int, backend: Backend, isa: Isa) -> int:
    if backend == "numpy":
        return _reference(box)
    if backend == "triton":
        return gpu.digest((box.at, box.stride), None, box.shape, box.run, box.keys)
    return _native.digest_tiles(
        box.at, None, box.shape, box.stride, box.stride, box.run, _operands(box.keys), box.keys.words,
        threads, len(box.at) * math.prod(box.shape) * box.run, isa,
    )  # fmt: skip


def _reference(box: _Box) -> int:
    if 0 in (*box.shape, box.run):
        return 0
    outer = len(box.shape) - box.keys.row_axes
    total = 0
    for i, at in enumerate(box.at.tolist()):
        rows = reference.memory(at, (*box.shape, box.run), (*box.stride, 1))
        count = math.prod(box.shape[:outer])
        row_keys = _numbers(int(box.keys.row[i]), box.shape[:outer], box.keys.row_stride[:outer], ROW_KEY)
        token_keys = _numbers(int(box.keys.token[i]), box.shape[:outer], box.keys.token_stride[:outer], 1)
        total += rows_digest(np.ascontiguousarray(rows).reshape(count, -1), box.keys.words, row_keys, token_keys[:, 0])
    return total % PRIME


def _numbers(at: int, shape: tuple[int, ...], strides: tuple[int, ...], count: int) -> UInt64:
    raw = np.ascontiguousarray(reference.memory(at, (*shape, 8 * count), (*strides, 1)))
    numbers: UInt64 = raw.view("<u8").reshape(-1, count)
    return numbers


def _check_all(tiles: Sequence[Tiles]) -> None:
    for i, t in enumerate(tiles):
        _check(t, f"tiles[{i}]")
    if tiles and not any(t.src_keys or t.dst_keys for t in tiles):
        raise ValueError("no tile has keys: instantiate the plan with the transfer's keys")


def _check(t: Tiles, where: str) -> None:
    for name, keys, dtype in (
        ("src_keys", t.src_keys, t.convert and t.convert.src_dtype),
        ("dst_keys", t.dst_keys, t.convert and t.convert.dst_dtype),
    ):
        if keys is not None:
            _check_keys(t, keys, t.run * (reference.ITEMSIZE[dtype] if dtype else 1), f"{where}.{name}")


def _check_keys(t: Tiles, keys: Keyed, row_bytes: int, where: str) -> None:
    axes = len(t.shape)
    if not 0 <= keys.row_axes <= axes:
        raise ValueError(f"{where}.row_axes is {keys.row_axes}; the shape has {axes} axes")
    for name, at, stride in (("row", keys.row, keys.row_stride), ("token", keys.token, keys.token_stride)):
        kernels.check_operand(at, stride, len(t.src), axes, f"{where}.{name}")
        if any(stride[axes - keys.row_axes :]):
            raise ValueError(f"{where}.{name}_stride must be 0 along the last {keys.row_axes} axes: they are one row")
    row_bytes *= math.prod(t.shape[axes - keys.row_axes :])
    if row_bytes > ROW_BYTES:
        raise ValueError(f"{where}: a row of {row_bytes} bytes; at most {ROW_BYTES} are digested at once")
    if keys.words.dtype != "uint32" or keys.words.shape != (WORDS,):
        raise ValueError(f"{where}.words must be uint32[{WORDS}], not {keys.words.dtype}{list(keys.words.shape)}")

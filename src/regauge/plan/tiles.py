"""What a plan becomes when page tables are known: boxes of bytes, ready for a kernel or a wire. No I/O.

Addresses are absolute byte addresses (or addresses in a peer's exported space): a region's base plus an offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from regauge.layout.spec import Rule

Int64 = npt.NDArray[np.int64]
End = Literal["src", "dst"]


@dataclass(frozen=True, slots=True, eq=False)
class Convert:
    """How the elements of one row change.

    A row is `Tiles.run` elements, `src_step` and `dst_step` bytes apart. Scales are addressed like the elements: one base
    per tile plus one stride per axis. The last `row_axes` axes belong to the row: a scale is constant (and, when
    `dynamic`, computed) over them and the row's elements together. How scales and codes are made, bit for bit: see
    `regauge.move.reference`.

    * `rule`: v * (1 / s), v / s, or v / s rounded to the source's dtype before the code is made.
    * `floor`, `pow2`: the smallest computed scale, and whether computed scales are rounded up to powers of two.
    * `src_scale_dtype`, `dst_scale_dtype`: of the scales in memory, "float32" or "float8_e8m0fnu" (one byte; computed ones
      need `pow2`).
    """

    src_dtype: str
    dst_dtype: str
    src_step: int
    dst_step: int
    rule: Rule = "reciprocal"
    row_axes: int = 0
    src_scale: Int64 | None = None
    src_scale_stride: tuple[int, ...] = ()
    dst_scale: Int64 | None = None
    dst_scale_stride: tuple[int, ...] = ()
    dynamic: bool = False
    floor: float = 2.0**-126
    pow2: bool = False
    src_scale_dtype: str = "float32"
    dst_scale_dtype: str = "float32"
    keep: tuple[object, ...] = ()
    """Tables of constant scales that addresses point into: held here, so that they live as long as the box."""


@dataclass(frozen=True, slots=True, eq=False)
class Keyed:
    """Where the keys of every row of a box lie, so that a kernel digests the rows while it moves them (plan/digest.py).

    A row is the last `row_axes` axes of the box together with its `run`, elements in order of dim. Keys are addressed like
    the elements: one base per tile plus one stride per axis, 0 along the axes of a row.
    """

    words: npt.NDArray[np.uint32]
    """Key words that all rows share, uint32[WORDS]."""
    row: Int64
    """Address of each tile's first row key: uint64[4]."""
    row_stride: tuple[int, ...]
    token: Int64
    """Address of each tile's first token key: uint64."""
    token_stride: tuple[int, ...]
    row_axes: int = 0
    keep: tuple[object, ...] = ()
    """Tables that addresses point into: held here, so that they live as long as the box."""


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """N equal strided boxes.

    Tile i at index (a0, a1, ...) of `shape` reads at `src[i] + sum(a_j * src_stride[j])` and writes at
    `dst[i] + sum(a_j * dst_stride[j])`: `run` contiguous bytes, or a row of `run` elements when `convert` is given.
    """

    src: Int64
    dst: Int64
    shape: tuple[int, ...]
    src_stride: tuple[int, ...]
    dst_stride: tuple[int, ...]
    run: int
    convert: Convert | None = None
    src_keys: Keyed | None = None
    """Keys of what is read. A copy writes the same, so that it needs no others."""
    dst_keys: Keyed | None = None
    """Keys of what a conversion writes."""
    only: End | None = None
    """A box that moves nothing: an array that a conversion reads ("src") or writes ("dst") on the side, to be digested."""

    @property
    def pieces(self) -> int:
        """Number of runs (or rows) in all tiles."""
        count = len(self.src)
        for n in self.shape:
            count *= n
        return count

"""The compiled kernels (native/*.cpp). Use them through regauge.move.kernels."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KeyOperands = tuple[npt.NDArray[np.int64], Sequence[int], npt.NDArray[np.int64], Sequence[int], int]
"""Addresses and strides of row keys, the same of token keys, and the number of axes of a row."""

class Part:
    """One copy or conversion, with its arguments checked; it keeps the arrays of addresses alive."""

def copy_part(
    src: npt.NDArray[np.int64],
    dst: npt.NDArray[np.int64],
    shape: Sequence[int],
    src_stride: Sequence[int],
    dst_stride: Sequence[int],
    run: int,
) -> Part:
    """Return a copy of `run` bytes at every index of every tile.

    Raises ValueError for more than 8 axes, negative sizes or lengths that differ.
    """

def convert_part(
    src: npt.NDArray[np.int64],
    dst: npt.NDArray[np.int64],
    shape: Sequence[int],
    src_stride: Sequence[int],
    dst_stride: Sequence[int],
    run: int,
    src_dtype: str,
    dst_dtype: str,
    src_step: int,
    dst_step: int,
    rule: str,
    row_axes: int,
    src_scale: npt.NDArray[np.int64] | None,
    src_scale_stride: Sequence[int],
    dst_scale: npt.NDArray[np.int64] | None,
    dst_scale_stride: Sequence[int],
    dynamic: bool,
    floor: float,
    pow2: bool,
    src_e8m0: bool,
    dst_e8m0: bool,
) -> Part:
    """Return a conversion of a row of `run` elements at every index of every tile; `src_e8m0`, `dst_e8m0`: scales of one byte.

    Raises ValueError as copy_part does, and for scales that cannot be computed.
    """

def run_together(parts: Sequence[Part], threads: int, total: int, isa: str) -> None:
    """Run parts that have the same number of tiles, tile by tile where they interleave.

    `total`: output bytes of the whole go, which decides on streaming. Raises ValueError, before anything is written, for
    unequal numbers of tiles and unknown ways to run.
    """

def digest_tiles(
    src: npt.NDArray[np.int64],
    dst: npt.NDArray[np.int64] | None,
    shape: Sequence[int],
    src_stride: Sequence[int],
    dst_stride: Sequence[int],
    run: int,
    keys: KeyOperands,
    words: npt.NDArray[np.uint32],
    threads: int,
    total: int,
    isa: str,
) -> int:
    """Copy as copy_part and run_together do (without `dst`: only read) and return the digest of the rows.

    Raises ValueError as they do, and for keys that do not fit the tiles.
    """

def memcpy(dst: int, src: int, nbytes: int, threads: int, streaming: bool) -> None:
    """Copy bytes between addresses with the C library's memcpy, or with our own streaming stores."""

def isa() -> str:
    """Return the instruction set that "auto" picks on this CPU: "avx2" or "portable"."""

class Fluid:
    """A network as a fluid; `regauge.sim.reference.Fluid` says what each call does.

    Numbers that are not known, and amounts that are negative or not finite, raise ValueError.
    """

    def add_port(self, rate: float) -> int:
        """Add a port of so many bytes per second; return its number."""

    def set_port(self, port: int, rate: float, now: float) -> float:
        """Change a port's rate; return the time of the next event."""

    def open(self, ports: Sequence[int], rank: int) -> int:
        """Begin a flow; return its number, which is given again once the flow is over."""

    def add(self, flow: int, size: float, over: bool, now: float) -> float:
        """Give a flow bytes at once."""

    def produce(self, flow: int, size: float, seconds: float, over: bool, now: float) -> float:
        """Have bytes become ready evenly."""

    def close(self, flow: int, now: float) -> tuple[float, float]:
        """End a flow; return the bytes that crossed, and the time of the next event."""

    def rerank(self, flow: int, rank: int, now: float) -> float:
        """Change a flow's rank."""

    def due(self, now: float) -> tuple[list[int], float]:
        """Let happen what is due; return the flows that are done."""

    def next(self) -> float:
        """Return the time of the next event."""

    def rate(self, flow: int) -> float:
        """Return a flow's rate."""

    def sent(self, flow: int, now: float) -> float:
        """Return the bytes of a flow that have crossed."""

    def ready(self, flow: int, now: float) -> float:
        """Return the bytes of a flow that are ready and have not crossed."""

    def carried(self, port: int, now: float) -> float:
        """Return the bytes that have crossed a port."""

    def backlog(self, port: int, now: float) -> float:
        """Return the bytes that are ready and wait for a port."""

    def used(self, port: int) -> float:
        """Return the sum of the rates over a port."""

"""Pieces: what a post is made of, checked against regions, merged, and cut to size. Pure and vectorised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from regauge.errors import BoundsError

Int64s = npt.NDArray[np.int64]


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered slab. `generation` is unique within its transport and grows with every registration."""

    name: str
    address: int
    """Virtual address in the process that owns it."""
    nbytes: int
    generation: int


class AddressTable:
    """Regions ordered by address, for vectorised look-up. Regions do not overlap; `owner` says whose they are."""

    def __init__(self, regions: Sequence[Region], owner: str) -> None:
        self.regions = tuple(sorted(regions, key=lambda region: region.address))
        self.owner = owner
        self._starts = np.array([region.address for region in self.regions], dtype=np.int64)
        self._ends = np.array([region.address + region.nbytes for region in self.regions], dtype=np.int64)

    def locate(self, addresses: Int64s, lengths: Int64s) -> Int64s:
        """Return the index of the region that wholly contains each piece, or -1. Lengths must not be negative."""
        index = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        if not self.regions:
            return index
        # addresses >= start >= 0 wherever it counts, so that neither difference can overflow.
        room = np.where(index >= 0, self._ends[index] - np.maximum(addresses, 0), -1)
        return np.where(lengths <= room, index, -1)


@dataclass(frozen=True)
class Chunk:
    """What a back end carries at once: pieces int64[N, 3] that all land in `region` of the peer."""

    region: Region
    pieces: Int64s
    nbytes: int
    grant: int = 0
    """What it is written under; see `Transport.allow`."""
    keep: tuple[npt.NDArray[np.uint8], ...] = field(default=(), repr=False)
    """Views of the local slabs: their memory stays mapped while a chunk waits or is being read."""


def check_pieces(pieces: Int64s, local: AddressTable, remote: AddressTable) -> tuple[Int64s, Int64s]:
    """Return the region index of every piece in `local` and in `remote`.

    `pieces` is int64[N, 3]: local address, remote address, length in bytes. Raises BoundsError naming the first
    piece that has a negative length or leaves its region, and for another shape or dtype. Pieces without bytes are
    fine anywhere, and get -1.
    """
    if not isinstance(pieces, np.ndarray) or pieces.dtype != np.int64 or pieces.ndim != 2 or pieces.shape[1] != 3:
        got = f"{pieces.dtype}{list(pieces.shape)}" if isinstance(pieces, np.ndarray) else type(pieces).__name__
        raise BoundsError(f"pieces must be int64[N, 3] (local address, remote address, length), not {got}")
    lengths = pieces[:, 2]
    if (bad := np.flatnonzero(lengths < 0)).size:
        raise BoundsError(f"piece {bad[0]}: negative length {lengths[bad[0]]}")
    found = []
    for side, table in ((0, local), (1, remote)):
        index = table.locate(pieces[:, side], lengths)
        if (bad := np.flatnonzero((index < 0) & (lengths > 0))).size:
            address, length = pieces[bad[0], side], lengths[bad[0]]
            raise BoundsError(
                f"piece {bad[0]}: {length} bytes at {address:#x} are not inside one {table.owner} region "
                f"({len(table.regions)} known); register the slab, or connect again for the present table"
            )
        found.append(index)
    return found[0], found[1]


def cut(pieces: Int64s, max_pieces: int, max_bytes: int) -> list[Int64s]:
    """Cut pieces, in order, into runs of at most `max_pieces` pieces and `max_bytes` bytes, all copies.

    Long pieces are split."""
    if (pieces[:, 2] > max_bytes).any():
        counts = -(-pieces[:, 2] // max_bytes)
        parts = np.repeat(pieces, counts, axis=0)
        offsets = (np.arange(len(parts)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_bytes
        parts[:, :2] += offsets[:, None]
        parts[:, 2] = np.minimum(parts[:, 2] - offsets, max_bytes)
        pieces = parts
    sums = np.cumsum(pieces[:, 2])
    runs, start, before = [], 0, 0
    while start < len(pieces):
        end = min(start + max_pieces, int(np.searchsorted(sums, before + max_bytes, side="right")))
        runs.append(pieces[start:end].copy())
        start, before = end, int(sums[end - 1])
    return runs

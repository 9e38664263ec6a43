"""What became of each request of a run: one row each, in columns. All times are SIMULATED, in seconds of the run's clock.

    at -> seated -> began -> computed -> landed -> first -> ended

A request that never got to a point has NaN there. Rows are in the order of the trace, without those that were served to warm up.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

COMPLETE: Final = 0
LIMITED: Final = 1
"""Told to come again later: 429, since it would have had its first token or its tokens too late, or too many were there."""
REFUSED: Final = 2
"""Refused otherwise: no worker, or none with room."""
FAILED: Final = 3

_KINDS: Final[tuple[tuple[str, type], ...]] = (
    ("at", np.float64), ("prompt", np.int64), ("cached", np.int64), ("output", np.int64), ("prefill", np.int16),
    ("decode", np.int16), ("seated", np.float64), ("began", np.float64), ("computed", np.float64),
    ("landed", np.float64), ("first", np.float64), ("ended", np.float64), ("nbytes", np.float64),
    ("attempts", np.int16), ("outcome", np.uint8),
)  # fmt: skip
COLUMNS: Final = tuple(name for name, _ in _KINDS)
_PACK = Struct(f"{1 + len(_KINDS)}d").pack


@dataclass(frozen=True, slots=True)
class Log:
    """Columns of equal length, one entry for each request."""

    at: NDArray[np.float64]
    """When it came."""
    prompt: NDArray[np.int64]
    """Tokens."""
    cached: NDArray[np.int64]
    """Of the prompt, where it was computed (last attempt)."""
    output: NDArray[np.int64]
    """Tokens asked for."""
    prefill: NDArray[np.int16]
    """Number of the worker that computed the prompt; -1: none, or decode itself."""
    decode: NDArray[np.int16]
    """Number of the worker that decoded; -1: none."""
    seated: NDArray[np.float64]
    """When decode had a slot and pages for it."""
    began: NDArray[np.float64]
    """When its prompt began to be computed,"""
    computed: NDArray[np.float64]
    """and when it was."""
    landed: NDArray[np.float64]
    """When the last byte of its KV was at decode."""
    first: NDArray[np.float64]
    """When the client had its first token."""
    ended: NDArray[np.float64]
    """When it was over, however."""
    nbytes: NDArray[np.float64]
    """KV bytes that crossed for it, all attempts."""
    attempts: NDArray[np.int16]
    outcome: NDArray[np.uint8]
    """COMPLETE, LIMITED, REFUSED or FAILED."""

    def __len__(self) -> int:
        return len(self.at)

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Mask of the requests that got all of their tokens."""
        mask: NDArray[np.bool_] = self.outcome == COMPLETE
        return mask

    def ttft(self) -> NDArray[np.float64]:
        """Return the times to the first token of complete requests, seconds."""
        mask = self.complete
        return self.first[mask] - self.at[mask]

    def tpot(self) -> NDArray[np.float64]:
        """Return the times per output token after the first, of complete requests with more than one, seconds."""
        mask = self.complete & (self.output > 1)
        return (self.ended[mask] - self.first[mask]) / (self.output[mask] - 1)


class Rows:
    """Collects rows in any order; 8 bytes a figure."""

    def __init__(self) -> None:
        self._figures = array("d")

    def __len__(self) -> int:
        return len(self._figures) // (1 + len(_KINDS))

    def add(self, row: Sequence[float]) -> None:
        """Take one request's row: its place, then its figures in the order of `COLUMNS`."""
        self._figures.frombytes(_PACK(*row))

    def log(self) -> Log:
        """Return all rows as columns, by place."""
        table = np.array(self._figures, dtype=np.float64).reshape(-1, 1 + len(_KINDS))
        table = table[np.argsort(table[:, 0], kind="stable")]
        return Log(*(table[:, 1 + i].astype(kind) for i, (_, kind) in enumerate(_KINDS)))

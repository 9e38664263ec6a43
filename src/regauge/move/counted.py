"""What counts of a leg, in bytes and as one digest: the chunks that decode has verified, each once. Both ends come to the same.

A chunk that was written again counts as it was taken; one that was written over a link which then broke counts if decode had verified it, and else not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from regauge.plan.digest import PRIME


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes on the wire, the sum of the chunks' digests, and how many they are. A leg's, a transfer's, and a worker's add up."""

    nbytes: int = 0
    sum: int = 0
    chunks: int = 0

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.nbytes + other.nbytes, (self.sum + other.sum) % PRIME, self.chunks + other.chunks)

    def chunk(self, nbytes: int, digest: bytes) -> Counted:
        """Return this and one chunk more, with its digest as it is on the wire."""
        return self + Counted(nbytes, int.from_bytes(digest, "little"), 1)

    @property
    def digest(self) -> str:
        """The sum in hex, 16 digits."""
        return f"{self.sum:016x}"


class Span(Protocol):
    """A chunk of either end."""

    pair: int
    layers: tuple[int, int]
    tokens: tuple[int, int]


S = TypeVar("S", bound=Span)


def within(chunk: Span, done: Sequence[Sequence[int]]) -> bool:
    """Say whether a chunk lies wholly before these tokens: per pair and layer."""
    return all(done[chunk.pair][layer] >= chunk.tokens[1] for layer in range(*chunk.layers))


def whole(chunks: Sequence[S], done: Sequence[list[int]]) -> list[S]:
    """Lower `done` until no chunk lies in it in part, and return those that do wholly.

    What a link that broke has brought is gone on from there, and a digest cannot be parted.
    """
    kept = list(chunks)
    while True:
        cut = [chunk for chunk in kept if not within(chunk, done)]
        if not cut:
            return kept
        for chunk in cut:
            for layer in range(*chunk.layers):
                done[chunk.pair][layer] = min(done[chunk.pair][layer], chunk.tokens[0])
        kept = [chunk for chunk in kept if within(chunk, done)]

"""What the workers of a simulated cluster keep, and how their memory looks. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from regauge.config import FlowConfig
from regauge.move import messages as m
from regauge.move.outleg import LinkTerms
from regauge.move.protocol import Part, Range

MAX_TOKENS = 64
CORRUPT = -1
"""The value of a cell that the network spoilt."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one kind of state, with page tables of their own."""

    kind: Literal["full", "window", "recurrent"]
    layers: tuple[int, ...]
    window: int = 0

    def live(self, tokens: Range, length: int) -> Range:
        """Return those of tokens [first, end) that the group needs, as `regauge.plan.planner.live` does."""
        first, end = tokens
        if self.kind == "recurrent":
            return (0, 1) if end == length else (0, 0)
        return (min(end, max(first, length - self.window)) if self.kind == "window" else first), end


@dataclass(frozen=True, slots=True)
class Placed:
    """One rank of a worker: a process of its own, that keeps some layers and heads."""

    name: str
    worker: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """Limits in seconds, as of `Sender` and `Receiver`."""

    offer: float = 30.0
    deadline: float = 40.0
    lease: float = 12.0
    resume: float = 8.0

    @property
    def bound(self) -> float:
        """A transfer is delivered or failed on a side that runs within so many seconds."""
        return self.offer + self.deadline


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster. All sizes in cells: one layer, token and head."""

    groups: tuple[Group, ...]
    prefill: tuple[Placed, ...]
    decode: tuple[Placed, ...]
    page: int = 4
    """Tokens."""
    heads: int = 2
    pages: int = 24
    """Of each pool."""
    slots: int = 2
    slot_cells: int = 12
    chunk_cells: int = 24
    depth: int = 2
    staged: tuple[str, ...] = ("full", "window", "recurrent")
    """Groups whose chunks go through staging slots."""
    flow: FlowConfig | None = None
    """Decode gives credit by these rules; None: everything granted may be written."""
    most_writes: int = 1 << 30
    """In flight over all links of a prefill rank."""
    echoes: int = 0
    """Messages of each direction of a link, the last ones, that may come again over the next link."""
    times: Times = Times()

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return sum(len(group.layers) for group in self.groups)

    def parts(self, p: Placed, d: Placed) -> tuple[Part, ...]:
        """What a link carries: of each group the layers that the prefill rank has, and the heads that both keep."""
        return tuple(
            Part(number, kept, group.live, len(self.shared(p, d)))
            for number, group in enumerate(self.groups)
            if (kept := tuple(layer for layer in group.layers if layer in p.layers))
        )

    def shared(self, p: Placed, d: Placed) -> tuple[int, ...]:
        """Heads that both ranks keep; there is a link only where some are."""
        return tuple(head for head in p.heads if head in d.heads)

    def terms(self, p: Placed, d: Placed) -> LinkTerms:
        """What a link carries at once."""
        parts, heads = self.parts(p, d), len(self.shared(p, d))
        staged = frozenset(i for i, part in enumerate(parts) if self.groups[part.group].kind in self.staged)
        return LinkTerms(
            parts, lambda _, tokens: tokens * heads, staged, self.slots, self.slot_cells, self.chunk_cells, self.depth
        )

    def value(self, job: int, layer: int, token: int, head: int) -> int:
        """What the engine writes for a transfer: every cell of every transfer is another number."""
        return 1 + ((job * self.layers + layer) * MAX_TOKENS + token) * self.heads + head

    def blank(self) -> list[list[int]]:
        """Return the memory of a process that has just started."""
        return [[0] * (self.layers * self.page * self.heads) for _ in range(self.pages)]

    def tables(self, tokens: int, first: int, *, all_tokens: bool) -> tuple[list[int], list[int]]:
        """Return the pages that each group needs, and the origin of its table."""
        counts, origins = [], []
        for group in self.groups:
            start, end = (
                (first, tokens) if all_tokens and group.kind == "window" else group.live((first, tokens), tokens)
            )
            counts.append(-(-(end - start) // self.page))
            origins.append(start)
        return counts, origins

    def places(
        self, table: m.Table, layers: Sequence[int], tokens: Range, heads: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield (page, index in the page) of each cell: layers outermost, then tokens, then heads."""
        for layer in layers:
            for token in range(*tokens):
                page, at = divmod(token - table.origin, self.page)
                index = (layer * self.page + at) * self.heads
                for head in heads:
                    yield table.pages[page], index + head


def digest(values: Sequence[int]) -> bytes:
    """Eight bytes that tell two lists of cells apart: the hash of a tuple of numbers is the same in every process."""
    return (hash(tuple(values)) & (2**64 - 1)).to_bytes(8, "little")

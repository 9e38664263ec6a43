"""What happened to the transfers of one end, and when: the newest events, bounded. What `regauge trace` draws for a worker.

Each event is an instant or took time, by CLOCK_MONOTONIC. Words of the protocol have the name of their message, at the end that sends and at the end that takes
them; docs/tracing.md lists the others.

Kept is a tuple an event, and made into structs for who asks: tracing is always on.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Final, Literal

import msgspec

from regauge.move import messages as m
from regauge.move.protocol import Check, Range

MOST_EVENTS: Final = 100_000
"""Of all transfers; then those that began first are given up, whole."""
MOST_OF_ONE: Final = 20_000
"""What comes after is counted."""
MAX_TEXT: Final = 500
"""Characters."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened to a transfer."""

    name: str
    begin_s: float
    end_s: float
    """As `begin_s`: an instant."""
    text: str = ""
    """Of words of the protocol, `sent` or `taken`, and of an abort why; else what went wrong, if anything did."""
    peer: str = ""
    epoch: int | None = None
    seq: int | None = None
    """Of a chunk, within its leg and epoch."""
    layers: Range | None = None
    """[first, end): of the model (`computed`), else positions in the part's."""
    tokens: Range | None = None
    nbytes: int | None = None
    """On the wire; of `want` and `credit`, what the epoch may have in all."""


class Trace(msgspec.Struct, frozen=True):
    """One transfer, as one rank of a worker has seen it."""

    transfer: str
    worker: str
    events: list[Event]
    more: int = 0
    """Events that are not kept."""


class Traces(msgspec.Struct, frozen=True):
    """What one process keeps of a transfer: nothing, where it does not know it (any more)."""

    clock_s: float
    """`time.monotonic()` now."""
    traces: list[Trace]

    @classmethod
    def of(cls, traces: list[Trace]) -> Traces:
        """Return it for now."""
        return cls(time.monotonic(), traces)


class Recorder:
    """Belongs to one event loop."""

    def __init__(self, most: int = MOST_EVENTS, most_of_one: int = MOST_OF_ONE) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._kept: OrderedDict[str, list[tuple[Any, ...]]] = OrderedDict()
        self._more: dict[str, int] = {}
        self._count = 0

    def note(
        self, transfer: str, name: str, begin: float, end: float | None = None, *more: object, text: str = ""
    ) -> None:
        """Keep an event; `more` is `Event`'s peer, epoch, seq, layers, tokens, nbytes, in this order."""
        events = self._kept.get(transfer)
        if events is None:
            events = self._kept[transfer] = []
        elif len(events) >= self._most_of_one:
            self._more[transfer] = self._more.get(transfer, 0) + 1
            return
        events.append((name, begin, begin if end is None else end, text[:MAX_TEXT], *more))
        self._count += 1
        while self._count > self._most and len(self._kept) > 1:
            oldest, events = self._kept.popitem(last=False)
            self._more.pop(oldest, None)
            self._count -= len(events)

    def word(self, peer: str, message: m.Message, way: Literal["sent", "taken"]) -> None:
        """Keep a word of the protocol that is of a transfer; leases that are renewed say nothing."""
        now = time.monotonic()
        match message:
            case m.Written(transfer, epoch, seq, _, layers, tokens, _, nbytes):
                self.note(transfer, "written", now, None, peer, epoch, seq, layers, tokens, nbytes, text=way)
            case m.Want(transfer, epoch, nbytes):
                self.note(transfer, "want", now, None, peer, epoch, None, None, None, nbytes, text=way)
            case m.Credit(transfer, epoch, nbytes):
                self.note(transfer, "credit", now, None, peer, epoch, None, None, None, nbytes, text=way)
            case m.Again(transfer, epoch, seq):
                self.note(transfer, "again", now, None, peer, epoch, seq, text=way)
            case m.Grant(transfer, epoch) | m.Finish(transfer, epoch):
                self.note(transfer, _tag(message), now, None, peer, epoch, text=way)
            case m.Offer(transfer) | m.Commit(transfer) | m.Fence(transfer) | m.Fenced(transfer):
                self.note(transfer, _tag(message), now, None, peer, text=way)
            case m.Abort(transfer, reason):
                self.note(transfer, "abort", now, None, peer, text=f"{way}: {reason}")

    def checked(self, chunk: Check, begun: float, text: str) -> None:
        """Keep that a chunk has been brought into place and compared, or why not."""
        where = chunk.peer, chunk.epoch, chunk.seq, chunk.layers, chunk.tokens
        self.note(chunk.transfer, "check", begun, time.monotonic(), *where, text=text)

    def of(self, transfer: str, worker: str) -> list[Trace]:
        """Return what is kept of a transfer, if anything is."""
        events = self._kept.get(transfer)
        if events is None:
            return []
        found = [Event(*fields) for fields in events]
        return [Trace(transfer, worker, found, self._more.get(transfer, 0))]


def _tag(message: msgspec.Struct) -> str:
    return str(message.__struct_config__.tag)

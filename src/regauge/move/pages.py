"""Who owns which page of a KV pool. No I/O, no time.

    FREE -> LEASED -> COMMITTED -> FREE
              |`----> QUARANTINED -> FREE
              `-----> CACHED ------> FREE

A leased page may be written by its owner's transfer. A quarantined page belongs to a transfer that failed while a write could
still land; it is freed only when the writer has been fenced. A committed page is read by the engine. A cached page belongs to nobody:
nothing writes it any more, and whoever keeps the cache (`engines/local/prefix.py`) knows who reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from regauge.errors import PoolExhausted, ProtocolError

State = Literal["leased", "committed", "quarantined"]


class Pages(Protocol):
    """What the transfer layer asks of whoever keeps pages: see `PagePool` and `LentPages`."""

    def owned(self, owner: str) -> list[int]:
        """Return an owner's pages, in order."""

    def commit(self, owner: str) -> None:
        """The pages are complete and verified."""

    def quarantine(self, owner: str) -> None:
        """The transfer failed, and a write may still land."""

    def release(self, owner: str) -> None:
        """Nothing is in flight to the owner's pages."""


class PagePool:
    """The pages of one pool. Not thread-safe: one event loop owns it."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))
        self._owned: dict[str, tuple[State, list[int]]] = {}
        self._cached: set[int] = set()

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of cached pages."""
        return len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def lease(self, owner: str, count: int) -> list[int]:
        """Take pages. Raises PoolExhausted, leaving all as it was, and ProtocolError for an owner that has pages."""
        if owner in self._owned:
            raise ProtocolError(f"{owner!r} owns pages already")
        if count > len(self._free):
            raise PoolExhausted(f"{count} pages are asked for, {len(self._free)} of {self.pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._owned[owner] = ("leased", taken)
        return list(taken)

    def commit(self, owner: str) -> None:
        """The pages are complete and verified: the engine may read them. Raises ProtocolError unless leased."""
        self._move(owner, "leased", "committed")

    def quarantine(self, owner: str) -> None:
        """The transfer failed, and a write may still land. Raises ProtocolError unless leased."""
        self._move(owner, "leased", "quarantined")

    def release(self, owner: str) -> None:
        """Free the pages of an owner of whom nothing is in flight. Raises ProtocolError for an unknown owner."""
        try:
            _, taken = self._owned.pop(owner)
        except KeyError:
            raise ProtocolError(f"{owner!r} owns no pages") from None
        self._free.extend(reversed(taken))

    def cache(self, owner: str, pages: Sequence[int]) -> None:
        """Take written pages from their owner for the cache; nothing may write them any more.

        Raises ProtocolError for pages that it does not own, or that a transfer may write still.
        """
        state, taken = self._owned.get(owner, ("leased", []))
        gone = set(pages)
        if state == "quarantined" or not gone <= set(taken) or len(gone) != len(pages):
            raise ProtocolError(f"{owner!r} owns no such pages that can be cached: {list(pages)}")
        self._owned[owner] = (state, [page for page in taken if page not in gone])
        self._cached |= gone

    def uncache(self, pages: Sequence[int]) -> None:
        """Free cached pages that nobody reads. Raises ProtocolError for others."""
        if len(set(pages)) != len(pages) or not self._cached.issuperset(pages):
            raise ProtocolError(f"not all of these pages are cached: {list(pages)}")
        self._cached.difference_update(pages)
        self._free.extend(reversed(pages))

    def owned(self, owner: str) -> list[int]:
        """Return an owner's pages, in order. Raises ProtocolError if it owns none."""
        if owner not in self._owned:
            raise ProtocolError(f"{owner!r} owns no pages")
        return list(self._owned[owner][1])

    def state(self, owner: str) -> State | None:
        """Return what an owner's pages are; None if it owns none."""
        entry = self._owned.get(owner)
        return entry[0] if entry else None

    def count(self, state: State) -> int:
        """Number of pages in a state."""
        return sum(len(taken) for s, taken in self._owned.values() if s == state)

    def check_integrity(self) -> None:
        """Raise ProtocolError if a page is lost or owned twice."""
        everything = sorted([*self._free, *self._cached, *(p for _, taken in self._owned.values() for p in taken)])
        if everything != list(range(self.pages)):
            raise ProtocolError(
                f"{self.pages} pages, but {len(everything)} are accounted for, {len(set(everything))} of them once"
            )

    def _move(self, owner: str, old: State, new: State) -> None:
        entry = self._owned.get(owner)
        if entry is None or entry[0] != old:
            raise ProtocolError(f"pages of {owner!r} are {entry[0] if entry else 'free'}, not {old}")
        self._owned[owner] = (new, entry[1])


class LentPages:
    """Pages that an engine allocates by itself and lends to transfers, for one of its groups. Not thread-safe: one event loop owns it.

    The engine must not use lent pages otherwise until they are committed or returned.
    """

    def __init__(self) -> None:
        self._lent: dict[str, tuple[State, list[int]]] = {}

    def lend(self, owner: str, pages: Sequence[int]) -> None:
        """Lend pages to a transfer. Raises ProtocolError for an owner that has pages."""
        if owner in self._lent:
            raise ProtocolError(f"{owner!r} owns pages already")
        self._lent[owner] = ("leased", list(pages))

    def __contains__(self, owner: str) -> bool:
        return owner in self._lent

    def owned(self, owner: str) -> list[int]:
        """Return an owner's pages, in order. Raises ProtocolError if it owns none."""
        if owner not in self._lent:
            raise ProtocolError(f"{owner!r} owns no pages")
        return list(self._lent[owner][1])

    def commit(self, owner: str) -> None:
        """The pages are complete and verified, and the engine's again."""
        del self._lent[owner]

    def quarantine(self, owner: str) -> None:
        """The transfer failed, and a write may still land."""
        self._lent[owner] = ("quarantined", self._lent[owner][1])

    def release(self, owner: str) -> None:
        """Nothing is in flight to them: they are the engine's again."""
        del self._lent[owner]

    def count(self, state: State) -> int:
        """Number of pages in a state."""
        return sum(len(pages) for s, pages in self._lent.values() if s == state)

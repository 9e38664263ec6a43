"""Which worker has which blocks of prompts in its prefix cache: told by its events, or assumed from what was sent there.

An index that is wrong without saying so turns routing by cache into routing by load alone (NVIDIA/TensorRT-LLM#14882). So each worker's
part of it is *stale* as soon as an event is missing, or nothing was heard for a while; that is counted, and routes say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from regauge.blocks import CacheEvent, Cleared, Removed, Stored

FIRST_SEQ = 1
"""A stream of events begins with this number at most, or with `Cleared`; otherwise something was missed."""


@dataclass(slots=True)
class Cache:
    """What is known of one worker's prefix cache."""

    bit: int
    capacity: int
    """Blocks; of assumed caches, the least recently used ones beyond go."""
    joined: float
    held: dict[int, None] = field(default_factory=dict)
    seq: int | None = None
    """Newest event; None: it has given none."""
    newest: int | None = None
    """Newest event that the worker says it has made."""
    heard: float = 0.0
    behind_since: float | None = None
    gap: str = ""
    """What is missing; empty: nothing."""
    gaps: int = 0

    @property
    def told(self) -> bool:
        """Whether the worker gives events; if not, its cache is assumed."""
        return self.seq is not None or self.newest is not None


class PrefixIndex:
    """Blocks of all workers. At most `limit` are remembered, over all: a worker's oldest make room for its new ones."""

    def __init__(self, limit: int, stale_s: float) -> None:
        self.dropped = 0
        """Blocks that were forgotten for want of room."""
        self.stale_seen = 0
        """Times that a worker's part became stale by a gap."""
        self._limit = limit
        self._stale_s = stale_s
        self._where: dict[int, int] = {}
        self._caches: dict[str, Cache] = {}
        self._names: dict[int, str] = {}
        self._all = 0
        self._total = 0

    def __len__(self) -> int:
        return self._total

    @property
    def hashes(self) -> int:
        """Different blocks known; 0 once every worker has left."""
        return len(self._where)

    def join(self, name: str, capacity: int, now: float) -> None:
        """Know a worker; `capacity` in blocks counts while it gives no events. Of a known worker all is forgotten."""
        self.leave(name)
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._names[bit] = name
        self._all |= bit
        self._caches[name] = Cache(bit, capacity, now, heard=now)

    def leave(self, name: str) -> None:
        """Forget a worker, if it is known."""
        cache = self._caches.pop(name, None)
        if cache is not None:
            self._clear(cache)
            del self._names[cache.bit]
            self._all &= ~cache.bit

    def resize(self, name: str, capacity: int) -> None:
        """Set what an assumed cache holds, in blocks."""
        cache = self._caches[name]
        cache.capacity = capacity
        self._trim(cache)

    def event(self, name: str, event: CacheEvent, now: float) -> None:
        """Take a worker's event. One that was seen already changes nothing; one too many ahead makes the worker stale."""
        cache = self._caches[name]
        cache.heard = now
        if not cache.told:
            self._clear(cache)  # what was assumed is no part of what is told
        if isinstance(event, Cleared):
            # A worker that began anew counts from the start again: this is taken whatever its number.
            self._clear(cache)
            cache.gap, cache.seq = "", event.seq
        elif cache.seq is not None and event.seq <= cache.seq:
            return
        else:
            expected = FIRST_SEQ if cache.seq is None else cache.seq + 1
            if event.seq > expected and not cache.gap:
                cache.gap = f"events {expected} to {event.seq - 1} are missing"
                cache.gaps += 1
                self.stale_seen += 1
            cache.seq = event.seq
            if isinstance(event, Stored):
                self._store(cache, event.hashes)
            elif isinstance(event, Removed):
                self._remove(cache, event.hashes)
        self._behind(cache, now)

    def heard(self, name: str, newest: int | None, now: float) -> None:
        """Take a worker's sign of life, with the number of its newest event; None: it gives no events."""
        cache = self._caches[name]
        if newest is None:
            return
        if not cache.told:
            self._clear(cache)
        cache.heard, cache.newest = now, newest
        self._behind(cache, now)

    def assume(self, name: str, blocks: Sequence[int]) -> None:
        """Take it that a prompt's blocks are cached from now on where it was sent, unless that worker tells by events."""
        cache = self._caches[name]
        if cache.told:
            return
        where, held, bit = self._where, cache.held, cache.bit
        for block in reversed(blocks):  # the prompt's beginning is the newest, so that its end goes first
            if block in held:
                del held[block]
            else:
                where[block] = where.get(block, 0) | bit
                self._total += 1
            held[block] = None
        self._fit(cache)
        self._trim(cache)

    def overlap(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return how many blocks, from the first one on without a gap, each worker has; workers with none are left out."""
        matched: dict[str, int] = {}
        alive, where, at = self._all, self._where, 0
        for at, block in enumerate(blocks):
            have = where.get(block, 0) & alive
            if have != alive:
                if at:
                    self._note(alive ^ have, at, matched)
                alive = have
                if not alive:
                    return matched
        if blocks:
            self._note(alive, at + 1, matched)
        return matched

    def stale(self, name: str, now: float) -> str:
        """Return why a worker's part cannot be relied on; empty: it can."""
        cache = self._caches[name]
        if not cache.told:
            return ""
        if cache.gap:
            return cache.gap
        if now - cache.heard > self._stale_s:
            return f"not heard of for {now - cache.heard:.1f} s"
        if cache.behind_since is not None and now - cache.behind_since > self._stale_s:
            return f"behind its events for {now - cache.behind_since:.1f} s"
        return ""

    def assumed(self, name: str) -> bool:
        """Whether the worker gives no events, so that its cache is guessed at."""
        return not self._caches[name].told

    def blocks(self, name: str) -> set[int]:
        """Return a worker's blocks, for inspection."""
        return set(self._caches[name].held)

    def _behind(self, cache: Cache, now: float) -> None:
        if cache.newest is None or (cache.seq or 0) >= cache.newest:
            cache.behind_since = None
        elif cache.behind_since is None:
            cache.behind_since = now

    def _note(self, mask: int, count: int, matched: dict[str, int]) -> None:
        while mask:
            bit = mask & -mask
            matched[self._names[bit]] = count
            mask ^= bit

    def _store(self, cache: Cache, hashes: Sequence[int]) -> None:
        where, held, bit = self._where, cache.held, cache.bit
        for block in hashes:
            mask = where.get(block, 0)
            if not mask & bit:
                where[block] = mask | bit
                self._total += 1
            held[block] = None
        self._fit(cache)

    def _fit(self, cache: Cache) -> None:
        while self._total > self._limit and cache.held:
            self._drop(cache, next(iter(cache.held)))
            self.dropped += 1

    def _remove(self, cache: Cache, hashes: Sequence[int]) -> None:
        for block in hashes:
            if block in cache.held:
                self._drop(cache, block)

    def _trim(self, cache: Cache) -> None:
        while not cache.told and len(cache.held) > cache.capacity:
            self._drop(cache, next(iter(cache.held)))

    def _drop(self, cache: Cache, block: int) -> None:
        del cache.held[block]
        left = self._where[block] & ~cache.bit
        if left:
            self._where[block] = left
        else:
            del self._where[block]
        self._total -= 1

    def _clear(self, cache: Cache) -> None:
        for block in list(cache.held):
            self._drop(cache, block)

"""Which worker has which blocks of prompts in its prefix cache: told by its events, or assumed from what was sent there.

An index that is wrong without saying so turns routing by cache into routing by load alone (NVIDIA/TensorRT-LLM#14882). So each worker's
part of it is *stale* as soon as an event is missing, or nothing was heard for a while; that is counted, and routes say it.

Workers are bits: a block's holders are one number, and those that have a whole prefix the `&` of its blocks' numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Final, cast

from regauge.blocks import CacheEvent, Cleared, Removed, Stored

FIRST_SEQ = 1
"""A stream of events begins with this number at most, or with `Cleared`; otherwise something was missed."""
OLDEST: Final = 1024
"""Blocks whose order is looked up at once when the oldest have to go: a dict's first key is found by stepping over all that were deleted before it."""
MOST_SETS: Final = 4096
"""Sets of workers whose names are kept."""


@dataclass(slots=True)
class Cache:
    """What is known of one worker's prefix cache."""

    bit: int
    capacity: int
    """Blocks; of assumed caches, the least recently used ones beyond go."""
    joined: float
    held: dict[Hashable, None] = field(default_factory=dict)
    seq: int | None = None
    """Newest event; None: it has given none."""
    newest: int | None = None
    """Newest event that the worker says it has made."""
    heard: float = 0.0
    behind_since: float | None = None
    gap: str = ""
    """What is missing; empty: nothing."""
    gaps: int = 0
    oldest: dict[Hashable, None] = field(default_factory=dict)
    """Some of the oldest blocks, the oldest one last."""

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
        self._where: dict[Hashable, int] = {}  # an `int` would be unpacked and packed again at each block
        self._caches: dict[str, Cache] = {}
        self._names: dict[int, str] = {}
        self._sets: dict[int, tuple[str, ...]] = {}
        self._all = 0
        self._total = 0
        self._assumed = 0
        """Workers that give no events."""
        self._gapped = 0
        """Workers of which events are missing."""
        self._late = 0
        """Workers that were stale for want of news when that was looked at last."""
        self._until = inf
        """Before that time no other worker becomes stale for want of news."""

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
        self._sets.clear()
        self._all |= bit
        self._assumed |= bit
        self._caches[name] = Cache(bit, capacity, now, heard=now)

    def leave(self, name: str) -> None:
        """Forget a worker, if it is known."""
        cache = self._caches.pop(name, None)
        if cache is not None:
            self._clear(cache)
            del self._names[cache.bit]
            self._sets.clear()
            others = self._all = self._all & ~cache.bit
            self._assumed &= others
            self._gapped &= others
            self._late &= others

    def resize(self, name: str, capacity: int) -> None:
        """Set what an assumed cache holds, in blocks."""
        cache = self._caches[name]
        cache.capacity = capacity
        self._trim(cache)

    def event(self, name: str, event: CacheEvent, now: float) -> None:
        """Take a worker's event. One that was seen already changes nothing; one too many ahead makes the worker stale."""
        cache = self._caches[name]
        self._hear(cache, now)
        if isinstance(event, Cleared):
            # A worker that began anew counts from the start again: this is taken whatever its number.
            self._clear(cache)
            cache.gap, cache.seq = "", event.seq
            self._gapped &= ~cache.bit
        elif cache.seq is not None and event.seq <= cache.seq:
            return
        else:
            expected = FIRST_SEQ if cache.seq is None else cache.seq + 1
            if event.seq > expected and not cache.gap:
                cache.gap = f"events {expected} to {event.seq - 1} are missing"
                cache.gaps += 1
                self.stale_seen += 1
                self._gapped |= cache.bit
            cache.seq = event.seq
            if isinstance(event, Stored):
                self._store(cache, event.hashes)
            elif isinstance(event, Removed):
                self._remove(cache, event.hashes)
        self._behind(cache, now)

    def heard(self, name: str, newest: int | None, now: float) -> None:
        """Take a worker's sign of life, with the number of its newest event; None: it gives no events."""
        if newest is None:
            return
        cache = self._caches[name]
        self._hear(cache, now)
        cache.newest = newest
        self._behind(cache, now)

    def assume(self, name: str, blocks: Sequence[int]) -> None:
        """Take it that a prompt's blocks are cached from now on where it was sent, unless that worker tells by events."""
        cache = self._caches[name]
        if cache.told:
            return
        where, held, bit = self._where, cache.held, cache.bit
        oldest = cache.oldest
        for block in reversed(blocks):  # the prompt's beginning is the newest, so that its end goes first
            if block in held:
                del held[block]
                oldest.pop(block, None)
            else:
                mask = where.get(block)
                where[block] = bit if mask is None else mask | bit
                self._total += 1
            held[block] = None
        if self._total > self._limit:
            self._fit(cache)
        self._trim(cache)

    def matches(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return which workers (bits) have how many of the blocks, from the first one on without a gap: the fewest first, those with none left out."""
        found = []
        alive, where, count = self._all, self._where, 0
        names: Sequence[Hashable] = blocks
        for block in names:
            have = where.get(block, 0) & alive
            if have != alive:
                if count:
                    found.append((alive ^ have, count))
                if not have:
                    return found
                alive = have
            count += 1
        if count and alive:
            found.append((alive, count))
        return found

    def names(self, workers: int) -> tuple[str, ...]:
        """Return the names of a set of workers, given as bits."""
        names = self._sets.get(workers)
        if names is None:
            found, rest = [], workers
            while rest:
                bit = rest & -rest
                found.append(self._names[bit])
                rest ^= bit
            if len(self._sets) >= MOST_SETS:
                self._sets.clear()
            names = self._sets[workers] = tuple(found)
        return names

    def overlap(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return how many blocks, from the first one on without a gap, each worker has; workers with none are left out."""
        return {name: count for workers, count in self.matches(blocks) for name in self.names(workers)}

    def doubtful(self, now: float) -> int:
        """Return the workers, as bits, whose caches are guessed at or stale: `assumed` and `stale` say which. No other one's is either."""
        if now > self._until:
            self._look(now)
        return self._assumed | self._gapped | self._late

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
        return cast("set[int]", set(self._caches[name].held))

    def _hear(self, cache: Cache, now: float) -> None:
        bit = cache.bit
        if self._assumed & bit:
            self._clear(cache)  # what was assumed is no part of what is told
            self._assumed ^= bit
        cache.heard = now
        if self._late & bit:
            self._until = -inf
        elif now + self._stale_s < self._until:
            self._until = now + self._stale_s

    def _look(self, now: float) -> None:
        """Find who is stale for want of news, and until when nobody else is."""
        self._late, self._until = 0, inf
        for cache in self._caches.values():
            if not cache.told:
                continue
            since = cache.heard if cache.behind_since is None else min(cache.heard, cache.behind_since)
            if now - since >= self._stale_s:
                self._late |= cache.bit
            else:
                self._until = min(self._until, since + self._stale_s)

    def _behind(self, cache: Cache, now: float) -> None:
        if cache.newest is None or (cache.seq or 0) >= cache.newest:
            cache.behind_since = None
        elif cache.behind_since is None:
            cache.behind_since = now

    def _store(self, cache: Cache, hashes: Sequence[Hashable]) -> None:
        where, held, bit = self._where, cache.held, cache.bit
        before = len(held)
        for block in hashes:
            mask = where.get(block)
            where[block] = bit if mask is None else mask | bit
            held[block] = None
        self._total += len(held) - before
        if self._total > self._limit:
            self._fit(cache)

    def _fit(self, cache: Cache) -> None:
        while self._total > self._limit and cache.held:
            self._drop_oldest(cache)
            self.dropped += 1

    def _remove(self, cache: Cache, hashes: Sequence[Hashable]) -> None:
        where, held, bit, before = self._where, cache.held, cache.bit, len(cache.held)
        for block in hashes:
            if block in held:
                del held[block]
                left = where[block] ^ bit
                if left:
                    where[block] = left
                else:
                    del where[block]
        self._total -= before - len(held)
        if cache.oldest:
            for block in hashes:
                cache.oldest.pop(block, None)

    def _trim(self, cache: Cache) -> None:
        while not cache.told and len(cache.held) > cache.capacity:
            self._drop_oldest(cache)

    def _drop_oldest(self, cache: Cache) -> None:
        if not cache.oldest:
            cache.oldest = dict.fromkeys(reversed(list(islice(cache.held, OLDEST))))
        self._remove(cache, (cache.oldest.popitem()[0],))

    def _clear(self, cache: Cache) -> None:
        self._remove(cache, list(cache.held))
        cache.held, cache.oldest = {}, {}

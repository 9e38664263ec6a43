"""The prefix cache: whole pages of prompts that have been computed stay in the pool, and later prompts that begin alike start after them.

Kept are *units*: as many tokens as whole pages and whole blocks (`blocks.py`) share, each after the one before it in its prompt. They are found by
their hash, and taken only if the tokens agree, so that a hash that somebody has forged gives nobody another's KV. A unit is pinned while a request
or a transfer reads it; the others are given up, least recently used first, whenever a lease needs their pages.

Pure and not thread-safe: one event loop owns it, together with its pool.
"""

from __future__ import annotations

import array
import math
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from regauge.blocks import BLOCK_TOKENS, CacheEvent, CacheNews, Cleared, Removed, Stored, hash_blocks
from regauge.errors import EngineError, ProtocolError
from regauge.move.pages import PagePool

KEPT_EVENTS: Final = 4_096
KEPT_HASHES: Final = 1 << 17
"""Bounds what is remembered for `news`; whoever asks later than that starts anew."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, as `PrefixCache.prompt` makes them ready for the cache."""

    tokens: array.array[int] = field(repr=False)
    hashes: tuple[int, ...]
    """Of its whole blocks."""
    salt: bytes


@dataclass(frozen=True, slots=True)
class Leased:
    """The pages of a request, in order: the first `cached` tokens are in them already, and must not be written."""

    pages: list[int]
    cached: int


@dataclass(eq=False, slots=True)
class _Unit:
    parent: _Unit | None
    salt: bytes
    tokens: array.array[int]
    hashes: tuple[int, ...]
    pages: list[int]
    pins: int = 0

    @property
    def key(self) -> int:
        return self.hashes[-1]


@dataclass(eq=False, slots=True)
class _Held:
    chain: list[_Unit]
    """Pinned, from the prompt's first unit on."""
    pages: list[int]


class PrefixCache:
    """The cache of one pool. A pool whose cache is not `enabled` leases as ever, and keeps nothing."""

    def __init__(self, pool: PagePool, *, block: int = BLOCK_TOKENS, enabled: bool = True) -> None:
        self.block = block
        self.enabled = enabled
        self.events = EventLog()
        self._pool = pool
        self._unit = math.lcm(pool.page_size, block)
        self._units: dict[int, _Unit] = {}
        self._idle: OrderedDict[int, _Unit] = OrderedDict()
        """Units that nobody reads, least recently used first. A unit comes before its parent, so that the first one has no children."""
        self._held: dict[str, _Held] = {}
        self._blocks: Counter[int] = Counter()
        """Units that a block is part of: units of several blocks may begin alike."""

    @property
    def available(self) -> int:
        """Number of pages that a lease could get now: those that are free, and those of units that nobody reads."""
        return self._pool.free + len(self._idle) * (self._unit // self._pool.page_size)

    def prompt(self, token_ids: Sequence[int], salt: bytes = b"") -> Prompt:
        """Make a prompt ready; prompts of unlike `salt` share nothing. Raises EngineError for what is no token."""
        try:
            return Prompt(array.array("I", token_ids), hash_blocks(token_ids, self.block, salt), salt)
        except (OverflowError, TypeError, ValueError) as error:
            raise EngineError("token ids must be whole numbers from 0 to 2**32 - 1") from error

    def lease(self, owner: str, count: int, prompt: Prompt | None = None) -> Leased | None:
        """Take `count` pages for a request, of which as many as can be hold its prompt's beginning already; None: there are too few now.

        At least the prompt's last token is left to compute. Raises ProtocolError for an owner that has pages.
        """
        if owner in self._held or self._pool.state(owner) is not None:
            raise ProtocolError(f"{owner!r} owns pages already")
        chain = [] if prompt is None else self._match(prompt, (len(prompt.tokens) - 1) // self._unit)
        shared = [page for unit in chain for page in unit.pages]
        _pin(self._idle, chain)
        if count - len(shared) > self.available:
            self._unpin(chain)
            return None
        self._make_room(count - len(shared))
        pages = shared + self._pool.lease(owner, count - len(shared))
        if prompt is not None:
            self._held[owner] = _Held(chain, pages)
        return Leased(pages, len(chain) * self._unit)

    def keep(self, owner: str, prompt: Prompt, written: int) -> None:
        """The first `written` tokens of a prompt are in its owner's pages, and nothing will write them again: later prompts may share their units.

        The owner goes on reading them until `release`. A prompt that has grown since the lease, by its answer, is kept likewise; of a request
        that was leased pages without a prompt nothing is kept.
        """
        held = self._held.get(owner)
        if held is None or not self.enabled:
            return
        step, fresh = self._unit // self._pool.page_size, list[_Unit]()
        for i in range(len(held.chain), min(written, len(prompt.tokens)) // self._unit):
            parent = held.chain[-1] if held.chain else None
            unit = self._unit_of(prompt, i, parent, held.pages[i * step : (i + 1) * step])
            known = self._units.get(unit.key)
            if known is None:
                self._pool.cache(owner, unit.pages)
                self._units[unit.key] = known = unit
                fresh.append(unit)
            elif not _same(known, unit):
                break  # another prefix has this hash; what follows could not be found
            _pin(self._idle, (known,))
            held.chain.append(known)
        if fresh:
            self.events.stored(self._gained(fresh))

    def release(self, owner: str) -> None:
        """Neither the engine nor a transfer touches a request's pages any more: those that are not kept are free.

        A request that was leased pages without a prompt may also be released at the pool.
        """
        held = self._held.pop(owner, None)
        if held is not None:
            self._unpin(held.chain)
        if self._pool.state(owner) is not None:
            self._pool.release(owner)

    def clear(self) -> None:
        """Give up all units that nobody reads."""
        if len(self._idle) < len(self._units):
            self._make_room(self.available)
        elif self._idle:
            self._pool.uncache([page for unit in self._idle.values() for page in unit.pages])
            self._units.clear()
            self._idle.clear()
            self._blocks.clear()
            self.events.cleared()

    def news(self, since: int, instance: str) -> CacheNews:
        """Return what has happened after event `since` of the process `instance`."""
        events = self.events.after(since, instance)
        if events is None:
            return CacheNews(self.events.instance, self.block, self.events.seq, anew=True, held=tuple(self._blocks))
        return CacheNews(self.events.instance, self.block, self.events.seq, anew=False, events=events)

    def _match(self, prompt: Prompt, most: int) -> list[_Unit]:
        """Return the longest known beginning of a prompt, at most so many units."""
        chain: list[_Unit] = []
        for i in range(most if self.enabled else 0):
            wanted = self._unit_of(prompt, i, chain[-1] if chain else None, [])
            known = self._units.get(wanted.key)
            if known is None or not _same(known, wanted):
                break
            chain.append(known)
        return chain

    def _unit_of(self, prompt: Prompt, index: int, parent: _Unit | None, pages: list[int]) -> _Unit:
        size, step = self._unit, self._unit // self.block
        tokens = prompt.tokens[index * size : (index + 1) * size]
        return _Unit(parent, prompt.salt, tokens, prompt.hashes[index * step : (index + 1) * step], pages)

    def _unpin(self, chain: Sequence[_Unit]) -> None:
        for unit in reversed(chain):  # so that a unit comes before its parent
            unit.pins -= 1
            if unit.pins == 0:
                self._idle[unit.key] = unit

    def _make_room(self, pages: int) -> None:
        """Give up units until so many pages are free."""
        gone: list[int] = []
        while self._pool.free < pages:
            _, unit = self._idle.popitem(last=False)
            del self._units[unit.key]
            self._pool.uncache(unit.pages)
            self._blocks.subtract(unit.hashes)
            gone += [h for h in unit.hashes if self._blocks[h] == 0]
        for block in gone:
            del self._blocks[block]
        if gone:
            self.events.removed(gone)

    def _gained(self, units: Iterable[_Unit]) -> list[int]:
        gained = []
        for block in (h for unit in units for h in unit.hashes):
            self._blocks[block] += 1
            if self._blocks[block] == 1:
                gained.append(block)
        return gained


def _same(known: _Unit, other: _Unit) -> bool:
    return known.parent is other.parent and known.salt == other.salt and known.tokens == other.tokens


def _pin(idle: OrderedDict[int, _Unit], units: Iterable[_Unit]) -> None:
    for unit in units:
        unit.pins += 1
        idle.pop(unit.key, None)


class EventLog:
    """The latest events of one cache, numbered from 1."""

    def __init__(self, most_events: int = KEPT_EVENTS, most_hashes: int = KEPT_HASHES) -> None:
        self.instance = secrets.token_hex(8)
        """Of this process, since whose start the events are counted."""
        self.seq = 0
        self._most = most_events, most_hashes
        self._events: deque[CacheEvent] = deque()
        self._hashes = 0

    def stored(self, hashes: Iterable[int]) -> None:
        """The cache has gained these blocks."""
        self._add(Stored(self.seq + 1, tuple(hashes)))

    def removed(self, hashes: Iterable[int]) -> None:
        """The cache has lost these blocks."""
        self._add(Removed(self.seq + 1, tuple(hashes)))

    def cleared(self) -> None:
        """The cache has lost all blocks."""
        self._add(Cleared(self.seq + 1))

    def after(self, since: int, instance: str) -> tuple[CacheEvent, ...] | None:
        """Return the events after number `since`; None: they are not all here."""
        if instance != self.instance or not self.seq - len(self._events) <= since <= self.seq:
            return None
        return tuple(self._events[i] for i in range(len(self._events) - (self.seq - since), len(self._events)))

    def _add(self, event: CacheEvent) -> None:
        self.seq += 1
        self._events.append(event)
        self._hashes += _size(event)
        while len(self._events) > self._most[0] or self._hashes > self._most[1]:
            self._hashes -= _size(self._events.popleft())


def _size(event: CacheEvent) -> int:
    return 0 if isinstance(event, Cleared) else len(event.hashes)

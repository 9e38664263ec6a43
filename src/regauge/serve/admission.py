"""Leases pages to requests in order of arrival: a request that needs many is not overtaken for ever by small ones."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from regauge.engines.local.prefix import Leased, PrefixCache, Prompt
from regauge.errors import RegaugeError


@dataclass(eq=False)
class _Waiting:
    owner: str
    count: int
    prompt: Prompt | None
    future: asyncio.Future[Leased] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """A first-come first-served queue in front of a page pool and its cache. Belongs to one event loop."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._queue: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for pages."""
        return len(self._queue)

    async def lease(self, owner: str, count: int, prompt: Prompt | None = None) -> Leased:
        """Wait for so many pages, and take them; with a prompt, as many of them as can be hold its beginning already.

        A caller that is cancelled has none. Raises as `PrefixCache.lease`.
        """
        entry = _Waiting(owner, count, prompt)
        self._queue.append(entry)
        self.pump()
        try:
            return await entry.future
        except asyncio.CancelledError:
            if entry.future.done() and not entry.future.cancelled():
                self._cache.release(owner)
            elif entry in self._queue:
                self._queue.remove(entry)
            self.pump()
            raise

    def release(self, owner: str) -> None:
        """Neither the engine nor a transfer touches a request's pages any more: they are free, or stay in the cache."""
        self._cache.release(owner)
        self.pump()

    def pump(self) -> None:
        """Serve the queue's head for as long as its pages can be had. Call this when pages have been released otherwise."""
        while self._queue:
            entry = self._queue[0]
            try:
                leased = None if entry.future.done() else self._cache.lease(entry.owner, entry.count, entry.prompt)
            except RegaugeError as error:  # its own fault, and not that of whoever calls
                self._queue.popleft()
                entry.future.set_exception(error)
                continue
            if leased is not None:
                entry.future.set_result(leased)
            elif not entry.future.done():
                return
            self._queue.popleft()

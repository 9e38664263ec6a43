"""Leases pages to requests in order of arrival: a request that needs many is not overtaken for ever by small ones."""

from __future__ import annotations

import asyncio
from collections import deque

from regauge.errors import RegaugeError
from regauge.move.pages import PagePool


class Admission:
    """A first-come first-served queue in front of a page pool. Belongs to one event loop."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._queue: deque[tuple[str, int, asyncio.Future[list[int]]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait for pages."""
        return len(self._queue)

    async def lease(self, owner: str, count: int) -> list[int]:
        """Wait for so many pages, and take them. A caller that is cancelled has none. Raises as `PagePool.lease`."""
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        entry = (owner, count, future)
        self._queue.append(entry)
        self.pump()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._pool.release(owner)
            elif entry in self._queue:
                self._queue.remove(entry)
            self.pump()
            raise

    def pump(self) -> None:
        """Serve the queue's head for as long as its pages are free. Call this when pages have been released."""
        while self._queue and self._queue[0][1] <= self._pool.free:
            owner, count, future = self._queue.popleft()
            if future.done():
                continue
            try:
                future.set_result(self._pool.lease(owner, count))
            except RegaugeError as error:  # its own fault, and not that of whoever calls
                future.set_exception(error)

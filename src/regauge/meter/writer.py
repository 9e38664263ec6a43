"""One thread that writes receipts in batches, so that a request never waits for a disk; and what a worker keeps of its own to be asked for."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from typing import Final

from regauge.errors import StoreError
from regauge.meter.receipt import Side, Verified
from regauge.meter.store import Store

RETRY_S: Final = 0.5
"""Seconds until a batch that could not be written is tried again, in a store that is opened anew."""


class Writer:
    """Batches for a store. `put` from any thread; the store is opened, used and closed by the thread of the writer.

    A process that is killed loses at most what `put` took since the last commit: of about `batch_s` seconds, and `queue_limit` receipts.
    A store that fails is opened again and again, and the batch written again: that it was written before changes nothing.
    """

    def __init__(self, url: str, *, batch_s: float = 0.05, batch_limit: int = 500, queue_limit: int = 10_000) -> None:
        """Open the store once, so that a wrong name is told at once. Raises StoreError, ConfigError."""
        Store(url).close()
        self._url = url
        self._batch_s, self._batch_limit, self._queue_limit = batch_s, batch_limit, queue_limit
        self._changed = threading.Condition()
        self._queue: deque[tuple[Verified, int]] = deque()
        self._taken = self._durable = self._wanted = 0
        self._closing = False
        self._given_up = threading.Event()
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="regauge-meter", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str:
        """Why the store takes nothing just now; empty: it does."""
        return self._error

    @property
    def waiting(self) -> int:
        """Receipts that are not durable yet."""
        return self._taken - self._durable

    def put(self, signed: Verified, received_us: int | None = None) -> None:
        """Take a receipt (`received_us`: now) without waiting.

        Raises StoreError: too many wait, since the store is slow or fails (`error`); or the writer is closed. Nothing was taken.
        """
        item = (signed, time.time_ns() // 1_000 if received_us is None else received_us)
        with self._changed:
            if self._closing:
                raise StoreError("the meter is closed")
            if self.waiting >= self._queue_limit:
                raise StoreError(f"{self.waiting} receipts wait: {self._error or 'the store is slow'}")
            self._queue.append(item)
            self._taken += 1
            self._changed.notify_all()

    def flush(self, limit_s: float = 30.0) -> None:
        """Have all that was taken written, and wait until it is durable. Raises StoreError: it is not, in time."""
        with self._changed:
            goal = self._wanted = self._taken
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._durable >= goal, limit_s):
                left = goal - self._durable
                raise StoreError(f"{left} receipts are not durable: {self._error or 'the store is slow'}")

    def close(self, limit_s: float = 30.0) -> None:
        """Write what was taken, and end. Raises StoreError: what is left could not be written in time, and is given up."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        try:
            self.flush(limit_s)
        finally:
            self._given_up.set()
            self._thread.join()

    def _run(self) -> None:
        store: Store | None = None
        while batch := self._collect():
            try:
                store = store or Store(self._url)
                store.add(batch)
            except StoreError as error:
                self._error = str(error)
                if store is not None:
                    store.close()
                    store = None
                with self._changed:
                    self._queue.extendleft(reversed(batch))
                if self._given_up.wait(RETRY_S):
                    break
            else:
                with self._changed:
                    self._error = ""
                    self._durable += len(batch)
                    self._changed.notify_all()
        if store is not None:
            store.close()

    def _collect(self) -> list[tuple[Verified, int]]:
        """Wait for a receipt, and for others as long as a batch may; none: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._changed.wait_for(self._hurries, self._batch_s)
            return [self._queue.popleft() for _ in range(min(len(self._queue), self._batch_limit))]

    def _hurries(self) -> bool:
        return len(self._queue) >= self._batch_limit or self._wanted > self._durable or self._closing


class Ledger:
    """The newest receipts of one worker, to be asked for: by number, since a number, or by request. Bounded; for one thread."""

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[str, Side], tuple[int, Verified]] = OrderedDict()
        """In the order of their numbers."""
        self.count = 0
        """Number of the latest receipt."""

    def add(self, signed: Verified, number: int | None = None) -> int:
        """Keep a receipt; return its number, from 1. The oldest beyond the limit is forgotten.

        `number`: that which it had before this process; ones that do not go up are ignored, and the numbers go on from there.
        """
        if number is not None and number <= self.count:
            return self.count
        self.count = self.count + 1 if number is None else number
        key = (signed.receipt.request, signed.receipt.side)
        self._kept.pop(key, None)
        self._kept[key] = (self.count, signed)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        return self.count

    def since(self, number: int, limit: int = 1_000) -> tuple[list[Verified], int]:
        """Return at most `limit` receipts after that number, oldest first, and the number to go on from.

        That is less than `number` where there never was such a receipt: whoever asks has seen another ledger.
        """
        newer = itertools.takewhile(lambda kept: kept[0] > number, reversed(self._kept.values()))
        found = list(newer)[::-1][:limit]
        return [signed for _, signed in found], found[-1][0] if found else min(number, self.count)

    def get(self, request: str, side: Side) -> Verified | None:
        """Return the receipt of a request, or None: it was never made here, or is forgotten."""
        found = self._kept.get((request, side))
        return found[1] if found else None

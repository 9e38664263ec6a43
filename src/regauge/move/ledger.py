"""How many transfers of a worker have ended in which way. Belongs to the worker's event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from weakref import WeakKeyDictionary

from regauge.move.channel import Channel
from regauge.move.inbound import Arrival, InboundLinks
from regauge.move.protocol import Delivered
from regauge.move.reasons import reason_class
from regauge.move.state import Totals


class Ledger:
    """Counts how transfers end. `watch` each transfer's future, and `read` the links now and then."""

    def __init__(self) -> None:
        self._delivered = 0
        self._wire_bytes = 0
        self._failed: Counter[str] = Counter()
        self._resent = 0
        self._resumed = 0
        self._read: WeakKeyDictionary[Channel, tuple[int, int]] = WeakKeyDictionary()

    def watch(self, transfer: asyncio.Future[Arrival] | asyncio.Future[Delivered]) -> None:
        """Count a transfer's end once it comes."""
        transfer.add_done_callback(self._ended)

    def failed(self, error: BaseException) -> None:
        """Count a transfer that failed before it had a future."""
        self._failed[reason_class(error)] += 1

    def _ended(self, transfer: asyncio.Future[Arrival] | asyncio.Future[Delivered]) -> None:
        if transfer.cancelled():
            return
        if (error := transfer.exception()) is not None:
            self.failed(error)
            return
        self._delivered += 1
        self._wire_bytes += transfer.result().wire_bytes

    def read(self, links: InboundLinks) -> None:
        """Take in what was sent again and resumed since the last reading.

        A link that is replaced twice between two readings takes its figures with it.
        """
        for link in links._last.values():
            resent, resumed = self._read.get(link.channel, (0, 0))
            self._read[link.channel] = (link.channel.resent, link.channel.resumed)
            self._resent += link.channel.resent - resent
            self._resumed += link.channel.resumed - resumed

    def totals(self) -> Totals:
        """Return the counts."""
        return Totals(self._delivered, self._wire_bytes, dict(self._failed), self._resent, self._resumed)

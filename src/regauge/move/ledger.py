"""How many transfers of a worker have ended in which way. Belongs to the worker's event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from regauge.move.inbound import InboundLinks
from regauge.move.incoming import Arrival
from regauge.move.outbound import OutboundLinks
from regauge.move.protocol import Delivered
from regauge.move.reasons import reason_class
from regauge.move.state import Totals


class Ledger:
    """Counts how transfers end. `watch` each transfer's future, and `read` the links now and then."""

    def __init__(self) -> None:
        self._delivered = 0
        self._wire_bytes = self._received = self._chunks = 0
        self._failed: Counter[str] = Counter()
        self._seen: dict[str, Any] = {}
        """What links have counted."""

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
        found = transfer.result()
        self._delivered += 1
        self._wire_bytes += found.wire_bytes
        if isinstance(found, Arrival):
            self._received += found.wire_bytes
            self._chunks += found.counted.chunks

    def read(self, links: InboundLinks) -> None:
        """Take in what the links of the decode side have counted."""
        resent, resumed = links.repeated()
        receiver = links.receiver
        self._seen |= {
            "resent": resent, "resumed": resumed, "grants": receiver.grants, "credits": receiver.credits,
            "credit_bytes": receiver.credited, "landed": dict(links.moved.by_path),
        }  # fmt: skip

    def read_sent(self, links: OutboundLinks) -> None:
        """Take in what those of the prefill side have."""
        self._seen["sent"] = sum(links.moved.by_path.values())

    def totals(self) -> Totals:
        """Return the counts."""
        return Totals(
            self._delivered,
            self._wire_bytes,
            dict(self._failed),
            chunks=self._chunks,
            received=self._received,
            **self._seen,
        )

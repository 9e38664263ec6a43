"""The gateway's part of the meter: its own word on every attempt, the workers' words that came with the answers, and those that did not.

Nothing here makes a request wait. One thread signs, verifies and hands over to the `Writer`, whose own thread writes. A queue that is full, since the
store stands still, is told by `trouble`: the gateway takes no requests that it could not bill.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from regauge import keys
from regauge.config import MeterConfig
from regauge.errors import ReceiptError, StoreError
from regauge.meter.receipt import Receipt, Side, Trust, Verified, decode, load_trust, sign
from regauge.meter.store import Store
from regauge.meter.writer import Writer
from regauge.observe import ERROR, REQUEST_ID, Metrics, get_logger
from regauge.serve import wire

CLOSE_S: Final = 10.0
LOOK_S: Final = 10.0
"""Seconds between two looks at what is missing."""
AGE_US: Final = 7 * 86_400_000_000
"""Of requests that are looked at."""
KNOWN: Final = 200_000
"""Receipts that are remembered, so that one that came with its answer is not verified again."""
OVERLAP_US: Final = 300_000_000
"""A worker's receipts up to so long before the newest in the store are there: they are written in batches, nearly in their order."""


class Meter:
    """Takes receipts from the event loop; belongs to one gateway process. `looks`: it is the one that finds what is missing."""

    def __init__(
        self, config: MeterConfig, key: Ed25519PrivateKey, trust: Trust, metrics: Metrics, *, name: str, model: str, looks: bool = True,
        life_s: float = 600.0,
    ) -> None:  # fmt: skip
        """`life_s`: seconds after which no request is under way any more. Raises StoreError, ConfigError for a store that cannot be opened."""
        self.name = name
        self.model = model
        self.config = config
        self.looks = looks
        self._writer = Writer(config.store, queue_limit=config.queue)
        self._key = key
        self._trust = trust
        self._metrics = metrics
        self._queue: queue.Queue[Receipt | bytes | None] = queue.Queue()
        self._known: OrderedDict[tuple[str, Side], None] = OrderedDict()
        self._life_s = life_s
        self._since: dict[str, int] | None = None
        """Of each worker: the time up to which its receipts are in the store."""
        self._looked = 0.0
        self._flagged: set[str] = set()
        self._asked: dict[str, int] = {}
        """Of each worker: when it had last given all its receipts."""
        self._thread = threading.Thread(target=self._run, name="regauge-receipts", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why no request can be taken now that must be billed; empty: it can."""
        waiting = self._queue.qsize() + self._writer.waiting
        if waiting < self.config.queue:
            return ""
        return f"{waiting} receipts wait to be written: {self._writer.error or 'the store is slow'}"

    def say(self, receipt: Receipt) -> None:
        """Take the gateway's own word."""
        self._queue.put(receipt)

    def heard(self, lines: Iterable[str]) -> None:
        """Take receipts of workers, as they came."""
        for line in lines:
            if line:
                self._queue.put(line.encode())

    def asked(self, worker: str) -> None:
        """Note that a worker has given all the receipts that it had a moment ago."""
        self._asked[worker] = time.time_ns() // 1_000

    def refused(self, error: ReceiptError | StoreError, request: str = "") -> None:
        """Note a receipt that is no worker's, or one too many: its request is listed as missing one, by `regauge usage --troubled`."""
        self._metrics.receipts_refused.inc()
        get_logger(**({REQUEST_ID: request} if request else {})).error("a receipt was not taken", **{ERROR: str(error)})

    def flush(self) -> None:
        """Wait until all that was taken is in the store. Raises StoreError."""
        self._queue.join()
        self._writer.flush(CLOSE_S)

    def close(self) -> None:
        """Write what was taken, and end. Raises StoreError for what could not be written in time."""
        if not self._thread.is_alive():
            return
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        self._writer.close(CLOSE_S)

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=LOOK_S)
            except queue.Empty:
                self.look()
                continue
            if item is None:
                return
            self._take(item)
            self._queue.task_done()
            if time.monotonic() > self._looked + LOOK_S:
                self.look()

    def _take(self, item: Receipt | bytes) -> None:
        try:
            verified = self._verified(item)
            if verified is not None:
                self._writer.put(verified)
                self._metrics.receipts.inc()
        except (ReceiptError, StoreError) as error:
            self.refused(error, item.request if isinstance(item, Receipt) else "")

    def _verified(self, item: Receipt | bytes) -> Verified | None:
        """Return a receipt that is to be written; None: it is there already."""
        if isinstance(item, Receipt):
            return sign(item, self._key)
        signed = decode(item, "receipt of a worker")
        receipt = signed.receipt
        if receipt.side == "gateway":
            raise ReceiptError(f"request {receipt.request}: a worker gave a receipt in a gateway's name")
        key = (receipt.request, receipt.side)
        if key in self._known or receipt.ended_us < self._stored(receipt.by):
            return None
        verified = self._trust.check(signed)
        self._known[key] = None
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return verified

    def _stored(self, worker: str) -> int:
        """Return up to when a worker's receipts are known to be in the store: as it was when this process began."""
        if self._since is None:
            store = Store(self.config.store, create=False)
            try:
                self._since = {name: ended - OVERLAP_US for name, ended in store.newest().items()}
            finally:
                store.close()
        return self._since.get(worker, 0)

    def _recover(self, store: Store, since_us: int, before_us: int, dumb: Collection[str], made: set[str]) -> set[str]:
        """Make the receipts that can be made, but those that have been, and return the requests of all."""
        for lacks in store.missing(since_us, ended_before_us=before_us):
            if lacks.side != "gateway" or lacks.request in made:
                continue
            if (receipt := store.recover(lacks.request, self.name, dumb)) is not None:
                get_logger(**{REQUEST_ID: lacks.request}).warning(
                    "a lost receipt is made again", outcome=receipt.outcome
                )
                self._writer.put(sign(receipt, self._key))
                made.add(lacks.request)
        return made

    def look(self) -> None:
        """Make again what a gateway that was killed has lost, and tell of what does not agree."""
        self._looked = time.monotonic()
        if not self.looks:
            return
        now_us = time.time_ns() // 1_000
        since_us, before_us = now_us - AGE_US, now_us - int(self.config.recover_s * 1e6)
        lost_us = before_us - int(self._life_s * 1e6)
        try:
            store = Store(self.config.store, create=False)
            try:
                dumb = {worker for worker, at_us in list(self._asked.items()) if at_us > before_us}
                made = self._recover(store, since_us, before_us, frozenset(), set())
                self._recover(store, since_us, lost_us, dumb, made)
                troubled = [
                    each
                    for each in store.troubled(since_us, now_us)
                    if each.ended_us < (lost_us if "gateway" in each.missing else before_us)  # it may still run
                ]
            finally:
                store.close()
        except StoreError as error:
            get_logger().error("the receipts cannot be looked at", **{ERROR: str(error)})
            return
        for status in ("differs", "missing"):
            self._metrics.receipts_troubled.labels(status).set(sum(each.status == status for each in troubled))
        for entry in troubled:
            if entry.request not in self._flagged:
                words = [d.text() for d in entry.differences] + [f"{side} is missing" for side in entry.missing]
                get_logger(**{REQUEST_ID: entry.request}).error("receipts do not agree", **{ERROR: "; ".join(words)})
        self._flagged = {each.request for each in troubled}


def from_spec(spec: wire.GatewaySpec, metrics: Metrics, *, looks: bool) -> Meter | None:
    """Return what meters a gateway; None: its configuration names no store. Raises ConfigError, StoreError."""
    config = spec.config.meter
    if not config.store:
        return None
    key, trust = keys.load_private(Path(spec.signing_key)), load_trust(Path(spec.trust))
    return Meter(config, key, trust, metrics, name=spec.name, model=spec.model_name, looks=looks,
                 life_s=spec.config.limits.request_timeout_s)  # fmt: skip

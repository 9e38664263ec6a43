"""The gateway's part of the meter: its own word on every attempt, the workers' words that came with the answers, and those that did not.

Nothing here makes a request wait. One thread signs, verifies and hands over to the `Writer`, whose own thread writes. A queue that is full, since the
store stands still, is told by `trouble`: the gateway takes no requests that it could not bill.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from regauge.errors import ReceiptError, StoreError
from regauge.meter.receipt import Outcome, Receipt, Signed, Trust, Verified, decode, sign
from regauge.meter.writer import Writer
from regauge.observe import ERROR, REQUEST_ID, Metrics, get_logger
from regauge.serve.attempt import Attempt

CLOSE_S: Final = 10.0
_STOP: Final = None


class Meter:
    """Takes receipts from the event loop; belongs to one gateway process."""

    def __init__(
        self,
        writer: Writer,
        key: Ed25519PrivateKey,
        trust: Trust,
        metrics: Metrics,
        *,
        name: str,
        model: str,
        limit: int = 10_000,
    ) -> None:
        self.name = name
        self._writer = writer
        self._key = key
        self._trust = trust
        self._metrics = metrics
        self._model = model
        self._queue: queue.Queue[Receipt | bytes | None] = queue.Queue()
        self._limit = limit
        self._thread = threading.Thread(target=self._run, name="regauge-receipts", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why no request can be taken now that must be billed; empty: it can."""
        waiting = self._queue.qsize() + self._writer.waiting
        if waiting < self._limit:
            return ""
        return f"{waiting} receipts wait to be written: {self._writer.error or 'the store is slow'}"

    def ended(self, attempt: Attempt, outcome: Outcome) -> None:
        """Take what an attempt came to, and the receipts that its workers gave with their answers."""
        try:
            self._queue.put(self._word(attempt, outcome))
        except ReceiptError as error:
            self._refused(error, attempt.task.request_id)
        said = (
            attempt.prefilled.receipt if attempt.prefilled else "",
            attempt.finish.receipt if attempt.finish else "",
        )
        self.heard(line.encode() for line in said if line)

    def _word(self, attempt: Attempt, outcome: Outcome) -> Receipt:
        task, tag = attempt.task, attempt.task.meter
        if tag is None:
            raise ReceiptError(f"request {task.request_id}: is not metered")
        prompt = len(task.token_ids) + len(task.generated)
        cached, computed = _prompt(attempt, prompt)
        silent = [side for side, mute in _mute(attempt) if mute and outcome in ("complete", "resumed", "cancelled")]
        return Receipt(
            request=task.request_id, side="gateway", by=self.name, tenant=tag.tenant, model=self._model, route=tag.route,
            prefill=tag.prefill, decode=tag.decode, began_us=int(attempt.began * 1e6),
            ended_us=max(int((attempt.ended or time.time()) * 1e6), int(attempt.began * 1e6)), outcome=outcome,
            resumes=tag.resumes, silent=tuple(silent), prompt=prompt, cached=cached, computed=computed,
            generated=attempt.delivered,
        )  # fmt: skip

    def heard(self, lines: Iterable[bytes]) -> None:
        """Take receipts of workers, as they came."""
        for line in lines:
            self._queue.put(line)

    def close(self) -> None:
        """Write what was taken, and end. Raises StoreError for what could not be written in time."""
        self._queue.put(_STOP)
        self._thread.join(CLOSE_S)
        self._writer.close(CLOSE_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not _STOP:
            try:
                self._writer.put(self._verified(item))
            except (ReceiptError, StoreError) as error:
                self._refused(error, item.request if isinstance(item, Receipt) else "")
            else:
                self._metrics.receipts.inc()

    def _refused(self, error: ReceiptError | StoreError, request: str) -> None:
        """A receipt that is no worker's, or one too many: its request is listed as missing one, by `regauge usage --troubled`."""
        self._metrics.receipts_refused.inc()
        get_logger(**({REQUEST_ID: request} if request else {})).error("a receipt was not taken", **{ERROR: str(error)})

    def _verified(self, item: Receipt | bytes) -> Verified:
        if isinstance(item, Receipt):
            return sign(item, self._key)
        signed: Signed = decode(item, "receipt of a worker")
        if signed.receipt.side == "gateway":
            raise ReceiptError(f"request {signed.receipt.request}: a worker gave a receipt in a gateway's name")
        return self._trust.check(signed)


def _mute(attempt: Attempt) -> Iterator[tuple[Literal["prefill", "decode"], bool]]:
    """Yield which workers cannot speak: those that make no receipts, and prefill that was lost once it had delivered."""
    if attempt.prefill is not None:
        yield "prefill", attempt.prefilled is None or not attempt.prefill.client.signs
    yield "decode", not attempt.decode.client.signs


def _prompt(attempt: Attempt, prompt: int) -> tuple[int, int]:
    """Return how many of the prompt's tokens were cached, and computed, as far as the workers have told: prefill, or decode of it."""
    if attempt.prefilled is not None:
        return attempt.prefilled.cached_tokens, attempt.prefilled.computed_tokens
    cached = attempt.arrival.cached_tokens if attempt.arrival is not None else None
    if cached is None and attempt.finish is not None:
        cached = attempt.finish.cached_tokens
    if cached is None:
        return (0, prompt) if attempt.delivered else (0, 0)
    return cached, prompt - cached

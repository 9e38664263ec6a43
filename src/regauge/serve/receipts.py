"""A worker's receipts: what a request came to on its side, counted as it goes on, signed when it ends, and kept for a gateway that missed it.

The journal is a file of numbered lines. Each is written by one call before the gateway hears of the receipt, so that a worker that is killed has it when
it is started again. Two generations of at most `LIMIT` receipts are kept, and no more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from regauge import keys
from regauge.errors import ConfigError, ReceiptError
from regauge.meter.receipt import Outcome, Receipt, Side, Verified, decode, encode, sign
from regauge.meter.writer import Ledger
from regauge.observe import ERROR, REQUEST_ID, get_logger
from regauge.serve import wire

LIMIT: Final = 50_000
"""Receipts that are remembered, and that one generation of the journal holds."""


class Journal:
    """Numbered receipts in `path`, and in `path`.1 those before. Raises ConfigError where the file cannot be opened."""

    def __init__(self, path: Path, limit: int = LIMIT) -> None:
        self._path = path
        self._older = path.with_name(path.name + ".1")
        self._limit = limit
        self._count = 0
        """Of the newer file."""
        self._file = self._open()

    def read(self) -> Iterator[tuple[int, Verified]]:
        """Yield what is there, oldest first. A line that is torn, or was changed, is left out, and logged."""
        for path in (self._older, self._path):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            *whole, rest = data.split(b"\n")
            if path == self._path:
                self._count = len(whole)
                if rest:  # the process, or the disk, ended in the midst of it
                    os.ftruncate(self._file, len(data) - len(rest))
            for line in whole:
                number, _, written = line.partition(b" ")
                try:
                    signed = decode(written, str(path))
                    yield int(number), Verified(signed.receipt, signed.signature)
                except (ReceiptError, ValueError) as error:
                    get_logger().error("a receipt in the journal is damaged", **{ERROR: str(error)})

    def append(self, number: int, line: bytes) -> None:
        """Write one receipt. Raises OSError."""
        if self._count >= self._limit:
            os.close(self._file)
            self._path.replace(self._older)
            self._file, self._count = self._open(), 0
        record = b"%d %s\n" % (number, line)
        if os.write(self._file, record) != len(record):
            raise OSError(f"{self._path}: a receipt was not written whole")
        self._count += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}; the journal of receipts is kept there") from error


class Notary:
    """Signs a worker's receipts, and remembers them. Without a key it makes none. For one thread."""

    def __init__(self, name: str, model: str, key: Ed25519PrivateKey | None, journal: Journal | None = None) -> None:
        self.name = name
        self.model = model
        self._key = key
        self._journal = journal
        self._ledger = Ledger(LIMIT)
        for number, signed in journal.read() if journal is not None else ():
            self._ledger.add(signed, number)

    @classmethod
    def from_spec(cls, spec_: wire.WorkerSpec) -> Self:
        """Read a worker's key and journal. Raises ConfigError."""
        key = keys.load_private(Path(spec_.signing_key)) if spec_.signing_key else None
        journal = Journal(Path(spec_.state) / f"{spec_.name}.receipts") if key is not None and spec_.state else None
        return cls(spec_.name, spec_.model_name, key, journal)

    @property
    def count(self) -> int:
        """Number of the latest receipt."""
        return self._ledger.count

    def open(self, request_id: str, side: Side, prompt: int, tag: wire.MeterTag | None) -> Account:
        """Begin to count a request of so many tokens, those that another worker generated included."""
        return Account(self, request_id, side, prompt, tag if self._key is not None else None)

    def sign(self, receipt: Receipt) -> str:
        """Sign, keep and return a receipt. Raises RuntimeError without a key."""
        if self._key is None:
            raise RuntimeError(f"{self.name} has no key to sign with")
        signed = sign(receipt, self._key)
        line = encode(signed)
        number = self._ledger.add(signed)
        if self._journal is not None:
            try:
                self._journal.append(number, line)
            except OSError as error:  # the gateway still gets it
                get_logger(**{REQUEST_ID: receipt.request}).error("a receipt is not in the journal", **{ERROR: str(error)})  # fmt: skip
        return line.decode()

    def line(self, request_id: str) -> str:
        """Return the receipt of a request; empty: none was made, or it is forgotten."""
        found = self._ledger.get(request_id, "decode") or self._ledger.get(request_id, "prefill")
        return "" if found is None else encode(found).decode()

    def since(self, number: int, limit: int) -> wire.Receipts:
        """Return the oldest receipts after a number, at most `limit`."""
        found, after = self._ledger.since(number, limit)
        return wire.Receipts([encode(signed).decode() for signed in found], after)

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()


@dataclass(eq=False)
class Account:
    """What one request came to on this side so far; `close` it, whatever ended it."""

    notary: Notary
    request_id: str
    side: Side
    prompt: int
    """Tokens."""
    tag: wire.MeterTag | None
    cached: int = 0
    computed: int = 0
    transferred: int = 0
    path: Any = ""
    wire_bytes: int = 0
    digest: str = ""
    generated: int = 0

    def __post_init__(self) -> None:
        self._began_us = time.time_ns() // 1_000
        self._line: str | None = None

    def crossed(self, tokens: int, path: str, nbytes: int, digest: str) -> None:
        """Note a transfer that was delivered and verified."""
        self.transferred, self.path, self.wire_bytes, self.digest = tokens, path, nbytes, digest

    def close(self, outcome: Outcome) -> str:
        """Return the signed receipt; the first outcome counts, and later calls return the same. Empty: the request is not metered."""
        if self._line is None:
            self._line = ""
            if self.tag is not None:
                try:
                    self._line = self.notary.sign(self._receipt(self.tag, outcome))
                except ReceiptError as error:  # a defect here must not end a request that went well
                    get_logger(**{REQUEST_ID: self.request_id}).error("no receipt could be made", **{ERROR: str(error)})
        return self._line

    def _receipt(self, tag: wire.MeterTag, outcome: Outcome) -> Receipt:
        at_prefill = self.side == "prefill"
        computes = at_prefill or not tag.prefill
        return Receipt(
            request=self.request_id, side=self.side, by=self.notary.name, tenant=tag.tenant, model=self.notary.model,
            route=tag.route, resumes=tag.resumes, prefill=self.notary.name if at_prefill else tag.prefill,
            decode=tag.decode if at_prefill else self.notary.name, began_us=self._began_us,
            ended_us=max(self._began_us, time.time_ns() // 1_000), outcome=outcome, prompt=self.prompt,
            cached=self.cached if computes else None, computed=self.computed if computes else None,
            transferred=self.transferred, converted=self.transferred if self.path == "CONVERT" else 0,
            wire_bytes={self.path: self.wire_bytes} if self.wire_bytes else {},
            digest=self.digest, generated=None if at_prefill else self.generated,
        )  # fmt: skip

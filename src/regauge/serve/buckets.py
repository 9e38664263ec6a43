"""How much of its limits each tenant has used, counted over all gateway processes of one machine.

A file of fixed records, mapped into every process; a record's lock is one byte of it (`fcntl.lockf`), which the system takes back from a
process that dies. Nothing here knows the time: `now` is seconds of the monotonic clock, which all processes of a machine share.

A bucket holds what was *spent*, which drains at the limit's rate; a request fits while spent + cost is at most the burst. So an empty record
is a full allowance, and limits can change under a tenant without anything being counted anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from regauge.config_gateway import MAX_PROCESSES
from regauge.errors import ConfigError

MAX_TENANTS: Final = 4_096
MAX_REQUEST_TOKENS: Final = 1 << 40
"""Most tokens that one request is charged."""
Scope = Literal["concurrent", "requests", "tokens", "month"]

_MAGIC: Final = b"regauge-buckets1"
_RECORD: Final = struct.Struct(f"=16s3d2q{MAX_PROCESSES}i")
_PATIENCE_S: Final = 0.2
"""Longest wait for a record's lock, which is held for microseconds of work: only a process that was stopped in their midst holds it longer."""


@dataclass(frozen=True)
class Limits:
    """What a tenant may use; `inf` is no limit. A burst is what may be used at once, after a rest."""

    tokens_per_s: float = math.inf
    token_burst: float = math.inf
    requests_per_s: float = math.inf
    request_burst: float = math.inf
    month_tokens: float = math.inf
    concurrent: float = math.inf


UNLIMITED: Final = Limits()


class Spent(NamedTuple):  # made four times a request: a frozen dataclass takes five times as long
    """A record: tokens and requests in the buckets as of `at`, and what was used in a month (`year * 12 + month`)."""

    tokens: float = 0.0
    requests: float = 0.0
    at: float = 0.0
    month: int = 0
    used: int = 0

    def drained(self, limits: Limits, now: float, month: int) -> Spent:
        """Return the record as of now; a clock that went back drains nothing."""
        passed = max(now - self.at, 0.0)
        return Spent(
            _drain(self.tokens, limits.tokens_per_s, passed),
            _drain(self.requests, limits.requests_per_s, passed),
            now,
            month,
            self.used if month == self.month else 0,
        )


@dataclass(frozen=True)
class Over:
    """A request does not fit: which limit, and seconds until it would; `inf`: not before that limit is changed."""

    scope: Scope
    wait_s: float


class Left(NamedTuple):
    """What is left after a request; `*_reset_s`: seconds until the whole allowance is there again."""

    tokens: float
    requests: float
    token_reset_s: float
    request_reset_s: float


def charge(spent: Spent, running: int, limits: Limits, cost: int) -> Spent | Over:
    """Return the record with one more request of `cost` tokens, or why it does not fit. `spent` is as of now."""
    if running >= limits.concurrent:
        return Over("concurrent", 1.0)
    if spent.used + cost > limits.month_tokens:
        return Over("month", math.inf)
    if cost > limits.token_burst:
        return Over("tokens", math.inf)
    if (over := spent.requests + 1 - limits.request_burst) > 0:
        return Over("requests", over / limits.requests_per_s)
    if (over := spent.tokens + cost - limits.token_burst) > 0:
        return Over("tokens", over / limits.tokens_per_s)
    return Spent(spent.tokens + cost, spent.requests + 1, spent.at, spent.month, spent.used + cost)


def settle(spent: Spent, estimate: int, used: int) -> Spent:
    """Return the record with what a request really used; a bucket that was overdrawn stays so until it has drained."""
    more = used - estimate
    return Spent(max(spent.tokens + more, 0.0), spent.requests, spent.at, spent.month, max(spent.used + more, 0))


def left(spent: Spent, limits: Limits) -> Left:
    """Return what remains of the limits; `spent` is as of now."""
    return Left(
        max(limits.token_burst - spent.tokens, 0.0),
        max(limits.request_burst - spent.requests, 0.0),
        spent.tokens / limits.tokens_per_s,
        spent.requests / limits.requests_per_s,
    )


class Buckets:
    """The records. For one thread of a process: the system's locks are between processes."""

    def __init__(self, path: Path | None = None, process: int = 0) -> None:
        """Open the file that `create` made, as gateway process number `process`; None: for this process alone.

        Raises ConfigError for a file that is none of ours.
        """
        self._process = process
        self._slots: dict[str, int] = {}
        size = len(_MAGIC) + MAX_TENANTS * _RECORD.size
        if path is None:
            self._file, self._map = -1, mmap.mmap(-1, size)
            return
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            whole = os.fstat(self._file).st_size == size and os.pread(self._file, len(_MAGIC), 0) == _MAGIC
            if not whole or not 0 <= process < MAX_PROCESSES:
                raise ConfigError(f"{path}: is no file of buckets for process {process}; `regauge serve` makes it anew")
            self._map = mmap.mmap(self._file, size)
        except BaseException:  # closed, whatever broke
            os.close(self._file)
            raise

    @staticmethod
    def create(path: Path) -> None:
        """Make the file, for its owner alone. Raises FileExistsError."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_MAGIC)
            file.truncate(len(_MAGIC) + MAX_TENANTS * _RECORD.size)

    def close(self) -> None:
        """Unmap it."""
        self._map.close()
        if self._file >= 0:
            os.close(self._file)

    def claim(self, tenant: str) -> int:
        """Return a tenant's record, made if it is not there yet. Raises ConfigError when MAX_TENANTS others have been.

        The requests that an earlier process of this number left running are none any more.
        """
        if (known := self._slots.get(tenant)) is not None:
            return known
        name = hashlib.sha256(tenant.encode()).digest()[:16]
        first = int.from_bytes(name[:8], "big") % MAX_TENANTS
        self._lock(0)
        try:
            for step in range(MAX_TENANTS):
                slot = (first + step) % MAX_TENANTS
                at = self._at(slot)
                if self._map[at : at + 16] in (bytes(16), name):
                    self._map[at : at + 16] = name
                    self._slots[tenant] = slot
                    break
            else:
                raise ConfigError(f"tenant {tenant!r}: {MAX_TENANTS} tenants have been here; restart the gateway")
        finally:
            self._unlock(0)
        self._change(slot, lambda _, spent, running: (spent, [*running]), reset=True)
        return slot

    def take(self, slot: int, limits: Limits, cost: int, now: float, month: int) -> Left | Over:
        """Charge a request that begins, if it fits."""
        answer: Left | Over

        def charged(process: int, spent: Spent, running: list[int]) -> tuple[Spent, list[int]]:
            nonlocal answer
            present = spent.drained(limits, now, month)
            after = charge(present, sum(running), limits, cost)
            if isinstance(after, Over):
                answer = after
                return present, running
            running[process] += 1
            answer = left(after, limits)
            return after, running

        answer = Over("concurrent", math.inf)
        self._change(slot, charged)
        return answer

    def settle(self, slot: int, estimate: int, used: int, month: int) -> None:
        """End a request of that month. What it used of a month that is over is not counted in the next."""

        def settled(process: int, spent: Spent, running: list[int]) -> tuple[Spent, list[int]]:
            running[process] = max(running[process] - 1, 0)
            after = settle(spent, estimate, used)
            return (after if spent.month == month else after._replace(used=spent.used)), running

        self._change(slot, settled)

    def count_month(self, slot: int, month: int, used: int) -> None:
        """Set what was used in a month, as the receipts' store knows it; what has been counted already stays if it is more."""

        def counted(_: int, spent: Spent, running: list[int]) -> tuple[Spent, list[int]]:
            before = spent.used if spent.month == month else 0
            return spent._replace(month=month, used=max(before, used)), running

        self._change(slot, counted)

    def spent(self, slot: int) -> tuple[Spent, int]:
        """Return a record and how many requests run."""
        _, *values = _RECORD.unpack_from(self._map, self._at(slot))
        return Spent(*values[:5]), sum(values[5:])

    def _change(
        self,
        slot: int,
        change: Callable[[int, Spent, list[int]], tuple[Spent, list[int]]],
        *,
        reset: bool = False,
    ) -> None:
        at = self._at(slot)
        self._lock(at)
        try:
            name, tokens, requests, since, month, used, *running = _RECORD.unpack_from(self._map, at)
            if reset:
                running[self._process] = 0
            spent, running = change(self._process, Spent(tokens, requests, since, month, used), running)
            _RECORD.pack_into(self._map, at, name, *spent, *running)
        finally:
            self._unlock(at)

    def _at(self, slot: int) -> int:
        return len(_MAGIC) + slot * _RECORD.size

    def _lock(self, at: int) -> None:
        """Lock one byte. Where its holder was stopped in the midst, go on without: an error in a count is less than a standstill."""
        if self._file < 0:
            return
        until = 0.0
        while True:
            with suppress(BlockingIOError, PermissionError):  # as POSIX says: either, for a lock that another has
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
                return
            now = time.monotonic()
            until = until or now + _PATIENCE_S
            if now > until:
                return
            os.sched_yield()  # the holder may wait for this very core

    def _unlock(self, at: int) -> None:
        if self._file >= 0:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, at)


def _drain(amount: float, per_s: float, passed: float) -> float:
    return 0.0 if math.isinf(per_s) else max(amount - passed * per_s, 0.0)

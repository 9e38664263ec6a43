"""The senders' half of flow control, sans-IO: which transfer's bytes go next, and how fast. See `flow.py`.

A prefill worker answers several receivers. It sends in *their* order: the credit says how urgent a transfer is and how much of it remains.
It never sends more than a credit allows, never on a stale one, and never faster than its NIC's pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from regauge.errors import ConfigError, ProtocolError
from regauge.move.flow_types import Credit, NicLimits, Rank

CUT = 0.5
"""Pace after a congestion signal, over the pace before: as TCP and DCQCN at full mark."""
RECOVER_S = 0.002
"""Seconds in which the pace climbs by a sixteenth of the line rate."""
FLOOR = 1 / 64
"""Least pace over line rate."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What may be sent next: up to `nbytes` of a transfer, from byte `start`."""

    transfer: str
    peer: str
    receiver_nic: str
    start: int
    nbytes: int


@dataclass(slots=True)
class Sending:
    """One transfer on its way out."""

    peer: str
    nic: str
    nbytes: int
    order: int
    ready: int = 0
    sent: int = 0
    allowed: int = 0
    epoch: int = -1
    sequence: int = 0
    fresh_until: float = 0.0
    rank: Rank = Rank.NORMAL
    receiver_nic: str = ""
    turn: int = 0
    """When it was served last, in turns."""

    def sendable(self, now: float) -> int:
        """Bytes that are computed, allowed and not sent."""
        return max(min(self.ready, self.allowed) - self.sent, 0) if now < self.fresh_until else 0


class Pace:
    """A token bucket that follows congestion signals: cut at once, climb back slowly. It starts full.

    `rate` in bytes per second, never over `line`. A turn may borrow: it begins when the bucket is not empty.
    """

    def __init__(self, line: float, burst: int) -> None:
        self.line = line
        self._burst = burst
        self._rate = line
        self._tokens = float(burst)
        self._at = 0.0
        self._cut_at = float("-inf")

    def rate(self, now: float) -> float:
        """Bytes per second now."""
        climb = max(now - self._cut_at, 0.0) / RECOVER_S * self.line / 16
        return min(self._rate + climb, self.line)

    def wait(self, now: float) -> float:
        """Seconds until a turn may begin; 0: now."""
        self._fill(now)
        return 0.0 if self._tokens > 0 else (1.0 - self._tokens) / self.rate(now)

    def take(self, nbytes: int, now: float) -> None:
        """Bytes are sent."""
        self._fill(now)
        self._tokens -= nbytes

    def cut(self, now: float, spacing_s: float) -> None:
        """The network is congested. Signals within `spacing_s` of a cut are about the same queue: ignored."""
        if now - self._cut_at < spacing_s:
            return
        self._fill(now)
        self._rate = max(self.rate(now) * CUT, self.line * FLOOR)
        self._cut_at = now

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self._tokens + (now - self._at) * self.rate(now), float(self._burst))
            self._at = now


class SenderFlow:
    """All transfers that leave one sender. Not thread-safe: one event loop owns it.

    `order` is the receivers' policy's `sender_order`. `burst_bytes` may go at line rate after a pause, per NIC.
    """

    def __init__(
        self, nics: Sequence[NicLimits], *, order: Literal["credit", "fifo", "fair"] = "credit", burst_bytes: int = 4 << 20
    ) -> None:  # fmt: skip
        if not nics or len({nic.name for nic in nics}) != len(nics):
            raise ConfigError("sender NICs need names, one each, at least one")
        self._order = order
        self._nics = {nic.name: nic for nic in nics}
        self._paces = {nic.name: Pace(nic.bytes_per_s, burst_bytes) for nic in nics}
        self._sending: dict[str, Sending] = {}
        self._count = 0
        self._turns = 0

    @property
    def transfers(self) -> Mapping[str, Sending]:
        """Every transfer that has not ended, for inspection."""
        return self._sending

    def offer(self, transfer: str, peer: str, nbytes: int, nic: str) -> None:
        """A transfer will leave over this side's `nic`. Raises ProtocolError for a name in use or an unknown NIC."""
        if transfer in self._sending or nic not in self._nics:
            raise ProtocolError(
                f"transfer {transfer!r}: " + ("offered already" if nic in self._nics else f"no NIC {nic!r}")
            )
        self._count += 1
        self._sending[transfer] = Sending(peer, nic, nbytes, self._count)

    def ready(self, transfer: str, total: int) -> int:
        """Bytes [0, total) are computed. Returns the total to tell the receiver; transfers that are over give 0."""
        sending = self._sending.get(transfer)
        if sending is None:
            return 0
        sending.ready = max(sending.ready, total)
        return sending.ready

    def credit(self, credit: Credit, now: float) -> None:
        """Take a credit. One that is older than another, or about a transfer that is over, changes nothing."""
        sending = self._sending.get(credit.transfer)
        if sending is None or credit.epoch < sending.epoch:
            return
        if credit.epoch > sending.epoch:
            sending.epoch, sending.sequence, sending.allowed = credit.epoch, 0, 0
        sending.allowed = max(sending.allowed, credit.data_bytes)
        if credit.sequence > sending.sequence:
            sending.sequence = credit.sequence
            sending.fresh_until = now + credit.freshness_s
            sending.rank, sending.receiver_nic = credit.rank, credit.nic

    def choose(self, nic: str, now: float, *, most: int = 1 << 62) -> Turn | None:
        """What `nic` should send now, `most` bytes of it at a time; None: nothing, or it must keep its pace."""
        if self._paces[nic].wait(now) > 0:
            return None
        able = [(name, s) for name, s in self._sending.items() if s.nic == nic and s.sendable(now) > 0]
        if not able:
            return None
        name, sending = min(able, key=lambda entry: self._key(entry[1]))
        return Turn(name, sending.peer, sending.receiver_nic, sending.sent, min(sending.sendable(now), most))

    def sent(self, transfer: str, nbytes: int, now: float) -> None:
        """Bytes are on their way. Raises ProtocolError beyond what is computed and allowed."""
        sending = self._sending.get(transfer)
        if sending is None:
            return
        if nbytes > sending.sendable(now):
            raise ProtocolError(
                f"{transfer!r}: {nbytes} bytes to send, {sending.sendable(now)} are computed, allowed and fresh"
            )
        sending.sent += nbytes
        self._turns += 1
        sending.turn = self._turns
        self._paces[sending.nic].take(nbytes, now)

    def congested(self, nic: str, now: float) -> None:
        """The network under `nic` says that it is congested (loss, ECN mark, growing pause or CNP counters)."""
        self._paces[nic].cut(now, self._nics[nic].rtt_s)

    def pace(self, nic: str, now: float) -> float:
        """Bytes per second at which `nic` sends now."""
        return self._paces[nic].rate(now)

    def next_wake(self, nic: str, now: float) -> float | None:
        """When `choose` may have something again that it has not because of the pace; None: only an event can bring it."""
        if not any(s.nic == nic and s.sendable(now) > 0 for s in self._sending.values()):
            return None
        return now + self._paces[nic].wait(now)

    def end(self, transfer: str) -> None:
        """The transfer is over."""
        self._sending.pop(transfer, None)

    def _key(self, sending: Sending) -> tuple[int, ...]:
        if self._order == "fifo":
            return (sending.order,)
        if self._order == "fair":
            return (sending.turn, sending.order)
        return (sending.rank, sending.nbytes - sending.sent, sending.order)

"""What goes into and comes out of flow control: see `flow.py`. Sizes in bytes on the wire, times in seconds.

Names follow Mooncake's receiver-credit ledger (kvcache-ai/Mooncake#2860): a credit is a *cumulative* total under an epoch and a sequence number, stays
fresh for a while, and counts `data_bytes`; KV pages are its `consumer_slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from regauge.errors import ConfigError


class Rank(IntEnum):
    """Classes of transfers, in the order in which they are served."""

    OWED = 0
    """Waited longer than `max_wait_s`, or its tenant is behind its share."""
    URGENT = 1
    """Somebody misses a deadline unless it goes on now."""
    NORMAL = 2
    BULK = 3
    """Nobody waits for it, or it comes too late and `late` says that such go last."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A transfer that wants to cross to this receiver."""

    transfer: str
    peer: str
    nbytes: int
    """Bytes that will cross."""
    pages: int = 0
    """KV pages of the receiver that it needs."""
    tenant: str = ""
    deadline: float | None = None
    """By when all must have landed, on the receiver's clock; None: as soon as possible, without a limit."""
    nics: tuple[str, ...] = ()
    """Receiver NICs that may be used; empty: any."""
    unit_bytes: int = 1
    """Least that the sender can send at once: its smallest chunk. A credit is never smaller while more is ready."""
    bulk: bool = False
    """Nobody waits for it: goes after everything else."""


@dataclass(frozen=True, slots=True)
class NicLimits:
    """One NIC of this side."""

    name: str
    bytes_per_s: float
    """Line rate."""
    rtt_s: float = 0.001
    """Credit sent until its first bytes have landed on an idle link: where the measured delay starts."""
    window_bytes: int | None = None
    """Most bytes granted and not landed; None: delay x min(1.25 x line rate, 4 x measured rate), and two quanta."""

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.rtt_s > 0) or (self.window_bytes is not None and self.window_bytes < 1):
            raise ConfigError(f"NIC {self.name!r}: bytes_per_s, rtt_s and window_bytes must be more than 0")


@dataclass(frozen=True, slots=True)
class Admit:
    """Receiver: lend so many pages to the transfer; its bytes will come over this NIC."""

    transfer: str
    peer: str
    nic: str
    pages: int


@dataclass(frozen=True, slots=True)
class Credit:
    """Receiver to sender: bytes [0, data_bytes) of the transfer may be sent. Cumulative, so it may be repeated, lost and overtaken."""

    transfer: str
    peer: str
    nic: str
    epoch: int
    """A higher epoch ends what lower ones allowed."""
    sequence: int
    data_bytes: int
    freshness_s: float
    """The sender uses it for so long after it came."""
    rank: Rank
    remaining: int
    """Bytes of the transfer that have not landed."""
    slack_s: float | None
    """Seconds by which the deadline can still be met; None without one."""


@dataclass(frozen=True, slots=True)
class Late:
    """The transfer's deadline cannot be met any more; said once. It still crosses, unless the driver ends it."""

    transfer: str
    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The transfer is not taken; nothing is held for it."""

    transfer: str
    peer: str
    reason: str


FlowAction = Admit | Credit | Late | Refuse


@dataclass(frozen=True, slots=True)
class LinkState:
    """One receiver NIC, as published to routing and metrics."""

    nic: str
    transfers: int
    granted_bytes: int
    """Granted and not landed, unscheduled bytes included."""
    unscheduled_bytes: int
    stalled_bytes: int
    queued_bytes: int
    """Ready at senders and not granted."""
    backlog_bytes: int
    """Of admitted transfers, not landed; ready or not."""
    window_bytes: int
    bytes_per_s: float
    """Measured while there was work; the line rate before."""
    rtt_s: float
    backlog_s: float
    """What a new transfer would find in front of it: backlog over rate."""
    line_bytes_per_s: float = 0.0
    """As configured; 0: not told."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a receiver decides. Ours is `CREDIT`; the others are the baselines that it is measured against."""

    name: str
    windowed: bool
    """Credit is bounded by the window and handed out in order; if not, all that is ready is granted at once."""
    one_per_peer: bool
    """Only the oldest transfer of each peer is granted anything."""
    sender_order: Literal["credit", "fifo", "fair"]
    """What the sender does with several grants: the receivers' order, its own order of arrival, or in turns."""


CREDIT = Policy("credit", windowed=True, one_per_peer=False, sender_order="credit")
UNCONTROLLED = Policy("uncontrolled", windowed=False, one_per_peer=False, sender_order="fair")
PEER_FIFO = Policy("peer-fifo", windowed=False, one_per_peer=True, sender_order="fifo")
FAIR_SHARE = Policy("fair-share", windowed=False, one_per_peer=False, sender_order="fair")
"""As `UNCONTROLLED`, but its senders slow down when the network says so (`SenderFlow.congested`)."""
POLICIES = (CREDIT, UNCONTROLLED, PEER_FIFO, FAIR_SHARE)

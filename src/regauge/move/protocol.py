"""The life of a transfer, sans-IO: events and the time go in, actions come out. The two sides are `sender.py`
(prefill) and `receiver.py` (decode); the drivers are `outbound.py` and `inbound.py`.

A transfer brings the KV of one request from the ranks of a prefill worker to one rank of a decode worker. What one prefill rank
sends to one decode rank is a *leg*; it runs over their link. A leg has *parts*, one for each pair of state groups.

1. The gateway sends a request to both workers. Decode leases pages and *expects* the transfer; prefill *offers* it.
2. When both have happened, in either order, decode *grants* its pages. Prefill computes nothing before.
3. Prefill's engine finishes a layer of a prompt chunk: so much more is *wanted*, and decode gives *credit* for bytes. Chunks are cut from
   what is computed and has credit, several layers at a time when the link lags behind, a few writes in flight per link.
4. *Written* tells decode that a chunk has landed, and its digest. Decode brings it from a staging slot into its pages, or reads its
   pages, and compares. A chunk that is not what was sent is written *again*, once; then the transfer fails.
5. *Finish* carries the first token. When every layer and token has arrived exactly once on every leg and every digest agrees, decode
   *commits*: its engine may read the pages, and prefill may reuse its own.

A link that breaks takes nothing with it: once its data connection is fenced and a new link between the same two processes
stands, prefill offers the transfer again, and decode grants it under a new epoch from where everything has been verified.

A transfer that fails (abort, lease or deadline over, broken link, broken rule) is reported once. Its decode pages are quarantined until
every writer says *fenced*, or its link is gone and its data connection is fenced. Its prefill pages are kept
until no write reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from regauge.move import messages as m
from regauge.move.counted import Counted

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """What a link carries of one pair of state groups."""

    group: int
    """Decode's group: which table of a grant."""
    layers: tuple[int, ...]
    """Layers of the model, ascending."""
    live: Callable[[Range, int], Range] = lambda tokens, _: tokens
    """Which of tokens [first, end) the group needs for a context of so many tokens: see `regauge.plan.planner.live`."""
    token_bytes: int = 1
    """Bytes on the wire of one token of one layer, padding left out: the unit of credit, which both ends count alike."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer."""

    peer: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Write:
    """Prefill: write a chunk into the peer's pages or staging slot. `layers` are positions in the part's layers."""

    peer: str
    transfer: str
    epoch: int
    seq: int
    pair: int
    layers: Range
    tokens: Range
    table: m.Table
    slot: int | None
    nic: int = 0
    """Position of the peer's NIC that it goes to."""


@dataclass(frozen=True, slots=True)
class Relink:
    """Prefill: the link to a peer is gone and transfers wait for it: make a new one, and go on trying until told otherwise."""

    peer: str


@dataclass(frozen=True, slots=True)
class Granted:
    """Prefill: every decode rank has lent its pages; the engine may compute tokens [first, all)."""

    transfer: str
    first: int


@dataclass(frozen=True, slots=True)
class Check:
    """Decode: bring a chunk from its staging slot, if it is in one, into the transfer's pages, and compare its digest."""

    peer: str
    transfer: str
    epoch: int
    seq: int
    pair: int
    layers: Range
    tokens: Range
    slot: int | None
    digest: bytes


class Stages(msgspec.Struct, frozen=True):
    """The life of a transfer that was delivered, in seconds by decode's clock; the last three are its `seconds`."""

    expect_to_offer: float = 0.0
    """Decode's request was there, prefill's was not; 0 where the offer came first."""
    offer_to_grant: float = 0.0
    """Prefill's was there, decode had no pages for it yet."""
    grant_to_first_byte: float = 0.0
    """Until the first chunk had landed: prefill computes meanwhile."""
    first_byte_to_last: float = 0.0
    last_byte_to_commit: float = 0.0
    """Chunks are brought into place and compared, and prefill has said what it had to."""


NO_STAGES: Final = Stages()


@dataclass(frozen=True, slots=True)
class Delivered:
    """The transfer is complete. On decode the pages may be read; on prefill they may be reused."""

    transfer: str
    handover: bytes
    wire_bytes: int
    seconds: float
    """From the first grant (decode) or the first ready chunk (prefill) to the commit."""
    counted: Counted = field(default_factory=Counted)
    """What counts of `wire_bytes`, and the digest of all of it: the same at both ends."""
    stages: Stages = NO_STAGES
    """Known on decode."""


class Leg(Protocol):
    """A leg of either end."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that crossed."""

    @property
    def counted(self) -> Counted:
        """What counts of it."""


def delivered(
    transfer: str, handover: bytes, legs: Collection[Leg], seconds: float, stages: Stages = NO_STAGES
) -> Delivered:
    """Return the end of a transfer that is complete on all its legs."""
    counted = Counted()
    for leg in legs:
        counted += leg.counted
    return Delivered(transfer, handover, sum(leg.wire_bytes for leg in legs), seconds, counted, stages)


@dataclass(frozen=True, slots=True)
class Failed:
    """The transfer will not complete. `held`: its pages must not be reused until `Released`."""

    transfer: str
    reason: str
    held: bool


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing can touch the pages of a failed transfer any more."""

    transfer: str


@dataclass(frozen=True, slots=True)
class FenceLink:
    """Decode: end the peer's data connection for good, then call `link_fenced`."""

    peer: str


Action = Send | Write | Relink | Granted | Check | Delivered | Failed | Released | FenceLink


class LegState(msgspec.Struct, frozen=True):
    """One leg of a transfer, as `/debug/transfers` and `regauge top` show it."""

    peer: str
    state: str
    epoch: int
    in_flight: int
    """Chunks being written (prefill), or brought into place and compared (decode)."""
    chunks: int
    """Chunks written (prefill) or verified (decode) in this epoch."""
    resent: int
    wire_bytes: int
    credit: int | None
    """Bytes that may be written in this epoch; None: all."""
    nic: int
    """Position of decode's NIC that they come over."""
    progress: float
    """Share of the layers and tokens that are written (prefill) or verified (decode)."""


class TransferState(msgspec.Struct, frozen=True):
    """One transfer that is not over."""

    transfer: str
    role: str
    state: str
    tokens: int
    age_s: float
    deadline_in_s: float
    reason: str
    legs: list[LegState]

"""The life of a transfer, sans-IO: events and the time go in, actions come out. The two sides are `sender.py`
(prefill) and `receiver.py` (decode); the drivers are `outbound.py` and `inbound.py`.

1. The gateway sends a request to both workers. Decode leases pages and *expects* the transfer; prefill *offers* it.
2. When both have happened, in either order, decode *grants* its pages. Prefill computes nothing before.
3. Prefill's engine finishes a layer of a prompt chunk: the chunk is *ready*. Ready chunks are written in order, several layers
   at a time when the link lags behind, one write in flight per link.
4. *Written* tells decode that a chunk has landed; from a staging slot decode scatters it into its pages and frees the slot.
5. *Finish* carries the first token. When every layer and token has arrived exactly once, decode *commits*: its engine may
   read the pages, and prefill may reuse its own.

A transfer that fails (abort, lease or deadline over, broken link, broken rule) is reported once. Its decode pages are quarantined until
prefill says *fenced*, or until the link is gone and its data connection is fenced. Its prefill pages are kept
until no write reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from regauge.move import messages as m

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer."""

    peer: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Write:
    """Prefill: write a chunk into the peer's pages (page table `pages` from token `origin`) or staging slot."""

    peer: str
    transfer: str
    seq: int
    layers: Range
    tokens: Range
    pages: tuple[int, ...]
    origin: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class Granted:
    """Prefill: decode has lent its pages; the engine may compute."""

    transfer: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """Decode: bring a chunk from a staging slot into the transfer's pages."""

    peer: str
    transfer: str
    seq: int
    layers: Range
    tokens: Range
    slot: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """The transfer is complete. On decode the pages may be read; on prefill they may be reused."""

    transfer: str
    handover: bytes
    wire_bytes: int
    seconds: float
    """From the grant (decode) or the first ready chunk (prefill) to the commit."""


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


Action = Send | Write | Granted | Scatter | Delivered | Failed | Released | FenceLink

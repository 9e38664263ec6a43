"""What a worker says of its load: what the gateway routes by."""

from __future__ import annotations

from typing import Literal

import msgspec

from regauge.config import Role
from regauge.move.state import Totals
from regauge.plane_meter import InterfaceBytes


class NicLoad(msgspec.Struct, frozen=True):
    """One NIC that a decode worker's KV comes in by, as its flow control sees it."""

    name: str
    granted_bytes: int
    """On their way."""
    queued_bytes: int
    """Ready at prefill workers, without credit."""
    backlog_bytes: int
    """Of all transfers that were taken, not landed: computed already or not."""
    bytes_per_s: float
    """Measured while there was work; the line rate before. `backlog_bytes / bytes_per_s` seconds are before a new transfer."""


class Health(msgspec.Struct, frozen=True):
    """A worker's state: pages of its KV pool, requests that run and that wait, what its transfers came to."""

    status: Literal["ok", "draining"]
    role: Role
    """What it was started as."""
    name: str
    pid: int
    model: str
    free_pages: int = 0
    pages: int = 0
    """0: an engine that tells nothing of its pages and requests."""
    running: int = 0
    waiting: int = 0
    quarantined_pages: int = 0
    transfers: Totals = Totals()
    roles: list[Role] = []
    """Requests of which roles it takes now; empty: of `role`, unless it drains."""
    computes: bool = False
    """Whether it can decode a prompt that it has to compute itself."""
    page_size: int = 0
    """Tokens; 0: not told."""
    queued_tokens: int = 0
    """Of prompts that are here and not computed yet: waiting for pages, for a grant, or for their turn, or in part."""
    decoding: int = 0
    """Requests that decode."""
    slots: int = 0
    """Most requests that decode together; more take turns."""
    prefill_tokens_per_s: float = 0.0
    """Measured while prompts were computed; 0: not yet."""
    tpot_s: float = 0.0
    """Measured seconds from a token of a request to its next; 0: not yet."""
    cache_seq: int = 0
    """Number of the latest event of its prefix cache."""
    nics: list[NicLoad] = []
    receipts: int = 0
    """Number of its latest receipt."""
    clock_s: float = 0.0
    """`time.monotonic()` of the worker: rates are differences of two answers by this clock; 0: not told."""
    host: str = ""
    """Name of its machine; empty: not told, and then neither are the interfaces."""
    interfaces: list[InterfaceBytes] = []
    """Of the planes that its configuration declares."""
    off_plane_bytes: int = 0
    """KV that the compute plane's interfaces cannot have carried: at least so much, since it began."""

"""What the decode side keeps of one transfer on its way in, and of the peers that it has no correct path from."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from regauge.move.counted import Counted
from regauge.move.crossing import PageTable
from regauge.move.protocol import NO_STAGES, Stages
from regauge.plan.cost import Mode

REFUSED_S = 10.0
"""Seconds for which a refusal answers transfers that come after it. Prefill links when it offers, which may be before decode expects; for
longer, a peer that was started again with another layout would be held to its old one."""
MAX_REFUSED = 1024
"""Peers whose refusal is remembered."""


@dataclass(frozen=True)
class Arrival:
    """A transfer that is complete: its pages are committed."""

    handover: bytes
    path: str
    mode: Mode
    """Of the first pair of state groups."""
    wire_bytes: int
    seconds: float
    counted: Counted = field(default_factory=Counted)
    """What counts of the bytes, and its digest."""
    stages: Stages = NO_STAGES
    spans: int = 0
    """Boxes in which its bytes lie here."""


@dataclass(eq=False)
class Incoming:
    """One transfer on its way in."""

    tables: tuple[PageTable, ...]
    future: asyncio.Future[Arrival]
    peers: tuple[str, ...]
    tokens: int
    spans: int = 0
    """Boxes of the chunks that have been checked, each time that they were."""
    covered: bool = False
    """Its legs are known to bring everything that this rank keeps."""


class Refusals:
    """Why peers have been refused lately. Without it, who waits for such a peer would wait as long as for an offer."""

    def __init__(self) -> None:
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def add(self, peer: str, reason: str, now: float) -> None:
        """A link to the peer was refused."""
        self._refused.pop(peer, None)
        self._refused[peer] = (now + REFUSED_S, reason)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def lift(self, peer: str) -> None:
        """The peer has come again, and this side has nothing against it."""
        self._refused.pop(peer, None)

    def reason(self, peers: Iterable[str], now: float) -> str:
        """Return why the first refused one of the peers was; empty: none was."""
        for peer in peers:
            until, reason = self._refused.get(peer, (0.0, ""))
            if now < until:
                return f"no link from {peer}: {reason}"
        return ""

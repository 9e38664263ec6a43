"""One link as each of its ends keeps it. Belongs to the event loop of `inbound.py` or `outbound.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from regauge.move import messages as m
from regauge.move.channel import Channel
from regauge.move.crossing import DEPTH, Checker, Writer
from regauge.move.memory import Slab
from regauge.move.outleg import CHUNK_BYTES
from regauge.move.rails import Connections
from regauge.move.state import SHOWN_DIGITS, LinkState
from regauge.move.transport import Region
from regauge.plan.cost import Mode

MIN_SLOT = 1 << 20
MAX_SLOTS = 4


@dataclass(eq=False)
class InLink:
    """The decode side's end."""

    peer: str
    channel: Channel
    staging: Slab
    regions: tuple[Region, ...]
    """Of the staging slab, on each NIC."""
    checker: Checker
    path: str
    modes: tuple[Mode, ...]
    """How each pair of state groups is written."""
    sessions: list[str]
    instance: str
    thread: ThreadPoolExecutor
    far: bool = False
    """Its chunks come over a network."""
    checks: set[asyncio.Task[None]] = field(default_factory=set)
    fencing: bool = False

    def state(self, word: str) -> LinkState:
        """Describe the link, whose state is `word`."""
        up_s = time.monotonic() - self.channel.since
        return LinkState(
            self.peer, word, self.path, list(self.modes), up_s, self.sessions[0][:SHOWN_DIGITS], None, len(self.checks),
            self.channel.resent, self.channel.resumed,
        )  # fmt: skip


def slots(staging: Slab) -> m.Staging:
    """Divide a staging slab into slots."""
    count = max(1, min(MAX_SLOTS, staging.nbytes // MIN_SLOT))
    return m.Staging(staging.address, staging.nbytes // count // 64 * 64, count)


def flying(links: Iterable[InLink]) -> int:
    """Return the most bytes that have landed over a network and were not announced yet: peers keep to the same bounds."""
    return sum(DEPTH * max(CHUNK_BYTES, link.checker.slot_bytes) for link in links if link.far)


@dataclass(eq=False)
class OutLink:
    """The prefill side's end."""

    peer: str
    channel: Channel
    data: Connections
    writer: Writer
    slot: Slab | None
    regions: tuple[Region, ...]
    """Of the slot."""
    thread: ThreadPoolExecutor
    instance: str
    epoch: int
    """Grants that are not newer are of an earlier link."""
    far: bool = False
    """Its chunks go over a network."""
    task: asyncio.Task[None] | None = None
    writes: set[asyncio.Task[None]] = field(default_factory=set)
    closing: bool = False

    def state(self, free_slots: int | None) -> LinkState:
        """Describe the link."""
        up_s = time.monotonic() - self.channel.since
        return LinkState(
            self.peer, "closing" if self.closing else "up", self.writer.crossing.plan.verdict.path,
            list(self.writer.modes), up_s, self.data.sessions[0][:SHOWN_DIGITS], free_slots, len(self.writes),
        )  # fmt: skip

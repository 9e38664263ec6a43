"""One link as each of its ends keeps it. Belongs to the event loop of `inbound.py` or `outbound.py`."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from regauge.move.channel import Channel
from regauge.move.crossing import Checker, Writer
from regauge.move.memory import Slab
from regauge.move.rails import Connections
from regauge.move.state import SHOWN_DIGITS, LinkState
from regauge.move.transport import Region
from regauge.plan.cost import Mode


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
    checks: set[asyncio.Task[None]] = field(default_factory=set)
    fencing: bool = False

    def state(self, word: str) -> LinkState:
        """Describe the link, whose state is `word`."""
        up_s = time.monotonic() - self.channel.since
        return LinkState(
            self.peer, word, self.path, list(self.modes), up_s, self.sessions[0][:SHOWN_DIGITS], None, len(self.checks),
            self.channel.resent, self.channel.resumed,
        )  # fmt: skip


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

"""What the engine's side holds of one transfer on its way out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from regauge.move.crossing import PageTable
from regauge.move.protocol import Delivered, Range
from regauge.plan.cost import Mode

if TYPE_CHECKING:
    from regauge.move.outbound import OutboundLinks


@dataclass(eq=False)
class Outgoing:
    """One transfer on its way out. `ready` and `finish` are for the event loop's thread."""

    transfer: str
    tables: tuple[PageTable, ...]
    path: str
    mode: Mode
    """Of the first pair of state groups."""
    _links: OutboundLinks
    _done: asyncio.Future[Delivered]
    _free: Callable[[], None] = field(repr=False)
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when every decode rank has lent its pages."""
    first: int = 0
    """Decode has the tokens before this one already; known once granted."""

    def ready(self, layers: Range, tokens: Range) -> None:
        """Layers [first, end) of the model hold their state for tokens [first, end) in the pool."""
        self._links.run(self._links.sender.ready(self.transfer, layers, tokens, time.monotonic()))

    def finish(self, handover: bytes) -> None:
        """Everything has been made ready."""
        self._links.run(self._links.sender.finish(self.transfer, handover))

    def cancel(self, reason: str) -> None:
        """Give the transfer up; `done` then raises TransferFailed unless it has ended already."""
        self._links.run(self._links.sender.cancel(self.transfer, reason))

    async def wait_granted(self) -> None:
        """Wait until decode has lent its pages. Raises TransferFailed if the transfer ends before."""
        granted = asyncio.create_task(self.granted.wait())
        waiting: list[asyncio.Future[Any]] = [granted, self._done]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            granted.cancel()
        if not self.granted.is_set():
            await self.done()

    @property
    def finished(self) -> asyncio.Future[Delivered]:
        """Done when the transfer has ended, in whichever way."""
        return self._done

    async def done(self) -> Delivered:
        """Wait until decode has committed. Raises TransferFailed with the reason."""
        return await asyncio.shield(self._done)

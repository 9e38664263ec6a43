"""Tasks that nobody waits for until all is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """Those that run."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], also: set[asyncio.Task[None]] | None = None) -> None:
        """Run something; while it runs, it is in `also` too."""
        task = asyncio.create_task(work)
        for group in (self.running, also):
            if group is not None:
                group.add(task)
                task.add_done_callback(group.discard)

    async def end(self) -> None:
        """Cancel all that run, and wait until they have ended."""
        ending = list(self.running)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

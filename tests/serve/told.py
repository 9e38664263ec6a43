"""What a source of workers tells, one change at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve_rig import WAIT_S

from regauge.serve.discovery import Source
from regauge.serve.registry import Change


@asynccontextmanager
async def one_by_one(source: Source) -> AsyncIterator[AsyncIterator[Change]]:
    """Give the changes that a source tells, until the block is left."""
    told = source.watch()

    async def each() -> AsyncIterator[Change]:
        async for changes in told:
            for change in changes:
                yield change

    try:
        yield each()
    finally:
        await told.aclose()  # type: ignore[attr-defined]  # a generator's


async def following(changes: AsyncIterator[Change]) -> Change:
    """Wait for the next change."""
    async with asyncio.timeout(WAIT_S):
        return await anext(changes)

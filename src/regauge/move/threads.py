"""Blocking calls of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_undoing: set[asyncio.Task[None]] = set()


async def in_thread(call: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Call in a thread, as `asyncio.to_thread`. Where the caller is cancelled meanwhile, what comes of it is undone, in a thread too, and waited for.

    Whoever is cancelled once more does not wait; it is undone all the same.
    """
    future = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        undoing = asyncio.create_task(_undo(future, undo))
        _undoing.add(undoing)
        undoing.add_done_callback(_undoing.discard)
        await asyncio.shield(undoing)
        raise


async def _undo(future: asyncio.Future[T], undo: Callable[[T], None]) -> None:
    await asyncio.wait([future])
    if not future.cancelled() and future.exception() is None:
        await asyncio.to_thread(undo, future.result())

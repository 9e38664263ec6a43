"""Blocking calls of an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Call in a thread, as `asyncio.to_thread`. Where the caller is cancelled meanwhile, what comes of it is undone, in a thread too."""
    future = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(functools.partial(_drop, undo))
        raise


def _drop(undo: Callable[[T], None], future: asyncio.Future[T]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.get_loop().run_in_executor(None, undo, future.result())

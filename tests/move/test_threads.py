"""Calls in threads whose caller goes away: what comes of them is undone before the caller knows."""

from __future__ import annotations

import asyncio
import threading

import pytest

from regauge.move.threads import in_thread

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def begun(free: threading.Event, undone: list[int]) -> asyncio.Task[int]:
    """A call that has begun, and ends when it is let."""
    reached = threading.Event()

    def call() -> int:
        reached.set()
        assert free.wait(20)
        return 7

    task = asyncio.create_task(in_thread(call, undone.append))
    await asyncio.to_thread(reached.wait, 20)
    return task


async def test_what_is_wanted_is_not_undone() -> None:
    free, undone = threading.Event(), list[int]()
    task = await begun(free, undone)
    free.set()
    assert await task == 7
    assert undone == []


async def test_who_is_cancelled_waits_until_it_is_undone() -> None:
    free, undone = threading.Event(), list[int]()
    task = await begun(free, undone)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == [7]


async def test_who_is_cancelled_twice_does_not_wait_and_it_is_undone_all_the_same() -> None:
    free, undone = threading.Event(), list[int]()
    task = await begun(free, undone)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == []
    free.set()
    async with asyncio.timeout(20):
        while not undone:  # noqa: ASYNC110  # nobody waits for it
            await asyncio.sleep(0.001)


async def test_a_call_that_breaks_leaves_nothing_to_undo() -> None:
    def call() -> int:
        raise OSError("no memory")

    undone = list[int]()
    with pytest.raises(OSError, match="no memory"):
        await in_thread(call, undone.append)
    assert undone == []

"""Many deadlines on one timer: each rings once and in time, or not at all."""

from __future__ import annotations

import asyncio

import pytest
from serve_rig import WAIT_S

from regauge.serve.deadlines import Deadline, Deadlines

pytestmark = pytest.mark.anyio


async def test_they_ring_in_their_order_and_not_before_their_time() -> None:
    loop, deadlines, rung = asyncio.get_running_loop(), Deadlines(), asyncio.Queue[tuple[int, float]]()
    start = loop.time()
    for number in (3, 1, 2):
        deadlines.add(start + number / 50, lambda number=number: rung.put_nowait((number, loop.time())))  # type: ignore[misc]
    async with asyncio.timeout(WAIT_S):
        came = [await rung.get() for _ in range(3)]
    assert [number for number, _ in came] == [1, 2, 3]
    assert all(at >= start + number / 50 - 0.001 for number, at in came)


async def test_what_is_cancelled_does_not_ring() -> None:
    loop, deadlines, rung = asyncio.get_running_loop(), Deadlines(), list[str]()
    done = asyncio.Event()
    first = deadlines.add(loop.time() + 0.01, lambda: rung.append("first"))
    deadlines.add(loop.time() + 0.02, done.set)
    first.cancel()
    first.cancel()
    await asyncio.wait_for(done.wait(), WAIT_S)
    assert rung == []


async def test_one_may_end_another_that_is_due_and_add_a_third() -> None:
    loop, deadlines, rung = asyncio.get_running_loop(), Deadlines(), list[str]()
    done, at = asyncio.Event(), loop.time() + 0.01
    both: list[Deadline] = []

    def ring(name: str) -> None:
        rung.append(name)
        for each in both:
            each.cancel()
        deadlines.add(loop.time() + 0.01, done.set)

    both += [deadlines.add(at, lambda: ring("one")), deadlines.add(at, lambda: ring("other"))]
    await asyncio.wait_for(done.wait(), WAIT_S)
    assert len(rung) == 1


async def test_closed_none_rings() -> None:
    loop, deadlines, done = asyncio.get_running_loop(), Deadlines(), asyncio.Event()
    deadlines.add(loop.time() + 0.01, done.set)
    deadlines.close()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(done.wait(), 0.05)

"""Pages are given in order of arrival, and a waiter that gives up takes none."""

from __future__ import annotations

import asyncio

import pytest

from regauge.engines.local.prefix import PrefixCache
from regauge.errors import ProtocolError
from regauge.move.pages import PagePool
from regauge.serve.admission import Admission


@pytest.mark.anyio
async def test_a_large_request_is_not_overtaken() -> None:
    pool = PagePool(4, 16)
    admission = Admission(PrefixCache(pool))
    assert len((await admission.lease("a", 3)).pages) == 3
    large, small = (asyncio.create_task(admission.lease(n, c)) for n, c in (("large", 4), ("small", 1)))
    await asyncio.sleep(0)
    assert admission.waiting == 2
    pool.release("a")
    admission.pump()
    assert len((await large).pages) == 4
    assert not small.done()
    pool.release("large")
    admission.pump()
    assert len((await small).pages) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("granted", [False, True])
async def test_a_waiter_that_gives_up_holds_nothing(granted: bool) -> None:
    pool = PagePool(2, 16)
    admission = Admission(PrefixCache(pool))
    await admission.lease("a", 2)
    waiter = asyncio.create_task(admission.lease("b", 2))
    behind = asyncio.create_task(admission.lease("c", 1))
    await asyncio.sleep(0)
    if granted:  # the pages are set aside in the moment in which the waiter is cancelled
        pool.release("a")
        admission.pump()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    if not granted:
        pool.release("a")
        admission.pump()
    assert len((await behind).pages) == 1
    pool.check_integrity()
    assert pool.free == 1


@pytest.mark.anyio
async def test_an_owner_that_has_pages_already_is_told_so_and_nobody_else() -> None:
    pool = PagePool(4, 16)
    admission = Admission(PrefixCache(pool))
    await admission.lease("a", 1)
    await admission.lease("other", 3)
    twice, behind = (asyncio.create_task(admission.lease(n, 1)) for n in ("a", "b"))
    await asyncio.sleep(0)
    pool.release("other")
    admission.pump()
    with pytest.raises(ProtocolError, match="'a' owns pages already"):
        await twice
    assert len((await behind).pages) == 1
    assert pool.free == 2

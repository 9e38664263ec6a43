"""Requests that are given up while their link is made: nothing of it is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest
from links_rig import both, fill, mark_all, settle

from regauge.errors import ProtocolError, TransportError
from regauge.move.rails import Rails


def counts() -> tuple[int, int]:
    gc.collect()
    held = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")]
    return len(list(Path("/proc/self/fd").iterdir())), len(held)


class Turnstile:
    """Holds a call in its thread until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.free = threading.Event(), threading.Event()
        call = getattr(Rails, name)

        def held(rails: Rails, *args: object, **more: object) -> object:
            self.reached.set()
            assert self.free.wait(20)
            return call(rails, *args, **more)

        monkeypatch.setattr(Rails, name, held)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_link_whose_first_request_is_cancelled_is_there_for_the_next(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    gate = Turnstile(monkeypatch, "connect")
    async with both("direct", kind) as b:
        fill(b.source, 1)
        first = asyncio.create_task(b.out.connect("d", b.address))
        await asyncio.to_thread(gate.reached.wait, 20)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.free.set()
        arrival = b.expect("x", 40)
        sent = await b.offer("x", 40)
        await sent.wait_granted()
        mark_all(sent, 40)
        sent.finish(b"")
        await arrival
        assert len(b.into._rails.inbound()) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("call", ["connect", "register"])
async def test_a_side_that_closes_while_a_link_is_made_leaves_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, call: str
) -> None:
    async with both("widen", kind, mode="staged") as b:
        before = counts()
        gate = Turnstile(monkeypatch, "connect") if call == "connect" else Slots(monkeypatch)
        opening = asyncio.create_task(b.out.connect("d", b.address))
        await asyncio.to_thread(gate.reached.wait, 20)
        await b.out.close()
        with pytest.raises(asyncio.CancelledError):
            await opening
        gate.free.set()
        await settle(lambda: not b.into._greeting and not b.into._links and not b.into._gone)
        await settle(lambda: counts() <= before)


class Slots(Turnstile):
    """Holds the registering of the prefill side's slots."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.free = threading.Event(), threading.Event()
        call = Rails.register

        def held(rails: Rails, slab: object) -> object:
            if slab.name.startswith("slot:"):  # type: ignore[attr-defined]
                self.reached.set()
                assert self.free.wait(20)
            return call(rails, slab)  # type: ignore[arg-type]

        monkeypatch.setattr(Rails, "register", held)


@pytest.mark.anyio
async def test_slots_that_this_side_would_not_offer_are_refused_and_the_connection_is_closed() -> None:
    async with both("widen", "tcp") as b:
        before = counts()
        settings = b.out._config
        b.out._config = type(settings)(transport="tcp", staging_bytes=1 << 16)
        with pytest.raises(ProtocolError, match=r"more than transfer\.staging_bytes"):
            await b.out.connect("d", b.address)
        b.out._config = settings
        await settle(lambda: not b.into._greeting and not b.into._links and not b.into._gone)
        await settle(lambda: counts() <= before)
        await b.out.connect("d", b.address)


@pytest.mark.anyio
async def test_a_data_connection_is_closed_where_there_is_no_memory_for_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    async with both("widen", "tcp") as b:
        before = counts()
        with monkeypatch.context() as patch:
            patch.setattr("regauge.move.memory.available_bytes", lambda: 2 << 20)
            with pytest.raises(TransportError, match="available on this host"):
                await b.out.connect("d", b.address)
        await settle(lambda: not b.into._greeting and not b.into._links and not b.into._gone)
        await settle(lambda: counts() <= before)

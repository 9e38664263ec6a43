"""Writes that go out together, over real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from serve_rig import WAIT_S

from regauge.serve.outbox import Gathered, Outbox

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(outbox: Outbox) -> AsyncIterator[tuple[Gathered, socket.socket]]:
    """Yield a gathered transport and the blocking socket at its other end."""
    near, far = socket.socketpair()
    far.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
    try:
        yield Gathered(transport, outbox), far
    finally:
        transport.abort()
        far.close()


async def read(far: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(far, 100), WAIT_S)


async def test_what_one_turn_writes_goes_out_at_its_end_in_order() -> None:
    outbox = Outbox()
    async with connected(outbox) as (one, far_one), connected(outbox) as (other, far_other):
        one.write(b"a")
        other.write(bytearray(b"x"))
        one.writelines([b"b", b"c"])
        assert one.get_write_buffer_size() == 3
        with pytest.raises(BlockingIOError):
            far_one.recv(1)
        assert (await read(far_one), await read(far_other)) == (b"abc", b"x")
        one.write(b"d")
        assert await read(far_one) == b"d"


async def test_a_close_writes_first_and_an_abort_does_not() -> None:
    outbox = Outbox()
    async with connected(outbox) as (one, far_one), connected(outbox) as (other, far_other):
        one.write(b"last")
        one.close()
        other.write(b"never")
        other.abort()
        assert one.is_closing()
        assert other.is_closing()
        assert (await read(far_one), await read(far_one)) == (b"last", b"")
        assert await read(far_other) == b""


async def test_what_is_written_before_the_other_end_goes_is_no_error() -> None:
    outbox = Outbox()
    async with connected(outbox) as (one, far), connected(outbox) as (other, far_other):
        one.write(b"a")
        far.close()
        other.write(b"b")
        assert await read(far_other) == b"b"

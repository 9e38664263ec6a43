"""Control connections: planes and TLS. What they carry is tested with the links."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from certificates import Authority
from regauge.errors import AuthError, DeadlineExceeded, PeerLost, RegaugeError, TransportError
from regauge.move import channel as module
from regauge.move import messages as m
from regauge.move.channel import Channel, Door
from regauge.move.plane import Plane, resolve
from regauge.move.tls import Tls

KEY = bytes(range(32))
LOOPBACK = Plane("127.0.0.1")


@contextlib.asynccontextmanager
async def serving(
    tls: Tls | None = None, key: bytes = KEY
) -> AsyncIterator[tuple[int, asyncio.Queue[Channel | RegaugeError]]]:
    """A side that accepts; yields its port and what became of each connection."""
    found: asyncio.Queue[Channel | RegaugeError] = asyncio.Queue()

    async def accept(sock: socket.socket) -> None:
        try:
            found.put_nowait(await Channel.accept(sock, key, tls=tls))
        except RegaugeError as error:
            found.put_nowait(error)

    tasks = set()
    door = Door(lambda sock: tasks.add(asyncio.create_task(accept(sock))), LOOPBACK)
    try:
        yield door.address[1], found
    finally:
        await door.close()
        await asyncio.gather(*tasks)


async def exchange(port: int, found: asyncio.Queue[Channel | RegaugeError], tls: Tls | None, plane: Plane) -> None:
    near = await Channel.open("127.0.0.1", port, KEY, plane=plane, tls=tls)
    far = await found.get()
    assert isinstance(far, Channel)
    for side, other in ((near, far), (far, near)):
        sock = side._writer.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "a message would wait for the one before"
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "a dead host would never be noticed"
        side.send(m.Renew("x" * 150))
        assert await other.receive() == m.Renew("x" * 150)
    for each in (near, far):
        each.close()
        await each.wait_closed()


@pytest.mark.anyio
@pytest.mark.parametrize("secure", [False, True])
async def test_messages_cross_both_ways(tmp_path: Path, secure: bool) -> None:
    authority = Authority(tmp_path)
    tls = (authority.tls("a"), authority.tls("b")) if secure else (None, None)
    async with serving(tls[0]) as (port, found):
        await exchange(port, found, tls[1], LOOPBACK)
        await exchange(port, found, tls[1], resolve("lo"))


async def fails(opening: Callable[[], Awaitable[Channel]], found: asyncio.Queue[Channel | RegaugeError]) -> None:
    async def use() -> None:
        near = await opening()
        try:
            await near.receive()  # TLS 1.3: the initiator may learn only now
        finally:
            near.close()

    with pytest.raises((AuthError, PeerLost)):
        await use()
    assert isinstance(await found.get(), RegaugeError)


@pytest.mark.anyio
async def test_neither_a_certificate_nor_the_key_is_enough_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "b").mkdir()
    stranger = Authority(tmp_path / "b")
    ours = authority.tls("a")
    async with serving(ours) as (port, found):
        await fails(lambda: Channel.open("127.0.0.1", port, bytes(32), tls=authority.tls("b")), found)
        await fails(lambda: Channel.open("127.0.0.1", port, KEY, tls=stranger.tls("c")), found)
        mixed = Tls.load(*stranger.issue("d"), authority.path)
        await fails(lambda: Channel.open("127.0.0.1", port, KEY, tls=mixed), found)
        await fails(lambda: Channel.open("127.0.0.1", port, KEY), found)
    async with serving() as (port, found):
        await fails(lambda: Channel.open("127.0.0.1", port, KEY, tls=ours), found)


@pytest.mark.anyio
async def test_a_peer_on_another_plane_is_refused_before_anything_is_sent() -> None:
    async with serving() as (port, found):
        with pytest.raises(TransportError, match="outside this plane's network"):
            await Channel.open(
                "127.0.0.1", port, KEY, plane=Plane("127.0.0.2", network=ipaddress.ip_network("127.0.0.2/31"))
            )
        assert found.empty()


@pytest.mark.anyio
async def test_nobody_there_a_silent_peer_and_a_name_that_cannot_be_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(module, "HELLO_S", 0.1)
        for tls in (None, Authority(tmp_path).tls("a")):
            with pytest.raises(DeadlineExceeded):
                await Channel.open("127.0.0.1", port, KEY, tls=tls)
    with pytest.raises(PeerLost, match="cannot connect"):
        await Channel.open("127.0.0.1", port, KEY)
    with pytest.raises(PeerLost, match="cannot connect"):
        await Channel.open("a" * 300, port, KEY)

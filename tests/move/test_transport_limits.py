"""What comes at the wrong moment, lies about its size, or finds no descriptor left: an error that is ours, and nothing left behind."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from careless import CarelessTransport
from contract import KEY, MIB, Rig, Side, array, landed, make, piece
from peer_process import wait_until

from certificates import shared_tls
from regauge.errors import DeadlineExceeded, PeerLost, ProtocolError, TransportError
from regauge.move.auth import recv_exactly
from regauge.move.memory import Slab
from regauge.move.tcp import TcpTransport
from regauge.move.tls import TlsStream
from regauge.move.transport import Exported, decode_export


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Let this process open so many more descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(each.name) for each in Path("/proc/self/fd").iterdir()}
    free = [number for number in range(max(used) + count + 2) if number not in used][count]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("kind", ["shm", "tcp", "tls"])
def test_without_descriptors_a_connection_fails_as_a_transport_does_and_leaks_none(kind: str) -> None:
    rig = Rig(kind)
    with rig.stack:
        a, b = rig.side("a"), rig.side("b")
        export = b.transport.export()
        before = descriptors()
        made = 0
        for count in range(14):
            with room_for(count), suppress(TransportError), a.transport.connect(export, 0.3):
                made += 1
        wait_until(lambda: not b.transport.inbound())
        wait_until(lambda: descriptors() <= before)
        assert 0 < made < 14
        assert landed(rig.peer(a, b).post(array(piece(a, 0, b, 0, MIB)), 10))


def test_without_descriptors_no_slab_is_handed_out_by_halves(stack: ExitStack) -> None:
    transport = stack.enter_context(make("shm", "a"))
    for i in range(3):
        transport.register(stack.enter_context(Slab(4096, f"s{i}")))
    before = descriptors()
    with room_for(2), pytest.raises(TransportError, match="limit on open files"):
        transport.slabs()
    assert descriptors() == before


def enlarged(export: bytes, nbytes: int) -> bytes:
    told = decode_export(export, "shm")
    return msgspec.msgpack.encode(
        msgspec.structs.replace(told, regions=tuple(msgspec.structs.replace(r, nbytes=nbytes) for r in told.regions))
    )


def test_a_slab_that_is_smaller_than_the_export_says_is_not_mapped(stack: ExitStack) -> None:
    rig = Rig("shm", stack)
    a, b = rig.side("a", 4 * MIB), rig.side("b", MIB)
    before = descriptors()
    with pytest.raises(ProtocolError, match="not what it exported"):
        a.transport.connect(enlarged(b.transport.export(), 4 * MIB), 10)
    wait_until(lambda: descriptors() <= before)


def test_an_export_that_names_a_generation_twice_is_refused(stack: ExitStack) -> None:
    rig = Rig("shm", stack)
    b = rig.side("b")
    small = msgspec.structs.replace(b.region, nbytes=4096)
    export = msgspec.msgpack.encode(Exported("shm", b.transport.address, b.transport.session, (small, b.region)))
    with pytest.raises(ProtocolError, match="twice"):
        decode_export(export, "shm")


def test_closing_while_a_connection_comes_in(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the connection has been made, and has not begun."""
    transport = TcpTransport(key=KEY, name="b")
    stack.callback(transport.close)
    failed: list[BaseException] = []
    over = threading.Event()
    start = threading.Thread.start

    def close() -> None:
        try:
            transport.close()
        except RuntimeError as error:
            failed.append(error)
        over.set()

    closer = threading.Thread(target=close)

    def late(thread: threading.Thread) -> None:
        if thread.name.endswith("-in") and not closer.ident:
            start(closer)
            over.wait(0.3)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", late)
    host, port = transport.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10):
        assert over.wait(10)
    closer.join(10)
    assert failed == []


def side(stack: ExitStack, name: str) -> Side:
    slab = stack.enter_context(Slab(MIB, name))
    transport = stack.enter_context(CarelessTransport(key=KEY, name=name))
    return Side(transport, slab, transport.register(slab))


def test_a_carrier_that_takes_long_to_die_is_asked_for_again(stack: ExitStack) -> None:
    """Its session has ended without proof: the kernel had not reaped it in time. Later it has, and the fence says so."""
    a, b = side(stack, "a"), side(stack, "b")
    b.transport.close_s = 0.0  # type: ignore[attr-defined]  # nothing is reaped in no time
    peer = a.transport.connect(b.transport.export(), 20)
    assert landed(peer.post(array(piece(a, 0, b, 0, 100)), 10))
    peer.close()
    wait_until(lambda: not b.transport.inbound())
    assert b.transport.fence_inbound(peer.session, 10)


def test_a_peer_that_sends_a_record_byte_by_byte_is_not_waited_for_longer(stack: ExitStack) -> None:
    near, far = socket.socketpair()
    stack.callback(near.close)
    stack.callback(far.close)
    tls, deadline = shared_tls(), time.monotonic() + 10
    streams: list[TlsStream] = []
    shaking = threading.Thread(target=lambda: streams.append(tls.wrap(far, deadline, server=True)))
    shaking.start()
    client = tls.wrap(near, deadline, server=False)
    shaking.join()
    over = threading.Event()

    def drip() -> None:
        head = bytes((23, 3, 3, 64, 0))  # a record of 16 KiB: RFC 8446, 5.1
        for each in head + bytes(200):
            if over.wait(0.05):
                return
            with suppress(OSError):
                far.send(bytes((each,)))

    dripping = threading.Thread(target=drip)
    dripping.start()
    begun = time.monotonic()
    with pytest.raises((DeadlineExceeded, PeerLost)):
        recv_exactly(client, 4, begun + 0.4)
    took = time.monotonic() - begun
    over.set()
    dripping.join()
    assert took < 2
    assert os.fstat(near.fileno())

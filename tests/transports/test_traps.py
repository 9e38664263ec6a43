"""What research found of the two libraries, held against them as they are installed here."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from contract import KEY, MIB, Rig, array, landed, permuted, piece
from test_library_transport import evil

from regauge.config import NixlConfig
from regauge.errors import BoundsError, ConfigError, DeadlineExceeded, ProtocolError, TransportError
from regauge.move.library import wire
from regauge.move.library.carrier import Carrier, environment
from regauge.move.library.transport import Landing, LibraryTransport, Table
from regauge.move.mooncake import MooncakeTransport
from regauge.move.nixl import NixlTransport


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def start(stack: ExitStack, request: wire.Open, forced: dict[str, str] | None = None) -> Carrier:
    carrier = Carrier(request, environment(forced or {}, {}, ("UCX_NET_DEVICES",)))
    stack.callback(carrier.kill)
    return carrier


def test_small_writes_are_in_memory_when_they_are_said_to_be(rig: Rig) -> None:
    a, b = rig.side("a", seed=1), rig.side("b")
    peer = rig.peer(a, b)
    for i in range(200):
        a.slab.array[:8].view(np.int64)[0] = i
        assert landed(peer.post(array(piece(a, 0, b, 0, 8)), 10))
        assert b.slab.array[:8].view(np.int64)[0] == i


def test_posts_beyond_what_the_library_queues_land(rig: Rig) -> None:
    """Mooncake fails a batch of more than about 2,048 pieces; pieces of 1 MiB are 16 slices each to it."""
    a, b = rig.side("a", 6000 * 512, seed=2), rig.side("b", 6000 * 512)
    pieces, order = permuted(a, b, 6000, 512, 3)
    peer = rig.peer(a, b)
    assert landed(peer.post(pieces, 60))
    assert np.array_equal(
        b.slab.array[: 6000 * 512].reshape(6000, 512)[order], a.slab.array[: 6000 * 512].reshape(6000, 512)
    )
    long = np.repeat(array(piece(a, 0, b, 0, 2 * MIB)), 256, axis=0)
    assert landed(peer.post(long, 60))


def test_refused_posts_poison_nothing(rig: Rig) -> None:
    """Four writes that Mooncake's receiver refuses close all its lanes; here the library never sees them."""
    a, b = rig.side("a", seed=3), rig.side("b")
    peer = rig.peer(a, b)
    for i in range(10):
        with pytest.raises(BoundsError):
            peer.post(array([a.slab.address, b.slab.address + MIB + i, 64]), 10)
    assert landed(peer.post(array(piece(a, 0, b, 0, MIB)), 10))


def test_a_peer_whose_engine_is_silent_keeps_nobody_waiting(rig: Rig) -> None:
    """Mooncake waits 61 s for a silent peer, and every other transfer of that engine with it."""
    a, b = rig.side("a", seed=4), rig.side("b")
    well = rig.peer(a, b)
    silent = rig.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    address = f"127.0.0.1:{silent.getsockname()[1]}".encode()
    export = evil(rig.stack, Table(address, 4096, (Landing(1, 4096),)), rig.kind)
    begun = time.monotonic()
    with pytest.raises((DeadlineExceeded, TransportError)):
        a.transport.connect(export, 3.0)
    assert time.monotonic() - begun < 8
    assert landed(well.post(array(piece(a, 0, b, 0, MIB)), 10))


@pytest.mark.parametrize("address", [b"", b"\x80\x04K\x01.", b"\xff" * 300, b"127.0.0.1:1"])
def test_what_a_peer_says_of_its_engine_is_not_trusted(rig: Rig, address: bytes) -> None:
    a = rig.side("a")
    with pytest.raises((TransportError, ProtocolError)):
        a.transport.connect(evil(rig.stack, Table(address, 4096, ()), rig.kind), 20)


def test_mooncake_at_another_host_than_its_peer_is_refused(stack: ExitStack) -> None:
    with MooncakeTransport(key=KEY, name="a") as a, pytest.raises(TransportError, match="give both one address"):
        a.connect(evil(stack, Table(b"127.0.0.9:15000", 4096, ()), "mooncake"), 20)


def test_mooncake_does_not_take_tcp_for_rdma(stack: ExitStack) -> None:
    """Asked by itself it starts and says nothing; the transport refuses before, and the carrier after."""
    carrier = start(stack, wire.Open("regauge.move.library.mooncake", "127.0.0.1", "rdma", ("mlx5_0",)))
    with pytest.raises(TransportError, match=r"mlx5_0|does not start"):
        carrier.open(time.monotonic() + 30)


def test_mooncake_listens_everywhere_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with MooncakeTransport(key=KEY, name="a") as a:
        assert {address for address, _ in a.exposed} & {"0.0.0.0", "::"}  # noqa: S104  # compared with
    assert "firewall" in caplog.text


def test_nixl_listens_on_its_device_only() -> None:
    with NixlTransport(key=KEY, name="a", config=NixlConfig(devices=["lo"])) as a:
        assert a.exposed == []


def test_nixl_at_another_address_than_its_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"UCX listens on 127\.0\.0\.1 port"):
        NixlTransport(key=KEY, name="a", host="127.0.0.5", config=NixlConfig(devices=["lo"]))


def test_nixl_itself_does_not_start_without_its_devices(stack: ExitStack) -> None:
    carrier = start(stack, wire.Open("regauge.move.library.nixl", "127.0.0.1", "ucx", ("lo",)))
    with pytest.raises(TransportError, match="every network"):
        carrier.open(time.monotonic() + 30)


def children() -> set[str]:
    """Processes that this one has started and not yet waited for."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for each in lists for pid in each.read_text(encoding="ascii").split()}


def test_nothing_is_left_when_sides_close(rig: Rig) -> None:
    before = children()
    a, b = rig.side("a", seed=5), rig.side("b")
    peer = rig.peer(a, b)
    assert landed(peer.post(array(piece(a, 0, b, 0, MIB)), 10))
    assert isinstance(a.transport, LibraryTransport)
    assert len(children() - before) == 2
    peer.close()
    for each in (a, b):
        each.transport.close()
    assert children() == before


def test_a_withdrawn_slab_is_mapped_again_elsewhere(rig: Rig) -> None:
    """A stale address must not be anybody's: the same slab has another one in each carrier."""
    a, b = rig.side("a", seed=6), rig.side("b")
    first, second = rig.peer(a, b), rig.peer(a, b)
    assert isinstance(b.transport, LibraryTransport)
    bases = {each.base(b.region.generation) for each in b.transport.pool.carriers()}
    assert len(bases) == 2
    for peer in (first, second):
        assert landed(peer.post(array(piece(a, 0, b, 0, MIB)), 10))

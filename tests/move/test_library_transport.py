"""What surrounds a transfer library: carriers, shared and not, withdrawn slabs, evil owners, failures of the library."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from careless import CarelessTransport
from careless_library import BREAKS, HANGS
from contract import KEY, MIB, Side, array, landed, piece
from peer_process import freeze, wait_until

from certificates import shared_tls
from regauge.errors import AuthError, BoundsError, DeadlineExceeded, PeerLost, TransportError
from regauge.move.library.peer import LibraryPeer
from regauge.move.library.transport import MAX_REGIONS, Landing, Table
from regauge.move.listener import Hello, Listener, Session, send_message
from regauge.move.memory import Slab
from regauge.move.tls import Tls
from regauge.move.transport import Exported, new_session


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def side(stack: ExitStack, name: str, nbytes: int = MIB, peers_per_carrier: int = 1, tls: Tls | None = None) -> Side:
    slab = stack.enter_context(Slab(nbytes, name))
    slab.array[:] = np.random.default_rng(1).integers(0, 256, slab.nbytes, dtype=np.uint8)
    transport = CarelessTransport(key=KEY, name=name, peers_per_carrier=peers_per_carrier, tls=tls)
    stack.enter_context(transport)
    return Side(transport, slab, transport.register(slab))


def connect(stack: ExitStack, a: Side, b: Side) -> LibraryPeer:
    peer = a.transport.connect(b.transport.export(), 20)
    assert isinstance(peer, LibraryPeer)
    return stack.enter_context(peer)


def pool(a: Side) -> list[int]:
    assert isinstance(a.transport, CarelessTransport)
    return [each.pid for each in a.transport.pool.carriers()]


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def whole(a: Side, b: Side, times: int = 1) -> np.ndarray:
    return np.repeat(array(piece(a, 0, b, 0, a.slab.nbytes)), times, axis=0)


def test_a_post_that_failed_has_stopped_once_the_owner_has_noticed(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b")
    peer = connect(stack, a, b)
    (owner,) = pool(b)
    freeze(owner)
    ticket = peer.post(array(piece(a, 0, b, 0, 4096)), 0.3)
    assert ticket.wait(10)
    assert isinstance(ticket.error, DeadlineExceeded)
    assert peer.fence(10)
    assert pool(b) == []
    wait_until(lambda: b.transport.inbound() == [])
    b.slab.array[:] = 0
    assert landed(connect(stack, a, b).post(array(piece(a, 0, b, 8192, 4096)), 10))
    assert not b.slab.array[:8192].any()


def test_each_peer_has_a_carrier_of_its_own_and_addresses_differ(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b")
    peers = [connect(stack, a, b) for _ in range(3)]
    assert len({peer.carrier.pid for peer in peers} | set(pool(b))) == 6
    assert isinstance(b.transport, CarelessTransport)
    bases = {each.base(b.region.generation) for each in b.transport.pool.carriers()}
    assert len(bases) == 3
    assert all(base is not None and base > 1 << 40 for base in bases)


def test_a_shared_carrier_outlives_writers_that_say_that_they_have_stopped(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b", peers_per_carrier=3)
    first, second, third = (connect(stack, a, b) for _ in range(3))
    (shared,) = pool(b)
    assert b.transport.fence_inbound(first.session, 10)
    late = first.post(whole(a, b), 10)
    assert late.wait(5)
    assert isinstance(late.error, PeerLost)
    second.close()
    wait_until(lambda: len(b.transport.inbound()) == 1)
    assert pool(b) == [shared]
    assert landed(third.post(whole(a, b), 10))
    third.close()
    wait_until(lambda: pool(b) == [])


def test_a_writer_that_does_not_say_so_takes_its_carrier_with_it(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b", peers_per_carrier=2)
    stuck, well, apart = (connect(stack, a, b) for _ in range(3))
    assert len(pool(b)) == 2
    assert landed(stuck.post(whole(a, b), 10))
    freeze(stuck.carrier.pid)
    ticket = stuck.post(whole(a, b, 8), 60)
    wait_until(lambda: ticket.state == "sending")
    assert b.transport.fence_inbound(stuck.session, 10)
    assert len(pool(b)) == 1
    b.slab.array[:] = 0
    with contextlib.suppress(ProcessLookupError):  # the writer may have noticed, and killed it
        os.kill(stuck.carrier.pid, signal.SIGCONT)
    assert ticket.wait(10)
    assert ticket.state == "failed"
    ended = well.post(whole(a, b), 10)
    assert ended.wait(10)
    assert isinstance(ended.error, PeerLost)
    assert not b.slab.array.any()
    assert landed(apart.post(whole(a, b), 10))


def test_sessions_go_over_tls_where_it_is_configured(stack: ExitStack) -> None:
    a, b = side(stack, "a", tls=shared_tls()), side(stack, "b", peers_per_carrier=2, tls=shared_tls())
    bare = side(stack, "bare")
    with pytest.raises((AuthError, PeerLost)):
        bare.transport.connect(b.transport.export(), 5)
    first, second = connect(stack, a, b), connect(stack, a, b)
    assert landed(first.post(whole(a, b), 10))
    assert b.transport.fence_inbound(first.session, 10)  # asks, and is answered, through TLS
    assert landed(second.post(whole(a, b), 10))
    b.transport.unregister(b.region)
    late = second.post(whole(a, b), 10)
    assert late.wait(10)
    assert isinstance(late.error, BoundsError)
    assert len(pool(b)) == 1


def test_a_withdrawal_does_not_wait_for_a_writer_that_hangs(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b")
    peer = connect(stack, a, b)
    freeze(peer.carrier.pid)
    ticket = peer.post(whole(a, b, 8), 60)
    wait_until(lambda: ticket.state == "sending")
    b.transport.unregister(b.region)
    b.slab.array[:] = 0
    assert ticket.wait(10)
    assert ticket.state == "failed"
    assert pool(b) == []
    assert not b.slab.array.any()


def test_withdrawn_slabs_are_given_back_by_the_carriers_on_both_sides(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b")
    passing, target = stack.enter_context(Slab(MIB, "passing")), stack.enter_context(Slab(MIB, "target"))
    there = b.transport.register(target)
    peer = connect(stack, a, b)
    here = a.transport.register(passing)
    assert landed(peer.post(array([passing.address, target.address, MIB]), 10))
    (owner,) = pool(b)
    assert "regauge:passing" in maps(peer.carrier.pid)
    assert "regauge:target" in maps(owner)
    a.transport.unregister(here)
    b.transport.unregister(there)
    wait_until(lambda: "regauge:passing" not in maps(peer.carrier.pid))
    assert "regauge:target" not in maps(owner)
    assert landed(peer.post(whole(a, b), 10))
    with pytest.raises(BoundsError):
        peer.post(array([passing.address, b.slab.address, 1]), 10)


def test_a_peer_that_is_connecting_delays_no_withdrawal(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its carrier never finishes registering: the withdrawal ends that too, within its own bound."""
    hangs = tmp_path / "hangs"
    monkeypatch.setenv(HANGS, str(hangs))
    a, b = side(stack, "a"), side(stack, "b")
    hangs.touch()
    with ThreadPoolExecutor(1) as threads:
        trying = threads.submit(a.transport.connect, b.transport.export(), 20)
        wait_until(lambda: len(pool(b)) == 1)
        begun = time.monotonic()
        b.transport.unregister(b.region)
        assert time.monotonic() - begun < CarelessTransport.close_s
        assert isinstance(trying.exception(10), PeerLost)
    assert pool(b) == []


def test_many_regions_are_refused(stack: ExitStack) -> None:
    a = side(stack, "a")
    slabs = [stack.enter_context(Slab(1, f"s{i}")) for i in range(MAX_REGIONS)]
    for slab in slabs[1:]:
        a.transport.register(slab)
    with pytest.raises(TransportError, match="few, large ones"):
        a.transport.register(slabs[0])


def test_a_failed_write_ends_the_peer_with_the_librarys_reason(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    monkeypatch.setenv(BREAKS, str(broken))
    a, b = side(stack, "a"), side(stack, "b")
    peer = connect(stack, a, b)
    assert landed(peer.post(whole(a, b), 10))
    broken.touch()
    tickets = [peer.post(whole(a, b), 10) for _ in range(2)]
    assert all(ticket.wait(10) for ticket in tickets)
    assert [ticket.state for ticket in tickets] == ["failed", "failed"]
    assert "something is wrong (-1)" in tickets[0].reason
    assert not isinstance(tickets[0].error, PeerLost | DeadlineExceeded)
    assert isinstance(tickets[1].error, PeerLost)
    assert peer.fence(10)
    broken.unlink()
    assert landed(connect(stack, a, b).post(whole(a, b), 10))


def test_posts_that_wait_too_long_fail_alone(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b")
    peer = connect(stack, a, b)
    freeze(pool(b)[0])
    first, second = peer.post(whole(a, b, 8), 60), peer.post(whole(a, b), 0.3)
    assert second.wait(10)
    assert isinstance(second.error, DeadlineExceeded)
    assert "not begun" in second.reason
    os.kill(pool(b)[0], signal.SIGCONT)
    assert landed(first)
    assert landed(peer.post(whole(a, b), 10))


def test_a_stranger_costs_no_process(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b")
    stranger = stack.enter_context(CarelessTransport(key=b"x" * 32, name="stranger"))
    with pytest.raises(AuthError):
        stranger.connect(b.transport.export(), 5)
    assert pool(b) == []
    assert landed(connect(stack, a, b).post(whole(a, b), 10))


class Evil(Session):
    """An owner that holds the key, and sends whatever table it likes."""

    def __init__(self, sock: socket.socket, hello: Hello, table: Table) -> None:
        super().__init__(sock, hello)
        self._evil = table

    def run(self) -> None:
        send_message(self.sock, self._evil, time.monotonic() + 5)
        self.sock.recv(1)

    def fence(self, deadline: float) -> bool:  # noqa: ARG002  # it always ends
        self.hang_up()
        return True


def evil(stack: ExitStack, table: Table, kind: str = "careless") -> bytes:
    """Return the export of an owner that answers with `table`."""
    sock, transport = socket.create_server(("127.0.0.1", 0)), new_session()
    listener = Listener(
        sock, key=KEY, purpose=f"regauge-{kind}", transport=transport, admit=lambda s, hello: Evil(s, hello, table)
    )
    stack.callback(lambda: listener.close(time.monotonic() + 5))
    return msgspec.msgpack.encode(Exported(kind, f"127.0.0.1:{sock.getsockname()[1]}", transport, ()))


def test_a_peer_whose_library_is_silent_keeps_nobody_waiting(stack: ExitStack) -> None:
    a, b = side(stack, "a"), side(stack, "b")
    well = connect(stack, a, b)
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    export = evil(stack, Table(f"127.0.0.1:{silent.getsockname()[1]}".encode(), 4096, (Landing(1, 4096),)))
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        a.transport.connect(export, 1.0)
    assert time.monotonic() - begun < 5
    assert landed(well.post(whole(a, b), 10))


@pytest.mark.parametrize("address", [b"", b"\x80\x04K\x01.", b"nowhere", b"x:y" * 1000])
def test_a_table_with_garbage_is_refused(stack: ExitStack, address: bytes) -> None:
    a = side(stack, "a")
    export = evil(stack, Table(address, 4096, ()))
    with pytest.raises(TransportError):
        a.transport.connect(export, 10)

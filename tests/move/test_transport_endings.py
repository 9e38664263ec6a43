"""How every transport ends: deadlines, fences, closing, and nothing left behind."""

import gc
import threading
from pathlib import Path

from contract import CONNECTIONS, MIB, Rig, array, landed, long_post, make, piece
from peer_process import wait_until

from regauge.errors import DeadlineExceeded, PeerLost
from regauge.move.memory import Slab
from regauge.move.transport import Ticket, Transport


def test_close_in_flight_ends_the_tickets(rig: Rig) -> None:
    a, b = rig.side("a", 32 * MIB), rig.side("b", 32 * MIB)
    peer = rig.peer(a, b)
    ended = threading.Event()
    tickets = [long_post(peer, a, b) for _ in range(3)]
    tickets[-1].add_done_callback(lambda _: ended.set())
    peer.close()
    assert ended.is_set()
    assert all(ticket.wait(5) for ticket in tickets)
    assert tickets[-1].state == "failed"
    assert "closed by this side" in tickets[-1].reason
    late = peer.post(array(piece(a, 0, b, 0, 10)), 10)
    assert late.wait(5)
    assert isinstance(late.error, PeerLost)
    peer.close()


def test_after_a_fence_nothing_lands(rig: Rig) -> None:
    a, b = rig.side("a", 32 * MIB, seed=40), rig.side("b", 32 * MIB)
    peer = rig.peer(a, b)
    tickets = [long_post(peer, a, b) for _ in range(3)]
    assert peer.fence(10)
    assert all(ticket.wait(5) for ticket in tickets)
    assert {ticket.state for ticket in tickets} <= {"landed", "fenced"}
    assert tickets[-1].state == "fenced"
    b.slab.array[:] = 0
    late = peer.post(array(piece(a, 0, b, 0, MIB)), 10)
    assert late.wait(5)
    assert late.state in ("failed", "fenced")
    assert peer.fence(10)
    assert not b.slab.array.any()
    assert landed(rig.peer(a, b).post(array(piece(a, 0, b, 0, MIB)), 10))


def test_the_receiver_can_fence_a_writer(rig: Rig) -> None:
    a, b = rig.side("a", 32 * MIB, seed=41), rig.side("b", 32 * MIB)
    peer, other = rig.peer(a, b), rig.peer(a, b)
    tickets = [long_post(peer, a, b) for _ in range(3)]
    assert b.transport.fence_inbound(peer.session, 10)
    b.slab.array[:] = 0
    assert all(ticket.wait(10) for ticket in tickets)
    assert tickets[-1].state == "failed"
    assert not b.slab.array.any()
    assert [each.session for each in b.transport.inbound()] == [other.session]
    assert b.transport.fence_inbound(peer.session, 1)
    assert b.transport.fence_inbound("never seen", 1)
    assert landed(other.post(array(piece(a, 0, b, 0, MIB)), 10))


def test_a_deadline_ends_a_post_that_takes_too_long(rig: Rig) -> None:
    a, b = rig.side("a", 32 * MIB), rig.side("b", 32 * MIB)
    peer = rig.peer(a, b)
    ticket = long_post(peer, a, b, 0.05)
    assert ticket.wait(10)
    assert isinstance(ticket.error, DeadlineExceeded)
    assert ticket.bytes_done < ticket.nbytes == 64 * 32 * MIB
    assert peer.fence(10)


def test_a_callback_may_close_its_peer(rig: Rig) -> None:
    a, b = rig.side("a", 8 * MIB), rig.side("b", 8 * MIB)
    peer = rig.peer(a, b)
    closed = threading.Event()

    def close(_: Ticket) -> None:
        peer.close()
        closed.set()

    peer.post(array(piece(a, 0, b, 0, 8 * MIB)), 10).add_done_callback(close)
    assert closed.wait(10)


def test_a_withdrawn_slab_is_unmapped_though_a_peer_that_used_it_stays(rig: Rig) -> None:
    a, b = rig.side("a"), rig.side("b")
    peer = rig.peer(a, b)
    with Slab(8 * MIB, "passing") as slab:
        region = a.transport.register(slab)
        assert landed(peer.post(array([slab.address, b.slab.address, MIB]), 10))
        a.transport.unregister(region)
    wait_until(lambda: "regauge:passing" not in Path("/proc/self/maps").read_text(encoding="utf-8"))


def counts() -> tuple[int, int, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("regauge:")
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps


def test_many_connections_leave_nothing_behind(rig: Rig) -> None:
    a, b = rig.side("a", 4096, seed=50), rig.side("b", 4096)
    with a.transport.connect(b.transport.export(), 10) as peer:
        assert landed(peer.post(array(piece(a, 0, b, 0, 4096)), 10))
        last = peer.session
    assert b.transport.fence_inbound(last, 10)
    before = counts()
    for _ in range(CONNECTIONS.get(rig.kind, 200)):
        with a.transport.connect(b.transport.export(), 10) as peer:
            assert landed(peer.post(array(piece(a, 0, b, 0, 4096)), 10))
            last = peer.session
        assert b.transport.fence_inbound(last, 10)
    settle(b.transport)
    after = counts()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 1
    assert after[2] == before[2]


def settle(transport: Transport) -> None:
    """Wait until the threads of ended sessions are over too."""
    for thread in threading.enumerate():
        if thread.name.endswith("-in"):
            thread.join(5)
    assert transport.inbound() == []


def test_closing_a_transport_ends_its_threads_and_its_peers_notice(rig: Rig) -> None:
    before = threading.active_count()
    a = rig.side("a")
    with Slab(MIB, "b") as slab, make(rig.kind, "b") as owner:
        region = owner.register(slab)
        peer = rig.stack.enter_context(a.transport.connect(owner.export(), 10))
        owner.close()
        owner.close()
        ticket = peer.post(array([a.slab.address, region.address, 100]), 10)
        assert ticket.wait(10)
        assert isinstance(ticket.error, PeerLost)
        assert peer.fence(5)
        assert not slab.array.any()
    a.transport.close()
    peer.close()
    assert threading.active_count() == before

"""Either side of a library's transport killed or frozen in the middle of a write: it ends in time, and a fence holds."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from contract import KEY, MIB, Side, array, landed, make
from peer_process import Child, freeze, states, wait_until

from regauge.errors import DeadlineExceeded, PeerLost
from regauge.move.library.peer import LibraryPeer
from regauge.move.library.transport import LibraryTransport
from regauge.move.memory import Slab
from regauge.move.transport import Transport

pytestmark = pytest.mark.process
BIG = 32 * MIB


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def child(kind: str) -> Iterator[Child]:
    with Child(kind, KEY, BIG) as made:
        yield made


@pytest.fixture
def side(kind: str, stack: ExitStack) -> Side:
    """This process's end: a slab of 32 MiB, and another that is nobody's business."""
    transport = stack.enter_context(make(kind, "here"))
    slab, foreign = stack.enter_context(Slab(BIG, "ours")), stack.enter_context(Slab(MIB, "foreign"))
    foreign.array[:] = 77
    transport.register(foreign)
    made = Side(transport, slab, transport.register(slab))
    stack.callback(lambda: unchanged(foreign))
    return made


def unchanged(foreign: Slab) -> None:
    assert (foreign.array == 77).all()


def connect(side: Side, child: Child, stack: ExitStack) -> LibraryPeer:
    peer = side.transport.connect(bytes.fromhex(child.ask("export")), 20)
    assert isinstance(peer, LibraryPeer)
    return stack.enter_context(peer)


def whole(side: Side, peer: LibraryPeer, times: int = 1) -> np.ndarray:
    row = [side.slab.address, peer.regions[0].address, BIG]
    return np.repeat(array(row), times, axis=0)


def pids(child: Child) -> list[int]:
    return [int(each) for each in child.ask("carriers").split()]


def freeze_all(child: Child, carriers: list[int]) -> None:
    for pid in (*carriers, child.process.pid):
        freeze(pid)


def thaw_all(child: Child, carriers: list[int]) -> None:
    """Carriers first: a worker that wakes kills a carrier that has missed its deadline."""
    for pid in carriers:
        os.kill(pid, signal.SIGCONT)
    child.signal(signal.SIGCONT)


def inbound_carriers(transport: Transport) -> list[int]:
    assert isinstance(transport, LibraryTransport)
    return [each.pid for each in transport.pool.carriers()]


def test_a_receiver_killed_in_a_write_is_noticed_and_leaves_no_process(
    side: Side, child: Child, stack: ExitStack
) -> None:
    peer = connect(side, child, stack)
    theirs = pids(child)
    assert theirs
    ticket = peer.post(whole(side, peer, 64), 60)
    wait_until(lambda: ticket.bytes_done > 0)
    child.signal(signal.SIGKILL)
    killed = time.monotonic()
    assert ticket.wait(10)
    assert time.monotonic() - killed < 5
    assert isinstance(ticket.error, PeerLost)
    assert peer.fence(5)
    wait_until(lambda: all(not states(pid) for pid in theirs))


def test_a_frozen_receiver_meets_the_deadline_and_no_byte_lands_after_a_fence(
    side: Side, child: Child, stack: ExitStack
) -> None:
    peer = connect(side, child, stack)
    theirs = pids(child)
    freeze_all(child, theirs)
    ticket = peer.post(whole(side, peer), 0.5)
    posted = time.monotonic()
    assert ticket.wait(10)
    assert 0.4 < time.monotonic() - posted < 5
    assert isinstance(ticket.error, DeadlineExceeded)
    assert "may still land" in ticket.reason
    assert not peer.fence(0.3)
    thaw_all(child, theirs)
    assert peer.fence(20)
    assert all(not states(pid) for pid in theirs)
    child.ask("fill 9")
    before = child.ask(f"digest {BIG}")
    again = connect(side, child, stack)
    again.close()
    assert child.ask(f"digest {BIG}") == before
    wait_until(lambda: child.ask("sessions") == "0")


def test_a_frozen_library_at_the_receiver_is_fenced_at_once(side: Side, child: Child, stack: ExitStack) -> None:
    peer = connect(side, child, stack)
    for pid in pids(child):
        freeze(pid)
    ticket = peer.post(whole(side, peer), 0.5)
    assert ticket.wait(10)
    assert isinstance(ticket.error, DeadlineExceeded)
    assert peer.fence(20)
    child.ask("fill 9")
    side.slab.array[:] = 3
    again = connect(side, child, stack)
    assert landed(again.post(array([side.slab.address, again.regions[0].address, 4096]), 20))


def test_a_frozen_writer_is_fenced_by_the_receiver(side: Side, child: Child) -> None:
    session = child.ask(f"connect {side.transport.export().hex()}")
    theirs = pids(child)
    child.ask("fill 5")
    child.ask("write 64")
    wait_until(lambda: bool((side.slab.array == 5).any()))
    freeze_all(child, theirs)
    assert side.transport.fence_inbound(session, 10)
    assert inbound_carriers(side.transport) == []
    side.slab.array[:] = 0
    thaw_all(child, theirs)
    assert child.ask("wait").startswith("failed")
    assert not side.slab.array.any()


def test_a_writer_killed_in_a_write_leaves_nothing_that_lands(side: Side, child: Child) -> None:
    session = child.ask(f"connect {side.transport.export().hex()}")
    theirs = pids(child)
    child.ask("fill 5")
    child.ask("write 64")
    wait_until(lambda: bool((side.slab.array == 5).any()))
    child.signal(signal.SIGKILL)
    wait_until(lambda: side.transport.inbound() == [])
    assert side.transport.fence_inbound(session, 10)
    side.slab.array[:] = 0
    wait_until(lambda: all(not states(pid) for pid in theirs))
    assert not side.slab.array.any()


def test_a_writers_library_that_dies_ends_its_writes(side: Side, child: Child, stack: ExitStack) -> None:
    peer = connect(side, child, stack)
    ticket = peer.post(whole(side, peer, 64), 60)
    wait_until(lambda: ticket.bytes_done > 0)
    os.kill(peer.carrier.pid, signal.SIGKILL)
    assert ticket.wait(10)
    assert isinstance(ticket.error, PeerLost)
    assert "SIGKILL" in ticket.reason
    assert peer.fence(10)
    again = connect(side, child, stack)
    assert landed(again.post(whole(side, again), 30))


def test_a_frozen_library_of_the_writer_keeps_no_other_peer_waiting(side: Side, child: Child, stack: ExitStack) -> None:
    stuck, well = connect(side, child, stack), connect(side, child, stack)
    freeze(stuck.carrier.pid)
    late = stuck.post(whole(side, stuck), 1.0)
    assert landed(well.post(whole(side, well), 30))
    assert late.wait(10)
    assert isinstance(late.error, DeadlineExceeded)
    assert stuck.fence(10)
    assert landed(well.post(whole(side, well), 30))

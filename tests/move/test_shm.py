import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_process import Child, wait_until

from regauge.errors import BoundsError, DeadlineExceeded, PeerLost, TransportError
from regauge.move import shm_peer
from regauge.move.memory import Slab
from regauge.move.shm import ShmTransport
from regauge.move.shm_peer import ShmPeer

KEY = b"0123456789abcdef" * 2
MIB = 1 << 20


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab(MIB, "pool") as made:
        yield made


@pytest.fixture
def owner(slab: Slab) -> Iterator[ShmTransport]:
    with ShmTransport(key=KEY, name="owner") as made:
        made.register(slab)
        yield made


@pytest.fixture
def writer() -> Iterator[ShmTransport]:
    with ShmTransport(key=KEY, name="writer") as made:
        yield made


@pytest.fixture
def peer(owner: ShmTransport, writer: ShmTransport) -> Iterator[ShmPeer]:
    with writer.connect(owner.export(), 10) as made:
        yield made


def pieces(*rows: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def mapped(base: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """What a kernel sees that is given a bare address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(base))


def test_a_kernel_may_write_the_peers_region_at_its_local_address(peer: ShmPeer, slab: Slab) -> None:
    with peer.writing("pool") as base:
        assert base == peer.map_base("pool") != slab.address
        mapped(base, MIB)[100:103] = (7, 8, 9)
    assert list(slab.array[99:104]) == [0, 7, 8, 9, 0]
    with pytest.raises(TransportError, match="no region 'nothing' mapped here; it exports: pool"):
        peer.map_base("nothing")


def test_fences_of_both_sides_wait_for_a_direct_write(owner: ShmTransport, peer: ShmPeer) -> None:
    with ThreadPoolExecutor(1) as pool:
        with peer.writing("pool"):
            assert not peer.fence(0.05)
            assert not owner.fence_inbound(peer.session, 0.05)
            asked = pool.submit(owner.fence_inbound, peer.session, 10)
        assert asked.result(10)
    assert peer.fence(1)
    with pytest.raises(PeerLost, match="fenced"), peer.writing("pool"):
        pass


def test_a_withdrawal_waits_for_a_direct_write_and_keeps_others_out(
    owner: ShmTransport, peer: ShmPeer, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShmTransport, "close_s", 0.1)
    with peer.writing("pool"), pytest.raises(DeadlineExceeded, match="'writer' did not confirm"):
        owner.register(slab)
    with pytest.raises(BoundsError, match="generation 1 is over"), peer.writing("pool"):
        pass
    assert owner.fence_inbound(peer.session, 10)


def test_close_does_not_unmap_under_a_direct_write(peer: ShmPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_peer, "_CLOSE_S", 0.05)
    with peer.writing("pool") as base:
        with pytest.raises(DeadlineExceeded, match="direct write"):
            peer.close()
        mapped(base, MIB)[0] = 1
    peer.close()


def test_small_posts_land_before_post_returns(
    owner: ShmTransport, writer: ShmTransport, slab: Slab, peer: ShmPeer
) -> None:
    with Slab(4096, "source") as source:
        writer.register(source)
        source.array[:] = 3
        ticket = peer.post(pieces((source.address, slab.address, 4096)), 10)
        assert ticket.state == "landed"
        assert slab.array[:4096].all()
        late = peer.post(pieces((source.address, slab.address, 4096)), -1)
        assert late.state == "failed"
        assert isinstance(late.error, DeadlineExceeded)


def test_more_slabs_than_fit_one_message(owner: ShmTransport, writer: ShmTransport) -> None:
    slabs = [Slab(4096, f"s{i}") for i in range(150)]
    try:
        for each in slabs:
            owner.register(each)
        with writer.connect(owner.export(), 10) as peer:
            for i, each in enumerate(slabs):
                mapped(peer.map_base(each.name), 4096)[0] = i
            assert [int(each.array[0]) for each in slabs] == list(range(150))
    finally:
        for each in slabs:
            each.close()


def test_nothing_in_a_file_system_names_the_memory(owner: ShmTransport, peer: ShmPeer) -> None:
    assert owner.address not in " ".join(str(path) for path in Path("/dev/shm").iterdir())  # noqa: S108
    assert not Path(owner.address).exists()
    assert len(owner.address) > 32


def test_another_user_gets_nothing(owner: ShmTransport) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to act as another user")
    code = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.settimeout(10)\n"
        f"s.connect('\\0{owner.address}'); print(len(s.recv(1)))"
    )
    python = next(path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists())
    done = subprocess.run([python, "-I", "-c", code], user=65534, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
    assert owner.inbound() == []


def test_an_owner_that_closes_over_a_running_direct_write_does_not_call_it_over(
    owner: ShmTransport, peer: ShmPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShmTransport, "close_s", 0.1)
    with peer.writing("pool"):
        owner.close()
        wait_until(lambda: owner.inbound() == [])  # hung up; its thread may need a moment more than `close_s`
        assert not owner.fence_inbound(peer.session, 0.05)


@given(
    unit=st.sampled_from([1, 64, 128, 192, 4096]),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    seed=st.integers(0, 1000),
    dense=st.booleans(),
)
def test_every_way_of_copying_moves_the_same_bytes(unit: int, lengths: list[int], seed: int, dense: bool) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, dtype=np.int64) * unit
    source = rng.integers(0, 256, int(sizes.sum()) + 77, dtype=np.uint8)
    target, expected = np.zeros_like(source), np.zeros_like(source)
    order = rng.permutation(len(sizes))
    here = np.cumsum(sizes) - sizes
    there = np.empty_like(here)
    there[order] = np.cumsum(sizes[order]) - sizes[order]
    rows = np.column_stack((here + 33, there + 5, sizes))
    if not dense:
        rows = rows[rng.permutation(len(rows))]
    for at, to, length in rows:
        expected[to : to + length] = source[at : at + length]
    shift = 1 << 40  # as if the target lay elsewhere in its owner
    base = np.array((source.ctypes.data, target.ctypes.data - shift, 0))
    shm_peer._copy(rows + base, shift)
    assert np.array_equal(target, expected)


@pytest.mark.process
def test_a_frozen_writer_is_not_fenced_until_it_runs_again(owner: ShmTransport, slab: Slab) -> None:
    with Child("shm", KEY, MIB) as child:
        session = child.ask(f"connect {owner.export().hex()}")
        child.ask("fill 5")
        child.ask("write 200000")
        wait_until(lambda: bool(slab.array[-1]))
        child.signal(signal.SIGSTOP)
        assert not owner.fence_inbound(session, 0.2)
        child.signal(signal.SIGCONT)
        assert owner.fence_inbound(session, 20)
        slab.array[:] = 0
        assert child.ask("wait").startswith("failed")
        assert not slab.array.any()
        assert owner.inbound() == []


@pytest.mark.process
def test_a_killed_writer_is_gone_at_once(owner: ShmTransport, slab: Slab) -> None:
    with Child("shm", KEY, MIB) as child:
        session = child.ask(f"connect {owner.export().hex()}")
        child.ask("fill 5")
        child.ask("write 200000")
        wait_until(lambda: bool(slab.array[-1]))
        child.signal(signal.SIGSTOP)
        assert not owner.fence_inbound(session, 0.05)
        child.signal(signal.SIGKILL)
        assert owner.fence_inbound(session, 10)
        slab.array[:] = 0
        assert not slab.array.any()


@pytest.mark.process
def test_a_killed_owner_ends_the_post_and_crashes_nobody() -> None:
    with (
        Child("shm", KEY, 64 * MIB) as child,
        Slab(64 * MIB, "source") as source,
        ShmTransport(key=KEY, name="w") as w,
    ):
        w.register(source)
        with w.connect(bytes.fromhex(child.ask("export")), 10) as peer:
            region = peer.regions[0]
            many = np.repeat(pieces((source.address, region.address, region.nbytes)), 2000, axis=0)
            ticket = peer.post(many, 60)
            wait_until(lambda: ticket.bytes_done > 0)
            child.signal(signal.SIGKILL)
            assert ticket.wait(5)
            assert isinstance(ticket.error, PeerLost)
            assert ticket.bytes_done < ticket.nbytes
            assert peer.fence(1)


@pytest.mark.process
def test_bytes_written_by_another_process_are_the_right_ones(owner: ShmTransport, slab: Slab) -> None:
    with Child("shm", KEY, MIB) as child:
        child.ask("fill 77")
        child.ask(f"connect {owner.export().hex()}")
        child.ask("write 1")
        assert child.ask("wait") == "landed"
        assert (slab.array == 77).all()


def test_threads_of_a_peer_end_with_it(owner: ShmTransport, writer: ShmTransport) -> None:
    with writer.connect(owner.export(), 10):
        names = {thread.name for thread in threading.enumerate()}
        assert {"regauge-shm-copy", "regauge-shm-stop"} <= names
    names = {thread.name for thread in threading.enumerate()}
    assert not {"regauge-shm-copy", "regauge-shm-stop"} & names

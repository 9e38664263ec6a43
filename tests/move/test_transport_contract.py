"""What every transport must do, run over all of them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from contract import MIB, Rig, array, landed, make, permuted, piece

from regauge.errors import AuthError, BoundsError, PeerLost, ProtocolError, TransportError
from regauge.move.memory import Slab
from regauge.move.transport import Region, decode_export


def test_bytes_arrive_as_they_left(rig: Rig) -> None:
    a, b = rig.side("a", seed=1), rig.side("b")
    ticket = rig.peer(a, b).post(array(piece(a, 0, b, 0, MIB)), 10)
    assert landed(ticket)
    assert np.array_equal(a.slab.array, b.slab.array)
    assert ticket.reason == ""


def test_unaligned_and_empty_pieces(rig: Rig) -> None:
    a, b = rig.side("a", seed=2), rig.side("b")
    peer = rig.peer(a, b)
    pieces = array(piece(a, 3, b, 77, 1), piece(a, 0, b, 0, 0), piece(a, 1001, b, 5003, 4097), [0, 0, 0])
    assert landed(peer.post(pieces, 10))
    expected = np.zeros(MIB, dtype=np.uint8)
    expected[77] = a.slab.array[3]
    expected[5003 : 5003 + 4097] = a.slab.array[1001 : 1001 + 4097]
    assert np.array_equal(b.slab.array, expected)
    assert landed(peer.post(array(), 10))
    assert landed(peer.post(array([0, 0, 0]), 10))


def test_many_small_pieces_to_permuted_slots(rig: Rig) -> None:
    a, b = rig.side("a", 5000 * 4096, seed=3), rig.side("b", 5000 * 4096)
    pieces, order = permuted(a, b, 5000, 4096, 4)
    ticket = rig.peer(a, b).post(pieces, 20)
    assert landed(ticket)
    assert ticket.nbytes == 5000 * 4096
    got, sent = b.slab.array.reshape(5000, 4096), a.slab.array.reshape(5000, 4096)
    assert np.array_equal(got[order], sent)


def test_pieces_of_unlike_lengths_scattered_on_both_sides(rig: Rig) -> None:
    a, b = rig.side("a", 4 * MIB, seed=5), rig.side("b", 4 * MIB)
    rng = np.random.default_rng(6)
    lengths = rng.integers(0, 1000, 3000)
    order = rng.permutation(3000)
    here = np.cumsum(lengths) - lengths
    there = np.empty_like(here)
    there[order] = np.cumsum(lengths[order]) - lengths[order]
    mix = rng.permutation(3000)
    rows = np.column_stack((here + a.slab.address, there + b.slab.address, lengths))[mix]
    assert landed(rig.peer(a, b).post(rows.astype(np.int64), 20))
    expected = np.concatenate([a.slab.array[here[i] : here[i] + lengths[i]] for i in order])
    assert np.array_equal(b.slab.array[: len(expected)], expected)
    assert not b.slab.array[len(expected) :].any()


def test_one_post_may_reach_several_regions(rig: Rig) -> None:
    a, b = rig.side("a", seed=5), rig.side("b")
    with Slab(MIB, "second") as second:
        b.transport.register(second)
        peer = rig.peer(a, b)
        half = [a.slab.address + MIB // 2, second.address, 4096]
        pieces = array(piece(a, 0, b, 0, 10), half, piece(a, 10, b, 10, 10), [a.slab.address, second.address + 5000, 1])
        assert landed(peer.post(pieces, 10))
        assert np.array_equal(b.slab.array[:20], a.slab.array[:20])
        assert np.array_equal(second.array[:4096], a.slab.array[MIB // 2 : MIB // 2 + 4096])
        assert second.array[5000] == a.slab.array[0]


def test_both_directions_at_once(rig: Rig) -> None:
    a, b = rig.side("a", 4 * MIB, seed=6), rig.side("b", 4 * MIB, seed=7)
    there, back = rig.peer(a, b), rig.peer(b, a)
    half = 2 * MIB
    tickets = [
        there.post(array(piece(a, 0, b, 0, half)), 20),
        back.post(array(piece(b, half, a, half, half)), 20),
    ]
    assert all(landed(ticket) for ticket in tickets)
    assert np.array_equal(a.slab.array, b.slab.array)


def test_several_senders_fill_one_receiver(rig: Rig) -> None:
    target = rig.side("target", 4 * MIB)
    senders = [rig.side(f"s{i}", seed=10 + i) for i in range(4)]
    tickets = [
        rig.peer(side, target).post(array(piece(side, 0, target, i * MIB, MIB)), 20) for i, side in enumerate(senders)
    ]
    assert all(landed(ticket) for ticket in tickets)
    assert sorted(each.peer for each in target.transport.inbound()) == ["s0", "s1", "s2", "s3"]
    for i, side in enumerate(senders):
        assert np.array_equal(target.slab.array[i * MIB : (i + 1) * MIB], side.slab.array)


def test_posts_from_many_threads_all_land(rig: Rig) -> None:
    a, b = rig.side("a", 4 * MIB, seed=20), rig.side("b", 4 * MIB)
    peer = rig.peer(a, b)
    step = 4 * MIB // 64

    def post(i: int) -> bool:
        return landed(peer.post(array(piece(a, i * step, b, i * step, step)), 20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(post, range(64)))
    assert np.array_equal(a.slab.array, b.slab.array)


TOP = (1 << 63) - 1


@pytest.mark.parametrize(
    ("to", "length"),
    [(MIB, 1), (-1, 1), (-1, 2), (MIB - 1, 2), (0, MIB + 1), (0, TOP), (TOP // 2, 10), (None, 8)],
    ids=["after", "before", "straddles the start", "straddles the end", "longer", "overflows", "far", "null"],
)
def test_wild_remote_addresses_are_refused_and_harm_nothing(rig: Rig, to: int | None, length: int) -> None:
    a, b = rig.side("a", 2 * MIB, seed=30), rig.side("b")
    peer = rig.peer(a, b)
    address = 0 if to is None else b.slab.address + to
    with pytest.raises(BoundsError, match="piece 1: "):
        peer.post(array(piece(a, 0, b, 0, 100), [a.slab.address, address, length]), 10)
    assert not b.slab.array.any()
    assert landed(peer.post(array(piece(a, 0, b, 0, 100)), 10))


def test_wild_local_addresses_are_refused(rig: Rig) -> None:
    a, b = rig.side("a"), rig.side("b")
    peer = rig.peer(a, b)
    for local, length in (
        (a.slab.address + MIB, 1),
        (a.slab.address - 1, 2),
        (0, 8),
        (-5, 8),
        (a.slab.address, TOP),
    ):
        with pytest.raises(BoundsError, match=r"piece 0: .* registered region"):
            peer.post(array([local, b.slab.address, length]), 10)
    with Slab(4096, "unregistered") as other, pytest.raises(BoundsError):
        peer.post(array([other.address, b.slab.address, 10]), 10)
    with pytest.raises(BoundsError, match="negative length"):
        peer.post(array([a.slab.address, b.slab.address, -1]), 10)
    with pytest.raises(BoundsError, match="int64"):
        peer.post(np.zeros((1, 3), dtype=np.int32), 10)
    assert not b.slab.array.any()


def test_an_old_generation_is_refused_and_a_new_connection_works(rig: Rig) -> None:
    a, b = rig.side("a", seed=31), rig.side("b")
    old_export = b.transport.export()
    old = rig.peer(a, b)
    again = b.transport.register(b.slab)
    assert again.generation > b.region.generation
    late = rig.stack.enter_context(a.transport.connect(old_export, 10))
    for peer in (old, late):
        ticket = peer.post(array(piece(a, 0, b, 0, MIB)), 10)
        assert ticket.wait(10)
        assert ticket.state == "failed"
        assert isinstance(ticket.error, BoundsError)
        assert "generation 1 is over" in ticket.reason
    assert not b.slab.array.any()
    assert landed(rig.peer(a, b).post(array(piece(a, 0, b, 0, MIB)), 10))


def test_after_unregister_nothing_lands_and_the_peer_is_unharmed(rig: Rig) -> None:
    a, b = rig.side("a", seed=32), rig.side("b")
    peer = rig.peer(a, b)
    with Slab(MIB, "other") as other:
        b.transport.register(other)
        newer = rig.peer(a, b)
        b.transport.unregister(b.region)
        b.transport.unregister(b.region)
        for each in (peer, newer):
            ticket = each.post(array(piece(a, 0, b, 0, 10)), 10)
            assert ticket.wait(10)
            with pytest.raises(BoundsError, match="is over"):
                ticket.check()
        assert landed(newer.post(array([a.slab.address, other.address, MIB]), 10))
    assert not b.slab.array.any()


def test_an_owner_that_closes_its_slab_crashes_nobody(rig: Rig) -> None:
    a, b = rig.side("a", 8 * MIB, seed=33), rig.side("b", 8 * MIB)
    peer = rig.peer(a, b)
    tickets = [peer.post(array(piece(a, 0, b, 0, 8 * MIB)), 20) for _ in range(4)]
    b.slab.close()
    assert all(landed(ticket) for ticket in tickets)  # the registration still holds the memory
    b.transport.unregister(b.region)
    ticket = peer.post(array([a.slab.address, b.region.address, 10]), 10)
    assert ticket.wait(10)
    assert ticket.state == "failed"


def test_slab_names_are_unique_among_the_registered(rig: Rig) -> None:
    a = rig.side("a")
    with Slab(4096, "a") as twin, pytest.raises(TransportError, match="'a' is registered already"):
        a.transport.register(twin)


def test_another_key_is_refused(rig: Rig) -> None:
    b = rig.side("b")
    with make(rig.kind, "stranger", key=b"x" * 32) as stranger, pytest.raises(AuthError, match="key"):
        stranger.connect(b.transport.export(), 10)
    assert b.transport.inbound() == []
    rig.peer(rig.side("a"), b)


def test_a_gone_peer_a_wrong_kind_and_garbage_are_told_apart(rig: Rig) -> None:
    a = rig.side("a")
    with make(rig.kind, "gone") as gone:
        export = gone.export()
    with pytest.raises(PeerLost):
        a.transport.connect(export, 2)
    with (
        make("tcp" if rig.kind == "shm" else "shm", "other") as other,
        pytest.raises(TransportError, match="exports a"),
    ):
        a.transport.connect(other.export(), 2)
    for garbage in (b"", b"\x80", b"x" * 100, bytes(2 << 20)):
        with pytest.raises(ProtocolError):
            a.transport.connect(garbage, 2)
    with pytest.raises(ValueError, match="bounded"):
        a.transport.connect(a.transport.export(), float("inf"))


def test_the_export_says_where_and_what(rig: Rig) -> None:
    a = rig.side("a")
    exported = decode_export(a.transport.export(), a.transport.kind)
    assert exported.regions == (a.region,)
    assert exported.session == a.transport.session
    assert exported.address == a.transport.address
    assert a.region == Region("a", a.slab.address, MIB, 1)

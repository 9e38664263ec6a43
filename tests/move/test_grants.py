"""What a writer may write: the pure table, and the tcp receiver that asks it."""

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from contract import KEY, MIB, array
from hypothesis import given
from hypothesis import strategies as st
from peer_process import wait_until
from test_tcp import frame, read_ack

from regauge.engines.local.kv import allocate
from regauge.errors import BoundsError, TransportError
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array
from regauge.move import grants as module
from regauge.move.grants import Grants, grant_id, page_ranges
from regauge.move.listener import VERSION, Hello, greet
from regauge.move.memory import Slab
from regauge.move.tcp import TcpTransport
from regauge.move.transport import Region, new_session
from regauge.plan import compile, instantiate, pieces
from regauge.plan.boxes import Side

SPAN = st.tuples(st.integers(0, 60), st.integers(1, 12))


def table(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


@given(granted=st.lists(SPAN, max_size=8), asked=st.lists(SPAN, min_size=1, max_size=5))
def test_a_table_passes_exactly_if_every_byte_of_it_was_granted(
    granted: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    grants = Grants()
    grants.allow("s", 7, table(*granted))
    allowed = {byte for at, length in granted for byte in range(at, at + length)}
    inside = all(set(range(at, at + length)) <= allowed for at, length in asked)
    assert (grants.refusal("s", 7, table(*asked)) == "") == inside
    assert "is over" in grants.refusal("t", 7, table(*asked))
    assert "is over" in grants.refusal("s", 8, table(*asked))
    grants.revoke("s", 7)
    grants.revoke("s", 7)
    assert "is over" in grants.refusal("s", 7, table(*asked))


def test_the_refusal_names_the_first_piece_outside() -> None:
    grants = Grants()
    grants.allow("s", 1, table((0x1000, 16), (0x1010, 16)))
    assert grants.refusal("s", 1, table((0x1000, 32))) == ""
    assert grants.refusal("s", 1, table((0x1000, 32), (0x1018, 9))) == "piece 1: 9 bytes at 0x1018 are not in grant 0x1"
    grants.allow("s", 1, table((0x1018, 9)))
    assert "piece 0" in grants.refusal("s", 1, table((0x1000, 1)))


def test_grants_are_bounded_and_go_with_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRANTS", 2)
    grants = Grants()
    for grant in (1, 2):
        grants.allow("s", grant, table((0, 1)))
    grants.allow("s", 2, table((0, 2)))
    with pytest.raises(TransportError, match="2 grants are live already"):
        grants.allow("t", 1, table((0, 1)))
    grants.forget("s")
    grants.allow("t", 1, table((0, 1)))
    assert grants.refusal("s", 1, table((0, 1)))
    assert not grants.refusal("t", 1, table((0, 1)))


def test_numbers_differ_by_transfer_and_epoch() -> None:
    found = {grant_id(name, epoch) for name in ("a", "b", "", "1 a") for epoch in range(50)}
    assert len(found) == 200
    assert all(0 < number < 1 << 63 for number in found)
    assert grant_id("x", 3) == grant_id("x", 3)


@dataclass
class Rig:
    owner: TcpTransport
    slab: Slab
    region: Region
    writer: TcpTransport
    source: Slab


@pytest.fixture(params=[1, 3])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with (
        Slab(MIB, "pool") as slab,
        Slab(MIB, "source") as source,
        TcpTransport(key=KEY, name="owner", grants=True, lanes=request.param) as owner,
        TcpTransport(key=KEY, name="writer", lanes=request.param) as writer,
    ):
        source.array[:] = 9
        writer.register(source)
        yield Rig(owner, slab, owner.register(slab), writer, source)


def test_a_peer_writes_only_where_and_while_it_holds_a_grant(rig: Rig) -> None:
    with rig.writer.connect(rig.owner.export(), 10) as peer, rig.writer.connect(rig.owner.export(), 10) as other:
        first, second = grant_id("x", 1), grant_id("y", 1)
        rig.owner.allow(peer.session, first, table((rig.slab.address + 4096, 8192)))
        rig.owner.allow(other.session, second, table((rig.slab.address, 4096)))

        def write(who: object, grant: int, at: int, length: int) -> str:
            assert who in (peer, other)
            ticket = (peer if who is peer else other).post(
                array([rig.source.address, rig.slab.address + at, length]), 10, grant
            )
            assert ticket.wait(10)
            assert ticket.state == "landed" or isinstance(ticket.error, BoundsError)
            return ticket.reason

        assert "grant 0x0 is over, or was never given" in write(peer, 0, 4096, 1)
        assert "not in grant" in write(peer, first, 4095, 2)
        assert "not in grant" in write(peer, first, 0, MIB)
        assert "never given to this connection" in write(peer, second, 0, 1)
        assert "never given to this connection" in write(other, first, 4096, 1)
        assert not rig.slab.array.any()
        assert write(peer, first, 4096, 8192) == ""
        assert (np.flatnonzero(rig.slab.array) == np.arange(4096, 4096 + 8192)).all()
        assert rig.owner.revoke(peer.session, first, 1)
        rig.owner.allow(peer.session, grant_id("x", 2), table((rig.slab.address + 4096, 8192)))
        rig.slab.array[:] = 0
        assert "is over" in write(peer, first, 4096, 1)  # late, though the page is this peer's again
        assert not rig.slab.array.any()
        assert write(other, second, 0, 4096) == ""
        assert rig.owner.caps.checks_grants


def test_revoking_cuts_a_frame_that_is_landing_and_spares_the_others(rig: Rig) -> None:
    host, port = rig.owner.address.rsplit(":", 1)
    grant = grant_id("x")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        session = new_session()
        greet(
            sock, KEY, "regauge-tcp", Hello(VERSION, "data", session, rig.owner.session, "raw"), time.monotonic() + 10
        )
        rig.owner.allow(session, grant, table((rig.slab.address, MIB)))
        whole = frame(rig.region.generation, [(rig.slab.address, MIB)], b"\1" * MIB, grant=grant)
        sock.sendall(whole[: MIB // 2])
        wait_until(lambda: bool(rig.slab.array[0]))
        assert rig.owner.revoke(session, grant_id("another"), 0.0)  # waits for no frame of this one
        assert rig.owner.revoke(session, grant, 0.05)
        rig.slab.array[:] = 0
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            sock.sendall(whole * 50)
    assert not rig.slab.array.any()
    with rig.writer.connect(rig.owner.export(), 10) as peer:
        rig.owner.allow(peer.session, grant, table((rig.slab.address, 10)))
        ticket = peer.post(array([rig.source.address, rig.slab.address, 10]), 10, grant)
        assert ticket.wait(10)
        assert ticket.state == "landed"


def test_revoking_waits_for_a_frame_that_is_about_to_end(rig: Rig) -> None:
    host, port = rig.owner.address.rsplit(":", 1)
    session, grant = new_session(), grant_id("x")
    rig.owner.allow(session, grant, table((rig.slab.address, 4)))
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        greet(
            sock, KEY, "regauge-tcp", Hello(VERSION, "data", session, rig.owner.session, "raw"), time.monotonic() + 10
        )
        for _ in range(2):
            sock.sendall(frame(rig.region.generation, [(rig.slab.address, 4)], b"four", grant=grant))
            assert read_ack(sock).status == 0
        assert rig.owner.revoke(session, grant, 5)
        sock.sendall(frame(rig.region.generation, [(rig.slab.address, 4)], b"late", grant=grant))
        assert "is over" in read_ack(sock).reason
        assert bytes(rig.slab.array[:4]) == b"four"
        assert [each.session for each in rig.owner.inbound()] == [session]


MODEL = attention_model("m", 3, Array(2, 16))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("bf16,page=16", "bf16,page=16"),
        ("bf16,page=64,hnd", "bf16,page=16,nhd"),
        ("bf16,page=24", "bf16,page=16,fused"),
        ("fp16,page=16", "fp16,page=32,kt"),
        ("fp8_e4m3,page=16,scale=token_head", "fp8_e4m3,page=64,hnd,scale=token_head"),
    ],
)
def test_page_ranges_are_what_writers_write_and_nothing_of_other_pages(source: str, target: str) -> None:
    a, b = (from_short(text, MODEL, pages=12) for text in (source, target))
    theirs, ours = allocate(a, "a"), allocate(b, "b")
    with theirs.slab, ours.slab:
        order = np.random.default_rng(3).permutation(12)
        size = b.groups[0].page_size
        pages, rest, tokens = order[:5], order[5:], (0, 5 * size)
        own = compile(ours.layout, ours.layout)
        granted = page_ranges(own, pages, ours.bases, tokens)
        others = page_ranges(own, rest, ours.bases, (0, len(rest) * size))
        assert granted[:, 1].sum() * len(rest) == others[:, 1].sum() * len(pages)
        grants = Grants()
        grants.allow("s", 1, granted)
        carried = min(tokens[1], 12 * a.groups[0].page_size)
        boxes = instantiate(
            compile(theirs.layout, ours.layout),
            Side(np.arange(12), theirs.bases),
            Side(pages, ours.bases),
            (0, carried),
        )
        written = pieces(boxes)[:, 1:]
        assert len(written)
        assert grants.refusal("s", 1, written) == ""
        assert all(grants.refusal("s", 1, row[None]) for row in others)
        part = page_ranges(own, pages, ours.bases, (3, 7), origin=0)
        assert part[:, 1].sum() * tokens[1] == granted[:, 1].sum() * 4


def test_a_transport_that_checks_no_grants_says_so() -> None:
    with TcpTransport(key=KEY, name="a") as a:
        assert not a.caps.checks_grants
        a.allow("s", 1, table((0, 1)))
        assert not a.revoke("s", 1, 0.1)

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_process import Child, wait_until

from regauge.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, TransportError
from regauge.move import frames, listener
from regauge.move.listener import VERSION, Hello, greet
from regauge.move.memory import Slab
from regauge.move.tcp import TcpTransport
from regauge.move.transport import Exported, Peer, Region, decode_export, new_session

KEY = b"0123456789abcdef" * 2
MIB = 1 << 20
WILDCARD = "0.0.0.0"  # noqa: S104


def pieces(*rows: tuple[int, int, int]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab(MIB, "pool") as made:
        yield made


@pytest.fixture
def owner(slab: Slab) -> Iterator[TcpTransport]:
    with TcpTransport(key=KEY, name="owner") as made:
        made.register(slab)
        yield made


def dial(owner: TcpTransport) -> socket.socket:
    host, port = owner.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def raw_session(owner: TcpTransport) -> tuple[socket.socket, str]:
    """A peer that holds the key but sends what it likes."""
    sock, session = dial(owner), new_session()
    greet(sock, KEY, "regauge-tcp", Hello(VERSION, "data", session, owner.session, "raw"), time.monotonic() + 10)
    sock.settimeout(10)
    return sock, session


def frame(generation: int, rows: list[tuple[int, int]], payload: bytes, ticket: int = 1, *, grant: int = 0) -> bytes:
    table = pieces(*((0, at, length) for at, length in rows))
    return frames.encode_head(ticket, generation, table, len(payload), grant).tobytes() + payload


def read_ack(sock: socket.socket) -> frames.Ack:
    reader = frames.AckReader()
    while not (acks := reader.feed(sock.recv(1))):
        pass
    return acks[0]


def until_closed(sock: socket.socket) -> bytes:
    got = b""
    try:
        while data := sock.recv(4096):
            got += data
    except ConnectionResetError:
        return got
    return got


def test_the_receiver_itself_refuses_wild_pieces_and_the_connection_goes_on(owner: TcpTransport, slab: Slab) -> None:
    sock, _ = raw_session(owner)
    with sock:
        top = (1 << 63) - 1
        bad = [[(slab.address - 1, 5)], [(slab.address + MIB - 2, 5)], [(top - 3, 5)], [(0, 5)], [(-5, 5)]]
        for ticket, rows in enumerate([*bad, [(slab.address, 2), (slab.address + MIB, 3)]]):
            sock.sendall(frame(1, rows, b"wrong", ticket))
            ack = read_ack(sock)
            assert (ack.ticket, ack.status) == (ticket, frames.REFUSED)
            assert "not inside region 'pool'" in ack.reason
        sock.sendall(frame(7, [(slab.address, 5)], b"wrong"))
        assert "generation 7 is over" in read_ack(sock).reason
        assert not slab.array.any()
        sock.sendall(frame(1, [(slab.address + MIB - 3, 3), (slab.address, 2)], b"right", 9))
        assert read_ack(sock) == frames.Ack(9, frames.LANDED, 5, "")
        assert bytes(slab.array[-3:]) + bytes(slab.array[:2]) == b"right"
        assert [each.nbytes for each in owner.inbound()] == [5]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda tail: b"RGF1\0\0\0\0" + tail)))
def test_random_bytes_from_a_peer_land_nowhere_and_end_its_connection(
    owner: TcpTransport, slab: Slab, data: bytes
) -> None:
    sock, session = raw_session(owner)
    with sock:
        sock.sendall(data)
        with contextlib.suppress(OSError):  # the receiver may have ended the connection already
            sock.shutdown(socket.SHUT_WR)
        until_closed(sock)
    assert not slab.array.any()
    assert owner.fence_inbound(session, 10)


@given(st.binary(min_size=frames.HEADER_BYTES, max_size=frames.HEADER_BYTES))
def test_random_headers_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.decode_header(data)


@given(
    rows=st.lists(
        st.tuples(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1)),
        min_size=1,
        max_size=8,
    )
)
def test_tables_that_pass_lie_inside_their_region(rows: list[tuple[int, int]]) -> None:
    region = Region("r", 1 << 40, 1 << 20, 1)
    near = [(region.address + at % (2 << 20) - 1000, 1 + length % 4096) for at, length in rows]
    for candidate in (rows, near):
        table = np.array(candidate, dtype=np.int64)
        header = frames.Header(1, 1, 0, len(table), min(frames.MAX_PAYLOAD, max(1, sum(n for _, n in candidate))))
        inside = all(region.address <= at and at + n <= region.address + region.nbytes for at, n in candidate)
        try:
            where = frames.decode_table(header, table.view(np.uint8).reshape(-1))
        except ProtocolError:
            assert candidate is rows
            continue
        assert (frames.refusal(where, region, 1) == "") == inside


@given(cuts=st.lists(st.integers(1, 40), max_size=10), reasons=st.lists(st.text(max_size=50), max_size=5))
def test_acks_survive_any_cut_of_the_stream(cuts: list[int], reasons: list[str]) -> None:
    sent = [frames.Ack(i, frames.REFUSED, i * 10, reason) for i, reason in enumerate(reasons)]
    stream = b"".join(frames.encode_ack(ack.ticket, ack.status, ack.payload, ack.reason) for ack in sent)
    reader, got = frames.AckReader(), []
    for size in [*cuts, len(stream)]:
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert got == sent
    with pytest.raises(ProtocolError):
        reader.feed(bytes(100))


def test_lanes_share_the_work_and_end_together(slab: Slab, owner: TcpTransport) -> None:
    with Slab(64 * MIB, "source") as source, TcpTransport(key=KEY, name="a", lanes=4) as a:
        a.register(source)
        source.array[:] = 7
        with a.connect(owner.export(), 10) as peer, a.connect(owner.export(), 10) as other:
            lanes = [each for each in owner._listener.sessions() if each.session == peer.session]
            assert sorted(each.lane for each in lanes) == [0, 1, 2, 3]
            rows = np.repeat(pieces((source.address, slab.address, MIB)), 256, axis=0)
            ticket = peer.post(rows, 30)
            assert ticket.wait(30)
            ticket.check()
            assert all(each.nbytes >= MIB for each in lanes)
            assert sum(each.nbytes for each in lanes) == 256 * MIB
            facts = {each.session: each.nbytes for each in owner.inbound()}
            assert facts == {peer.session: 256 * MIB, other.session: 0}
            assert slab.array.all()
            lanes[2].hang_up()
            broken = peer.post(rows, 30)
            assert broken.wait(10)
            assert isinstance(broken.error, PeerLost)
            assert owner.fence_inbound(peer.session, 10)
            assert all(each.ended.is_set() for each in lanes)
            assert peer.fence(5)
            assert [each.session for each in owner.inbound()] == [other.session]


def test_a_lane_of_a_session_that_is_over_or_of_a_wild_number_is_refused(owner: TcpTransport) -> None:
    sock, session = raw_session(owner)
    with sock:
        for lane, reason in ((0, "over"), (-1, "lane -1"), (listener.MAX_LANES, "at most 16")):
            hello = Hello(VERSION, "data", session, owner.session, "raw", lane=lane)
            with dial(owner) as again, pytest.raises(TransportError, match=reason):
                greet(again, KEY, "regauge-tcp", hello, time.monotonic() + 10)
        assert owner.fence_inbound(session, 10)
        hello = Hello(VERSION, "data", session, owner.session, "raw", lane=1)
        with dial(owner) as again, pytest.raises(TransportError, match="session is over"):
            greet(again, KEY, "regauge-tcp", hello, time.monotonic() + 10)
    with pytest.raises(ConfigError, match="17 lanes"):
        TcpTransport(key=KEY, name="a", lanes=17)


def test_a_malformed_frame_closes_that_connection_only(owner: TcpTransport, slab: Slab) -> None:
    bad, _ = raw_session(owner)
    good, _ = raw_session(owner)
    with bad, good:
        bad.sendall(frame(1, [(slab.address, 9)], b"short"))
        assert read_ack(bad).status == frames.MALFORMED
        assert until_closed(bad) == b""
        good.sendall(frame(1, [(slab.address, 4)], b"fine"))
        assert read_ack(good).status == frames.LANDED
    assert bytes(slab.array[:5]) == b"fine\0"


def test_withdrawing_a_slab_cuts_a_frame_that_is_landing(owner: TcpTransport, slab: Slab) -> None:
    sock, session = raw_session(owner)
    with sock:
        whole = frame(1, [(slab.address, MIB)], b"\1" * MIB)
        sock.sendall(whole[: MIB // 2])
        wait_until(lambda: bool(slab.array[0]))
        fresh = owner.register(slab)
        slab.array[:] = 0
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            sock.sendall(whole * 50)
    assert owner.fence_inbound(session, 10)
    assert not slab.array.any()
    assert fresh.generation == 2


def test_a_writer_that_dies_in_a_frame_leaves_the_receiver_well(owner: TcpTransport, slab: Slab) -> None:
    sock, session = raw_session(owner)
    sock.sendall(frame(1, [(slab.address, MIB)], b"\1" * MIB)[:5000])
    sock.close()
    assert owner.fence_inbound(session, 10)
    again, _ = raw_session(owner)
    with again:
        again.sendall(frame(1, [(slab.address, 4)], b"fine"))
        assert read_ack(again).status == frames.LANDED


def test_silent_strangers_are_cut_and_do_not_keep_peers_out(
    owner: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_DEADLINE_S", 0.3)
    monkeypatch.setattr(listener, "MAX_STRANGERS", 4)
    strangers = [dial(owner) for _ in range(8)]
    strangers[0].sendall(b"RGAU\1")
    for sock in strangers:
        with sock:
            assert len(until_closed(sock)) <= 40
    assert owner.inbound() == []
    with TcpTransport(key=KEY, name="a") as a, a.connect(owner.export(), 10):
        assert [each.peer for each in owner.inbound()] == ["a"]


def test_sessions_are_bounded(owner: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_SESSIONS", 2)
    with TcpTransport(key=KEY, name="a") as a, a.connect(owner.export(), 10), a.connect(owner.export(), 10):
        with pytest.raises(TransportError, match="serves 2 connections already"):
            a.connect(owner.export(), 10)
        assert len(owner.inbound()) == 2


def test_a_session_fenced_before_it_opens_never_opens(owner: TcpTransport) -> None:
    session = new_session()
    assert owner.fence_inbound(session, 1)
    hello = Hello(VERSION, "data", session, owner.session, "raw")
    with dial(owner) as sock, pytest.raises(TransportError, match="session is over"):
        greet(sock, KEY, "regauge-tcp", hello, time.monotonic() + 10)
    for name in ("short", "x" * 65):
        hello = Hello(VERSION, "data", name, owner.session, "raw")
        with dial(owner) as sock, pytest.raises(TransportError, match="wrong length"):
            greet(sock, KEY, "regauge-tcp", hello, time.monotonic() + 10)


@pytest.mark.parametrize(
    "address", ["", ":", "127.0.0.1", "127.0.0.1:99999", "a\0b:1", "x" * 300 + ":1", "h:x", "localhost:1"]
)
def test_an_export_with_an_impossible_address_is_malformed(owner: TcpTransport, address: str) -> None:
    export = msgspec.msgpack.encode(Exported("tcp", address, "s", ()))
    with pytest.raises(ProtocolError, match="not host:port"):
        owner.connect(export, 1)


def test_it_binds_the_given_address_only() -> None:
    with TcpTransport(key=KEY, name="a", host="127.0.0.2") as a:
        host, port = a.address.rsplit(":", 1)
        assert host == "127.0.0.2"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=5)
        with TcpTransport(key=KEY, name="b", host="127.0.0.3") as b, b.connect(a.export(), 10):
            ours = a._listener.sessions()[0].sock.getpeername()
            assert ours[0] == "127.0.0.3"


def test_a_host_that_cannot_be_bound_or_told_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        TcpTransport(key=KEY, name="a", host="192.0.2.1")
    with pytest.raises(ConfigError, match="advertise"):
        TcpTransport(key=KEY, name="a", host=WILDCARD)
    with TcpTransport(key=KEY, name="a", host=WILDCARD, advertise="127.0.0.1") as a:
        assert a.address.startswith("127.0.0.1:")
        with TcpTransport(key=KEY, name="b") as b, b.connect(a.export(), 10):
            pass


def test_ipv6() -> None:
    try:
        a = TcpTransport(key=KEY, name="a", host="::1")
    except ConfigError:
        pytest.skip("no IPv6 on this host")
    with a, TcpTransport(key=KEY, name="b", host="::1") as b, b.connect(a.export(), 10):
        assert a.address.startswith("[::1]:")


def test_another_process_at_the_same_port_is_noticed(slab: Slab) -> None:
    with TcpTransport(key=KEY, name="a") as a, TcpTransport(key=KEY, name="old") as old:
        old.register(slab)
        export, port = old.export(), int(old.address.rsplit(":", 1)[1])
        peer = a.connect(export, 10)
        old.close()
        with TcpTransport(key=KEY, name="new", port=port):
            with pytest.raises(TransportError, match="restarted"):
                a.connect(export, 10)
            assert peer.fence(5)
        peer.close()
        assert decode_export(export, "tcp").session == old.session


@pytest.fixture
def big() -> Iterator[Slab]:
    with Slab(64 * MIB, "big") as made:
        made.array[:] = 3
        yield made


def long_post(peer: Peer, source: Slab, times: int) -> npt.NDArray[np.int64]:
    region = peer.regions[0]
    return np.repeat(pieces((source.address, region.address, region.nbytes)), times, axis=0)


@pytest.mark.process
def test_a_receiver_killed_in_a_write_is_noticed_within_a_second(big: Slab) -> None:
    with Child("tcp", KEY, big.nbytes) as child, TcpTransport(key=KEY, name="a") as a:
        a.register(big)
        with a.connect(bytes.fromhex(child.ask("export")), 10) as peer:
            ticket = peer.post(long_post(peer, big, 64), 60)
            wait_until(lambda: ticket.bytes_done > 0)
            child.signal(signal.SIGKILL)
            killed = time.monotonic()
            assert ticket.wait(10)
            assert time.monotonic() - killed < 2
            assert isinstance(ticket.error, PeerLost)
            assert peer.fence(5)


@pytest.mark.process
def test_a_frozen_receiver_meets_the_deadline_and_no_byte_lands_after_a_fence(big: Slab) -> None:
    with Child("tcp", KEY, big.nbytes) as child, TcpTransport(key=KEY, name="a") as a:
        a.register(big)
        with a.connect(bytes.fromhex(child.ask("export")), 10) as peer:
            child.signal(signal.SIGSTOP)
            ticket = peer.post(long_post(peer, big, 1), 0.5)
            posted = time.monotonic()
            assert ticket.wait(10)
            assert 0.4 < time.monotonic() - posted < 3
            assert isinstance(ticket.error, DeadlineExceeded)
            assert "may still land" in ticket.reason
            assert not peer.fence(0.3)
            child.signal(signal.SIGCONT)
            assert peer.fence(20)
            child.ask("fill 9")
            before = child.ask(f"digest {big.nbytes}")
            assert child.ask("sessions") == "0"
            again = a.connect(bytes.fromhex(child.ask("export")), 10)
            again.close()
            assert child.ask(f"digest {big.nbytes}") == before


@pytest.mark.process
def test_a_frozen_writer_is_fenced_by_the_receiver(slab: Slab, owner: TcpTransport) -> None:
    with Child("tcp", KEY, MIB) as child:
        session = child.ask(f"connect {owner.export().hex()}")
        child.ask("fill 5")
        child.ask("write 20000")
        wait_until(lambda: any(each.nbytes > 0 for each in owner.inbound()))
        child.signal(signal.SIGSTOP)
        assert owner.fence_inbound(session, 10)
        slab.array[:] = 0
        child.signal(signal.SIGCONT)
        state = child.ask("wait")
        assert state.startswith("failed")
        assert not slab.array.any()


def shift(spans: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    moved = spans.copy()
    moved[:, 0] += memory.ctypes.data
    return moved


def test_vectors_of_addresses_move_in_any_cut() -> None:
    left, right = socket.socketpair()
    source = np.random.default_rng(0).integers(0, 256, 3 * MIB, dtype=np.uint8)
    target = np.zeros_like(source)
    edges = np.unique(np.concatenate(([0, source.nbytes], np.random.default_rng(1).integers(0, source.nbytes, 900))))
    spans = np.column_stack((edges[:-1], np.diff(edges))).astype(np.int64)
    with left, right:
        sender = threading.Thread(target=frames.send_vector, args=(left.fileno(), shift(spans, source)))
        sender.start()
        frames.recv_vector(right.fileno(), shift(spans[:400], target))
        frames.recv_vector(right.fileno(), shift(spans[400:], target))
        sender.join()
        assert np.array_equal(source, target)
        left.close()
        with pytest.raises(ConnectionResetError):
            frames.recv_vector(right.fileno(), np.array([[target.ctypes.data, 1]]))
        bad = np.array([[1, 8]], dtype=np.int64)
        with pytest.raises(OSError, match=r"Bad address|Broken pipe"):
            frames.send_vector(right.fileno(), bad)

"""Mutual TLS of data connections: who gets in, what crosses in the clear, what a relay can do."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from contract import KEY, MIB, array

from certificates import Authority
from regauge.errors import AuthError, ConfigError, DeadlineExceeded, PeerLost, ProtocolError, TransportError
from regauge.move.auth import authenticate_socket, recv_exactly, send_all
from regauge.move.memory import Slab
from regauge.move.tcp import TcpTransport
from regauge.move.tls import Tls, TlsStream


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def owner(authority: Authority) -> Iterator[TcpTransport]:
    with TcpTransport(key=KEY, name="owner", tls=authority.tls("owner")) as made:
        yield made


def refused(tls: Tls | None, owner: TcpTransport, key: bytes = KEY) -> None:
    with TcpTransport(key=key, name="a", tls=tls) as a:
        started = time.monotonic()
        with pytest.raises((AuthError, PeerLost)):
            a.connect(owner.export(), 3)
        assert time.monotonic() - started < 3
    assert owner.inbound() == []


def test_neither_a_certificate_nor_the_key_is_enough_alone(
    authority: Authority, owner: TcpTransport, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    stranger = Authority(tmp_path / "b")
    certificate, key = stranger.issue("worker")
    refused(stranger.tls("other"), owner)  # another authority on both sides of the connection
    refused(Tls.load(certificate, key, authority.path), owner)  # trusts ours, is signed by another
    refused(authority.tls("late", days=1), owner)  # expired
    refused(None, owner)  # the key, but no TLS
    refused(authority.tls("keyless"), owner, key=b"x" * 32)
    with TcpTransport(key=KEY, name="a", tls=authority.tls("a")) as a, a.connect(owner.export(), 10):
        assert [each.peer for each in owner.inbound()] == ["a"]


def test_a_side_with_tls_refuses_one_without(authority: Authority) -> None:
    with TcpTransport(key=KEY, name="plain") as plain, TcpTransport(key=KEY, name="a", tls=authority.tls("a")) as a:
        with pytest.raises(TransportError):
            a.connect(plain.export(), 3)
        assert plain.inbound() == []


def test_nothing_of_the_payload_crosses_in_the_clear(authority: Authority) -> None:
    marker = b"the-secret-of-the-cache-" * 40
    with (
        Slab(MIB, "a") as source,
        Slab(MIB, "b") as target,
        TcpTransport(key=KEY, name="b", tls=authority.tls("b")) as b,
        TcpTransport(key=KEY, name="a", tls=authority.tls("a")) as a,
        Relay(b.address) as relay,
    ):
        source.array[: len(marker)] = np.frombuffer(marker, np.uint8)
        a.register(source)
        region = b.register(target)
        export = b.export().replace(b.address.encode(), relay.address.encode())
        with a.connect(export, 10) as peer:
            ticket = peer.post(array([source.address, region.address, MIB]), 10)
            assert ticket.wait(10)
            ticket.check()
        assert target.array[: len(marker)].tobytes() == marker
        assert len(relay.seen) > MIB
        assert marker[:24] not in relay.seen
        assert b"regauge" not in relay.seen


class Relay:
    """Forwards one connection, and keeps what the initiator sent."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        # The address must be as long as the target's, since it takes its place in an export.
        while len(str(self._listener.getsockname()[1])) != len(port):
            self._listener.close()
            self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self._far = socket.create_connection((host, int(port)))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(20)
        self._listener.close()
        self._far.close()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        back = threading.Thread(target=self._pump, args=(self._far, near, bytearray()))
        back.start()
        self._pump(near, self._far, self.seen)
        back.join(20)
        near.close()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        try:
            while data := source.recv(1 << 16):
                seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def handshake(left: Tls, right: Tls) -> tuple[TlsStream, TlsStream]:
    ours, theirs = socket.socketpair()
    found: list[TlsStream] = []
    limit = time.monotonic() + 10
    thread = threading.Thread(target=lambda: found.append(right.wrap(theirs, limit, server=True)))
    thread.start()
    stream = left.wrap(ours, limit, server=False)
    thread.join()
    return stream, found[0]


def close(*streams: TlsStream) -> None:
    for stream in streams:
        stream.sock.close()


def test_the_proof_of_the_key_cannot_be_relayed_by_another_worker(authority: Authority) -> None:
    """A worker in the middle, with a certificate of its own but without the key, passes proofs on between two others."""
    a, b, middle = authority.tls("a"), authority.tls("b"), authority.tls("middle")
    left, to_left = handshake(a, middle)
    to_right, right = handshake(middle, b)
    errors: list[BaseException] = []

    def prove(stream: TlsStream, role: str) -> None:
        try:
            authenticate_socket(
                stream, KEY, "initiator" if role == "initiator" else "acceptor", "p" + stream.binding, limit
            )
        except (AuthError, PeerLost) as error:
            errors.append(error)

    limit = time.monotonic() + 10
    threads = [threading.Thread(target=prove, args=each) for each in ((left, "initiator"), (right, "acceptor"))]
    for thread in threads:
        thread.start()
    for source, target, size in ((to_left, to_right, 40), (to_right, to_left, 40), (to_left, to_right, 33)):
        send_all(target, recv_exactly(source, size, limit), limit)
    send_all(to_left, recv_exactly(to_right, 33, limit), limit)
    for thread in threads:
        thread.join()
    close(left, right, to_left, to_right)
    assert len(errors) == 2
    assert all(isinstance(error, AuthError) for error in errors)
    direct = handshake(a, b)
    assert direct[0].binding == direct[1].binding
    assert a.digest in direct[0].binding
    assert b.digest in direct[0].binding
    close(*direct)


def test_a_peer_that_stalls_in_the_handshake_is_cut_at_the_deadline(authority: Authority) -> None:
    tls = authority.tls("a")
    for server in (False, True):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(b"\x16\x03\x01\x01")
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                tls.wrap(ours, started + 0.1, server=server)
            assert time.monotonic() - started < 2


def test_garbage_ends_the_handshake(authority: Authority) -> None:
    tls = authority.tls("a")
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x03\xff\xff" + bytes(20_000)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            with pytest.raises(AuthError, match="TLS with the peer failed"):
                tls.wrap(ours, time.monotonic() + 5, server=True)


def test_a_stream_reads_what_arrives_in_any_cut(authority: Authority) -> None:
    tls = authority.tls("a")
    left, right = handshake(tls, tls)
    data = np.random.default_rng(0).integers(0, 256, 700_001, dtype=np.uint8)
    edges = np.unique(np.concatenate(([0, len(data)], np.random.default_rng(1).integers(0, len(data), 40))))
    spans = np.column_stack((edges[:-1] + data.ctypes.data, np.diff(edges))).astype(np.int64)
    sender = threading.Thread(target=left.send_vector, args=(spans,))
    sender.start()
    got = bytearray(500_000)
    assert right.fill(memoryview(got))
    while len(got) < len(data):
        got += right.take()
    sender.join()
    assert bytes(got) == data.tobytes()
    left.sock.close()
    assert right.recv(10) == b""
    with pytest.raises(ConnectionResetError):
        right.take()
    assert not right.fill(memoryview(bytearray(1)))
    right.sock.close()


def test_a_record_that_was_changed_on_the_way_ends_the_stream(authority: Authority) -> None:
    tls = authority.tls("a")
    left, right = handshake(tls, tls)
    ours, theirs = left.sock, right.sock
    between, far = socket.socketpair()
    right.sock = far  # the test is the network
    left.sendall(b"x" * 100)
    record = bytearray(theirs.recv(1 << 16))
    record[50] ^= 1
    between.sendall(record)
    with pytest.raises(OSError, match=r"BAD_RECORD|bad record"):
        right.recv(100)
    for sock in (ours, theirs, between, far):
        sock.close()


def test_files_that_do_not_fit_are_named(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("a")
    _, other = authority.issue("b")
    with pytest.raises(ConfigError, match=r"b\.key: not the key of"):
        Tls.load(certificate, other, authority.path)
    with pytest.raises(ConfigError, match=r"missing: No such file or directory; set transfer\.tls"):
        Tls.load(tmp_path / "missing", key, authority.path)
    with pytest.raises(ConfigError, match=r"a\.key: no certificate in PEM"):
        Tls.load(key, key, authority.path)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"a\.key: others can read this private key"):
        Tls.load(certificate, key, authority.path)
    key.chmod(0o600)
    with pytest.raises(ConfigError, match=r"missing: cannot read the authority"):
        Tls.load(certificate, key, tmp_path / "missing")


def test_a_malformed_hello_over_tls_ends_that_connection_only(authority: Authority, owner: TcpTransport) -> None:
    tls = authority.tls("a")
    host, port = owner.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        stream = tls.wrap(sock, time.monotonic() + 5, server=False)
        with pytest.raises((AuthError, PeerLost, ProtocolError)):
            authenticate_socket(stream, KEY, "initiator", "regauge-tcp", time.monotonic() + 5)  # without the channel
    with TcpTransport(key=KEY, name="a", tls=tls) as a, a.connect(owner.export(), 10):
        assert len(owner.inbound()) == 1

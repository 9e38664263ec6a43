"""Mutual TLS for data and control connections: a worker's certificate, its key and the authority that signs workers.

TLS 1.3 only. Both sides show a certificate that the authority has signed. The authority is the deployment's own and signs
its workers and nothing else: names in certificates are not compared with addresses. The pre-shared key is still proven, above
TLS, and its proof covers both certificates: neither half can be relayed from another connection.

A connection is one `ssl.SSLObject` over memory, so that one thread may send while another receives: an `ssl.SSLSocket` must
not be used so (openssl-threads(7)), or makes the two wait for each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from regauge.config import TlsConfig
from regauge.errors import AuthError, ConfigError, DeadlineExceeded, PeerLost
from regauge.keys import read_bounded, read_private
from regauge.move.auth import recv_some, send_all
from regauge.move.pieces import Int64s
from regauge.move.stream import Stream

_RECEIVE_BYTES = 1 << 18
_BATCH_BYTES = 1 << 18
"""Bytes that are encrypted at once: small pieces share records, large ones do not pile up."""
_MAX_BYTES = 1 << 20
_REMEDY = "set transfer.tls.certificate, .key and .authority to PEM files that belong together"


@dataclass(frozen=True)
class Tls:
    """What a side of a connection needs. Make it with `load`."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    digest: str
    """SHA-256 of this side's certificate, in hexadecimal."""

    @classmethod
    def load(cls, certificate: Path, key: Path, authority: Path) -> Tls:
        """Read three PEM files. Raises ConfigError that names the file."""
        try:
            read_private(key)
            first = x509.load_pem_x509_certificates(read_bounded(certificate, _MAX_BYTES))[0]
        except ConfigError as error:
            raise ConfigError(f"{error}; {_REMEDY}") from error
        except ValueError as error:
            raise ConfigError(f"{certificate}: no certificate in PEM: {error}; {_REMEDY}") from error
        contexts = []
        for purpose in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(purpose)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the authority signs workers only; see the module
            context.verify_mode = ssl.CERT_REQUIRED
            _load(context, certificate, key, authority)
            contexts.append(context)
        contexts[1].num_tickets = 0  # sessions are not resumed: every connection shows its certificate
        digest = hashlib.sha256(first.public_bytes(Encoding.DER)).hexdigest()
        return cls(contexts[0], contexts[1], digest)

    def binding(self, peer_certificate: bytes, *, server: bool) -> str:
        """Return what names the two ends of a connection, the same on both of them: see `Stream.binding`."""
        other = hashlib.sha256(peer_certificate).hexdigest()
        first, second = (other, self.digest) if server else (self.digest, other)
        return f" over TLS {first} {second}"

    def wrap(self, sock: socket.socket, deadline: float, *, server: bool) -> TlsStream:
        """Shake hands over a connected socket before `deadline`, a `time.monotonic()` instant.

        Raises AuthError, PeerLost or DeadlineExceeded; the caller closes the socket.
        """
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = self.server if server else self.client
        channel = context.wrap_bio(incoming, outgoing, server_side=server)
        done = False
        while not done:
            try:
                channel.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLError as error:
                with contextlib.suppress(PeerLost, DeadlineExceeded):  # the reason matters, not whether it arrives
                    send_all(sock, outgoing.read(), deadline)
                raise AuthError(f"TLS with the peer failed: {error}; give both sides TLS and one authority") from error
            if outgoing.pending:
                send_all(sock, outgoing.read(), deadline)
            if not done:
                incoming.write(recv_some(sock, 1 << 14, deadline))
        peer = channel.getpeercert(binary_form=True)
        if peer is None:
            raise AuthError("the peer showed no certificate")
        return TlsStream(sock, channel, incoming, outgoing, self.binding(peer, server=server))


def from_config(config: TlsConfig | None) -> Tls | None:
    """Return what the configuration names; None where it names nothing. Raises ConfigError that names the file."""
    if config is None:
        return None
    return Tls.load(Path(config.certificate), Path(config.key), Path(config.authority))


def _load(context: ssl.SSLContext, certificate: Path, key: Path, authority: Path) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{key}: not the key of {certificate}: {error}; {_REMEDY}") from error
    try:
        context.load_verify_locations(cafile=authority)
    except OSError as error:
        raise ConfigError(f"{authority}: cannot read the authority's certificate: {error}; {_REMEDY}") from error


class TlsStream(Stream):
    """A stream under TLS. One thread may send while another receives."""

    def __init__(
        self,
        sock: socket.socket,
        channel: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        binding: str,
    ) -> None:
        super().__init__(sock, binding)
        self._channel, self._incoming, self._outgoing = channel, incoming, outgoing
        self._lock = threading.Lock()
        self._until: float | None = None

    def settimeout(self, value: float | None) -> None:
        """Bound every blocking call, also one that takes many reads of the socket; None: block."""
        self._until = None if value is None else time.monotonic() + value
        super().settimeout(value)

    def send(self, data: bytes | memoryview, _flags: int = 0, /) -> int:
        """Encrypt and send a part of `data`; return its length. Raises OSError."""
        part = memoryview(data)[:_BATCH_BYTES]
        with self._lock:
            sent = self._channel.write(part)
            records = self._outgoing.read()
        self.sock.sendall(records)  # in order: only one thread sends
        return sent

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything. Raises OSError."""
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def recv(self, count: int, /) -> bytes:
        """Receive at most `count` bytes, none at the end. Raises OSError."""
        view = memoryview(bytearray(count))
        return bytes(view[: self._read(view)])

    def fill(self, view: memoryview) -> bool:
        """Receive until `view` is full; False at the end of the stream. Raises OSError."""
        while view:
            got = self._read(view)
            if not got:
                return False
            view = view[got:]
        return True

    def take(self) -> bytes:
        """Decrypt what is here already, else what one read of a readable socket gives, which may be nothing yet. Raises OSError, also at the end."""
        if here := self._decrypted():
            return here
        records = self.sock.recv(_RECEIVE_BYTES)
        if not records:
            raise ConnectionResetError(104, "the peer closed it or died")
        return self._decrypted(records)

    def _decrypted(self, records: bytes = b"") -> bytes:
        parts = []
        with self._lock:
            self._incoming.write(records)
            with contextlib.suppress(ssl.SSLWantReadError):
                while part := self._channel.read(_RECEIVE_BYTES):
                    parts.append(part)
        return b"".join(parts)

    def send_vector(self, vector: Int64s) -> None:
        """Send the bytes at int64[N, 2] (address, length), which are trusted. Raises OSError."""
        batch = bytearray()
        for address, length in vector.tolist():
            if length < _BATCH_BYTES // 8:
                batch += _view(address, length)
                if len(batch) < _BATCH_BYTES:
                    continue
            self.sendall(batch)
            batch = bytearray()
            if length >= _BATCH_BYTES // 8:
                self.sendall(_view(address, length))
        self.sendall(batch)

    def recv_vector(self, vector: Int64s) -> None:
        """Receive into int64[N, 2] (address, length), which are trusted. Raises OSError, also at the end."""
        for address, length in vector.tolist():
            if not self.fill(_view(address, length)):
                raise ConnectionResetError(104, "the peer closed it or died")

    def _read(self, view: memoryview) -> int:
        while True:
            with self._lock:
                try:
                    return int(self._channel.read(len(view), view))
                except ssl.SSLWantReadError:
                    pass  # a record is not whole yet
                except ssl.SSLZeroReturnError:
                    return 0
            if self._until is not None:
                if (left := self._until - time.monotonic()) <= 0:
                    raise TimeoutError
                self.sock.settimeout(left)
            records = self.sock.recv(_RECEIVE_BYTES)
            if not records:
                return 0
            with self._lock:
                self._incoming.write(records)


def _view(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")

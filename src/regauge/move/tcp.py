"""The tcp transport: framed scatter/gather writes over one authenticated stream per peer. Runs anywhere.

The receiver takes part in every write: it checks generation, region and bounds of each piece of a frame before a byte
of it is taken, and acknowledges each frame once it lies in memory. A refused frame is drained and answered with the
reason; the connection goes on. Frames are described in `frames`.

Failure. Bytes of a failed post may still be on their way in socket buffers. `TcpPeer.fence` therefore asks the
receiver, over a fresh connection, whether the session is over; the receiver ends it and answers once its reader has
stopped. An address where nobody listens any more counts as a yes, since a transport stops listening last: the compute
plane must not answer for a live host (no REJECT rules between workers).
"""

from __future__ import annotations

import re
import socket
import threading
import time

import numpy as np

from regauge.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, TransportError
from regauge.move import frames
from regauge.move.listener import VERSION, Hello, Listener, ListeningTransport, Session, greet
from regauge.move.pieces import Int64s
from regauge.move.tcp_peer import TcpPeer
from regauge.move.transport import Caps, Exported, Transport, decode_export, instant, new_session

_PURPOSE = "regauge-tcp"
_HOST = re.compile(r"\[?[0-9A-Za-z.:%_-]{1,253}\]?")
_PORT = re.compile(r"[0-9]{1,5}")
_LOCAL_BUFFER_BYTES = 256 << 10
_CAPS = Caps(
    one_sided=False,
    max_pieces=frames.MAX_PIECES,
    max_bytes=frames.MAX_PAYLOAD,
    needs_registration=True,
    can_fence=True,
    verifies_receiver_bounds=True,
    maps_memory=False,
)


class NobodyListensError(PeerLost):
    """Nobody listens at the peer's address any more."""


class TcpTransport(ListeningTransport):
    """Binds `host` (an address of the compute plane; port 0 picks one) and connects from it.

    `advertise` is the address that peers are told when `host` is a wildcard. Raises ConfigError for a host that
    cannot be bound.
    """

    kind = "tcp"
    caps = _CAPS

    def __init__(
        self, *, key: bytes, name: str, host: str = "127.0.0.1", port: int = 0, advertise: str | None = None
    ) -> None:
        super().__init__(name)
        self._key = key
        wildcard = host in ("0.0.0.0", "::")  # noqa: S104  # compared with, to ask for the address to advertise
        if wildcard and advertise is None:
            raise ConfigError(f"host {host} is a wildcard; say with `advertise` which address peers connect to")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(64)
        except OSError as error:
            sock.close()
            raise ConfigError(f"cannot listen on {host} port {port}: {error}; give an address of this host") from error
        self._source = None if wildcard else host
        self._address = _join(advertise or host, sock.getsockname()[1])
        self._landing = threading.Condition()
        self._listener = Listener(sock, key=key, purpose=_PURPOSE, transport=self.session, admit=self._admit)

    @property
    def address(self) -> str:
        """`host:port`, or `[host]:port`."""
        return self._address

    def connect(self, exported: bytes, deadline_s: float) -> TcpPeer:
        """Connect to what a peer exported; see `Transport.connect`."""
        target, deadline, session = decode_export(exported, self.kind), instant(deadline_s), new_session()
        sock = self._dial(target, Hello(VERSION, "data", session, target.session, self.name), deadline)
        return TcpPeer(self, target, session, sock, lambda limit: self.is_gone(target, session, limit))

    def is_gone(self, target: Exported, session: str, deadline: float) -> bool:
        """Ask the peer to end a session and to confirm it. False when no confirmation came by `deadline`."""
        pause = threading.Event()
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._dial(target, Hello(VERSION, "fence", session, target.session, self.name, left), deadline).close()
            except NobodyListensError:
                return True
            except PeerLost:
                pause.wait(min(0.05, left))  # it is closing, or full: ask again
            except (TransportError, ProtocolError):
                return False
            else:
                return True
        return False

    def _admit(self, sock: socket.socket, hello: Hello) -> TcpSession:
        _tune(sock)
        _keep_in_cache(sock)
        return TcpSession(sock, hello, self, self._landing)

    def _dial(self, target: Exported, hello: Hello, deadline: float) -> socket.socket:
        """Connect and greet. Raises NobodyListensError, which is a PeerLost, when nobody listens there."""
        host, port = _split(target.address)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            _tune(sock)
            if self._source is not None:  # keeps the connection on the plane that this side was given
                sock.bind((self._source, 0))
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            sock.connect((host, port))
            _keep_in_cache(sock)
            greet(sock, self._key, _PURPOSE, hello, deadline)
        except TimeoutError as error:
            sock.close()
            raise DeadlineExceeded(f"{target.address} did not accept a connection in time") from error
        except (OSError, UnicodeError) as error:  # the latter for a host name that cannot be one
            sock.close()
            lost = NobodyListensError if isinstance(error, ConnectionRefusedError) else PeerLost
            raise lost(f"cannot connect from {self._source or 'any address'} to {target.address}: {error}") from error
        except BaseException:
            sock.close()
            raise
        return sock

    def _revoke(self, generation: int) -> None:
        deadline = instant(self.close_s)
        with self._landing:
            for session in self._listener.sessions():
                if isinstance(session, TcpSession) and session.landing == generation:
                    session.hang_up()
            clear = self._landing.wait_for(
                lambda: all(getattr(each, "landing", 0) != generation for each in self._listener.sessions()),
                max(0.0, deadline - time.monotonic()),
            )
        if not clear:
            raise DeadlineExceeded("a write into the withdrawn slab did not end; close the transport")


class TcpSession(Session):
    """The receiving end of one peer's stream."""

    def __init__(self, sock: socket.socket, hello: Hello, transport: Transport, landing: threading.Condition) -> None:
        super().__init__(sock, hello)
        self._transport, self._changed = transport, landing
        self.landing: int | None = None
        """Generation that a frame is being taken into just now; guarded by the transport's condition."""

    def run(self) -> None:
        """Take frames until the stream ends."""
        header = bytearray(frames.HEADER_BYTES)
        table = np.empty(16 * frames.MAX_PIECES, dtype=np.uint8)
        while self._fill(memoryview(header)):
            try:
                head = frames.decode_header(memoryview(header))
                raw = table[: 16 * head.count]
                if not self._fill(raw.data):
                    return
                where = frames.decode_table(head, raw)
            except ProtocolError as error:
                self.sock.sendall(frames.encode_ack(0, frames.MALFORMED, 0, str(error)))
                raise
            reason = self._take(head, where)
            status = frames.REFUSED if reason else frames.LANDED
            self.sock.sendall(frames.encode_ack(head.ticket, status, head.payload, reason))

    def fence(self, deadline: float) -> bool:
        """Cut the stream and wait for its reader."""
        self.hang_up()
        return self.ended.wait(max(0.0, deadline - time.monotonic()))

    def _take(self, head: frames.Header, where: Int64s) -> str:
        """Land a frame's payload, or drain it and return the reason."""
        with self._changed:
            # Under the lock that a withdrawal takes: it either sees `landing`, or has changed the table before.
            memory = self._transport.memory()
            reason = frames.refusal(where, memory.region(head.generation), head.generation)
            keep = memory.arrays.get(head.generation)
            self.landing = None if reason else head.generation
        if reason:
            self._drain(head.payload)
            return reason
        try:
            frames.recv_vector(self.sock.fileno(), where)
        finally:
            with self._changed:
                self.landing = None
                self._changed.notify_all()
        del keep  # the slab stayed mapped until here, whatever its owner did meanwhile
        self.nbytes += head.payload
        return ""

    def _fill(self, view: memoryview) -> bool:
        """Receive until `view` is full; False at the end of the stream."""
        while view:
            got = self.sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not got:
                return False
            view = view[got:]
        return True

    def _drain(self, count: int) -> None:
        scratch = memoryview(bytearray(min(count, 1 << 18)))
        while count and self._fill(part := scratch[: min(count, len(scratch))]):
            count -= len(part)


def _tune(sock: socket.socket) -> None:
    """Send small frames at once, and notice a dead host within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _keep_in_cache(sock: socket.socket) -> None:
    """Within one host, keep what is under way small enough for the CPU's cache: bench/transports.py gains a half.

    Between hosts the kernel tunes the buffers to the link's bandwidth and delay, which is left to it.
    """
    if sock.getsockname()[0] == sock.getpeername()[0]:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _LOCAL_BUFFER_BYTES)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ProtocolError(f"a transport's export has the address {address!r}, which is not host:port")
    return host.strip("[]"), int(port)

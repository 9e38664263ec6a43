"""The tcp transport: framed scatter/gather writes over one or more authenticated streams per peer. Runs anywhere.

The receiver takes part in every write: it checks generation, region, bounds and, where it asks for grants, the grant of each
piece of a frame before a byte of it is taken, and acknowledges each frame once it lies in memory. A refused frame is drained
and answered with the reason; the connection goes on. Frames are described in `frames`. The streams (lanes) of a peer are one
session: its chunks go to whichever lane is free, and the session ends with the first lane that breaks.

Failure. Bytes of a failed post may still be on their way in socket buffers. `TcpPeer.fence` therefore asks the
receiver, over a fresh connection, whether the session is over; the receiver ends all its lanes and answers once their readers
have stopped. An address where nobody listens any more counts as a yes, since a transport stops listening last: the compute
plane must not answer for a live host (no REJECT rules between workers).
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from regauge.errors import ConfigError, DeadlineExceeded, ProtocolError, TransportError
from regauge.move import frames
from regauge.move.dial import Endpoint, tune
from regauge.move.grants import Grants
from regauge.move.listener import MAX_LANES, VERSION, Hello, Listener, ListeningTransport, Session
from regauge.move.pieces import Int64s
from regauge.move.stream import Stream
from regauge.move.tcp_peer import TcpPeer
from regauge.move.tls import Tls
from regauge.move.transport import Caps, Exported, Transport, decode_export, instant, new_session

_PURPOSE = "regauge-tcp"
_LOCAL_BUFFER_BYTES = 256 << 10
_CAPS = Caps(
    one_sided=False,
    max_pieces=frames.MAX_PIECES,
    max_bytes=frames.MAX_PAYLOAD,
    needs_registration=True,
    can_fence=True,
    verifies_receiver_bounds=True,
    maps_memory=False,
    checks_grants=False,
)


class TcpTransport(ListeningTransport):
    """Listens on the plane that `host` names (an address, network or interface, see `plane`; port 0 picks one) and connects from it.

    A wildcard lies on every plane; it is taken only together with `advertise`, the numeric address that peers are told.
    `lanes` streams go to each peer. With `tls` every connection is TLS on both sides. With `grants` a writer may write
    nothing but what `allow` lets it. Raises ConfigError for a host that cannot be bound.
    """

    kind = "tcp"
    caps = _CAPS

    def __init__(
        self,
        *,
        key: bytes,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        lanes: int = 1,
        tls: Tls | None = None,
        grants: bool = False,
    ) -> None:
        super().__init__(name)
        if not 1 <= lanes <= MAX_LANES:
            raise ConfigError(f"{lanes} lanes; give 1 to {MAX_LANES}")
        self._lanes = lanes
        # Frames of a peer with several lanes are smaller, so that a post of a few MiB reaches all of them.
        self.caps = dataclasses.replace(_CAPS, max_bytes=frames.MAX_PAYLOAD // lanes, checks_grants=grants)
        self._end = Endpoint(key, _PURPOSE, host, advertise=advertise, tls=tls, ready=_keep_in_cache)
        sock, self._address = self._end.listen(port, 64 * lanes)
        self._landing = threading.Condition()
        self._grants = Grants() if grants else None
        self._listener = Listener(
            sock, key=key, purpose=_PURPOSE, transport=self.session, admit=self._admit, secure=self._end.secure
        )

    @property
    def address(self) -> str:
        """`host:port`, or `[host]:port`."""
        return self._address

    def connect(self, exported: bytes, deadline_s: float) -> TcpPeer:
        """Connect to what a peer exported; see `Transport.connect`."""
        target, deadline, session = decode_export(exported, self.kind), instant(deadline_s), new_session()
        streams: list[Stream] = []
        try:
            for lane in range(self._lanes):
                hello = Hello(VERSION, "data", session, target.session, self.name, lane=lane)
                streams.append(self._end.dial(target, hello, deadline))
            return TcpPeer(self, target, session, streams, lambda limit: self.is_gone(target, session, limit))
        except BaseException as error:  # closed whatever broke, also by an interrupt
            for stream in streams:
                stream.sock.close()
            if isinstance(error, OSError):
                raise TransportError(f"cannot serve a connection: {error}; raise the limit on open files") from error
            raise

    def is_gone(self, target: Exported, session: str, deadline: float) -> bool:
        """Ask the peer to end a session and to confirm it. False when no confirmation came by `deadline`."""
        return self._end.is_gone(target, session, self.name, deadline)

    def _admit(self, sock: socket.socket, hello: Hello) -> TcpSession:
        tune(sock)
        _keep_in_cache(sock)
        return TcpSession(sock, hello, self, self._landing, self._grants)

    def allow(self, session: str, grant: int, ranges: Int64s) -> None:
        """Let a session write; see `Transport.allow`."""
        if self._grants is not None:
            with self._landing:
                self._grants.allow(session, grant, ranges)

    def revoke(self, session: str, grant: int, deadline_s: float) -> bool:
        """Withdraw a grant; see `Transport.revoke`."""
        if self._grants is None:
            return False
        with self._landing:
            self._grants.revoke(session, grant)
        return self._settle(lambda each: each.session == session and each.grant == grant, deadline_s)

    def fence_inbound(self, session: str, deadline_s: float) -> bool:
        """End a writer's connection and make sure of it; see `Transport.fence_inbound`."""
        if self._grants is not None:
            with self._landing:
                self._grants.forget(session)
        return super().fence_inbound(session, deadline_s)

    def _revoke(self, generation: int) -> None:
        if not self._settle(lambda each: each.landing == generation, 0.0):
            raise DeadlineExceeded("a write into the withdrawn slab did not end; close the transport")

    def _settle(self, concerns: Callable[[TcpSession], bool], patience_s: float) -> bool:
        """Wait until no concerned session is taking a frame, and cut those that still do after `patience_s`."""

        def busy() -> list[TcpSession]:
            return [each for each in self._listener.sessions() if isinstance(each, TcpSession) and concerns(each)]

        with self._landing:
            if self._landing.wait_for(lambda: not busy(), max(0.0, patience_s)):
                return True
            for session in busy():
                session.hang_up()
            return self._landing.wait_for(lambda: not busy(), self.close_s)


class TcpSession(Session):
    """The receiving end of one peer's stream."""

    def __init__(
        self,
        sock: socket.socket,
        hello: Hello,
        transport: Transport,
        landing: threading.Condition,
        grants: Grants | None,
    ) -> None:
        super().__init__(sock, hello)
        self._transport, self._changed, self._grants = transport, landing, grants
        self.landing: int | None = None
        """Generation that a frame is being taken into just now; guarded by the transport's condition."""
        self.grant: int | None = None
        """The grant that it is taken under; likewise."""

    def run(self) -> None:
        """Take frames until the stream ends."""
        header = bytearray(frames.HEADER_BYTES)
        table = np.empty(16 * frames.MAX_PIECES, dtype=np.uint8)
        while self.stream.fill(memoryview(header)):
            try:
                head = frames.decode_header(memoryview(header))
                raw = table[: 16 * head.count]
                if not self.stream.fill(raw.data):
                    return
                where = frames.decode_table(head, raw)
            except ProtocolError as error:
                self.stream.sendall(frames.encode_ack(0, frames.MALFORMED, 0, str(error)))
                raise
            reason = self._take(head, where)
            status = frames.REFUSED if reason else frames.LANDED
            self.stream.sendall(frames.encode_ack(head.ticket, status, head.payload, reason))

    def fence(self, deadline: float) -> bool:
        """Cut the stream and wait for its reader."""
        self.hang_up()
        return self.ended.wait(max(0.0, deadline - time.monotonic()))

    def _take(self, head: frames.Header, where: Int64s) -> str:
        """Land a frame's payload, or drain it and return the reason."""
        with self._changed:
            # Under the lock that a withdrawal takes (of a slab or a grant): it either sees `landing`, or has changed the table before.
            memory = self._transport.memory()
            reason = frames.refusal(where, memory.region(head.generation), head.generation)
            if not reason and self._grants is not None:
                reason = self._grants.refusal(self.session, head.grant, where)
            keep = memory.arrays.get(head.generation)
            if not reason:
                self.landing, self.grant = head.generation, head.grant
        if reason:
            self._drain(head.payload)
            return reason
        try:
            self.stream.recv_vector(where)
        finally:
            with self._changed:
                self.landing = self.grant = None
                self._changed.notify_all()
        del keep  # the slab stayed mapped until here, whatever its owner did meanwhile
        self.nbytes += head.payload
        return ""

    def _drain(self, count: int) -> None:
        scratch = memoryview(bytearray(min(count, 1 << 18)))
        while count and self.stream.fill(part := scratch[: min(count, len(scratch))]):
            count -= len(part)


def _keep_in_cache(sock: socket.socket) -> None:
    """Within one host, keep what is under way small enough for the CPU's cache: bench/transports.py gains a half.

    Between hosts the kernel tunes the buffers to the link's bandwidth and delay, which is left to it.
    """
    if sock.getsockname()[0] == sock.getpeername()[0]:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _LOCAL_BUFFER_BYTES)

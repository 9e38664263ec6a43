"""One stream of the tcp transport, in the clear. `tls.TlsStream` is the same under TLS."""

from __future__ import annotations

import socket

from regauge.move import frames
from regauge.move.pieces import Int64s

TAKE_BYTES = 1 << 16


class Stream:
    """What the transport does with a connected socket. One thread sends, one receives."""

    def __init__(self, sock: socket.socket, binding: str = "") -> None:
        self.sock = sock
        self.binding = binding
        """What the channel adds to the purpose of the authentication above it, so that neither goes without the other."""

    def settimeout(self, value: float | None) -> None:
        """Bound every blocking call; None: block."""
        self.sock.settimeout(value)

    def send(self, data: bytes | memoryview, flags: int = 0, /) -> int:
        """Send a part of `data`; return its length. Raises OSError."""
        return self.sock.send(data, flags)

    def recv(self, count: int, /) -> bytes:
        """Receive at most `count` bytes, none at the end. Raises OSError."""
        return self.sock.recv(count)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything. Raises OSError."""
        self.sock.sendall(data)

    def fill(self, view: memoryview) -> bool:
        """Receive until `view` is full; False at the end of the stream. Raises OSError."""
        while view:
            got = self.sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not got:
                return False
            view = view[got:]
        return True

    def take(self) -> bytes:
        """Return what one read of a readable socket gives, which may be nothing yet. Raises OSError, also at the end."""
        data = self.sock.recv(TAKE_BYTES)
        if not data:
            raise ConnectionResetError(104, "the peer closed it or died")
        return data

    def send_vector(self, vector: Int64s) -> None:
        """Send the bytes at int64[N, 2]; see `frames.send_vector`."""
        frames.send_vector(self.sock.fileno(), vector)

    def recv_vector(self, vector: Int64s) -> None:
        """Receive into int64[N, 2]; see `frames.recv_vector`."""
        frames.recv_vector(self.sock.fileno(), vector)

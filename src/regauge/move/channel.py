"""One authenticated control connection: framed messages both ways over asyncio streams, under TLS where it is configured."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable

import structlog

from regauge.errors import AuthError, DeadlineExceeded, PeerLost, ProtocolError
from regauge.layout import files
from regauge.layout.spec import Layout
from regauge.layout.view import check_memory
from regauge.move import messages as m
from regauge.move.auth import Role, authenticate
from regauge.move.dial import tune
from regauge.move.plane import Plane, own
from regauge.move.tls import Tls

log = structlog.get_logger()
PURPOSE = "regauge-control"
REFUSAL = "the peer refuses the pair: "
"""Begins what `Channel.hello` raises where the other side has judged."""
HELLO_S = 10.0
"""Most seconds for either side to authenticate and introduce itself."""
_BACKLOG = 128
_ACCEPT_PAUSE_S = 0.05
MAX_UNSENT = 64 << 20
"""Bytes that may wait for a peer that does not read; then the connection ends."""


class Channel:
    """Messages over one connection. Used by one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.since = time.monotonic()
        """When the connection was made, on that clock."""
        self.resent = 0
        """Chunks that were asked for again."""
        self.resumed = 0
        """Grants that go on from where an earlier link broke."""
        address = writer.get_extra_info("peername")
        self.peer = str(address)
        """Address of the other end, for people."""
        self.is_far = not own(str(address[0])) if address else False
        """Whether the other end is another host."""
        self._reader = reader
        self._writer = writer
        tune(writer.get_extra_info("socket"))

    @classmethod
    async def open(
        cls, host: str, port: int, key: bytes, *, plane: Plane | None = None, tls: Tls | None = None, purpose: str = PURPOSE
    ) -> Channel:  # fmt: skip
        """Connect, from `plane` if one is given, and authenticate for `purpose`.

        Raises PeerLost, AuthError, DeadlineExceeded or, for a peer on another plane, TransportError within HELLO_S.
        """
        try:
            async with asyncio.timeout(HELLO_S):
                sock = await _dial(host, port, plane)
                try:
                    reader, writer = await asyncio.open_connection(
                        sock=sock, ssl=tls and tls.client, server_hostname=tls and ""
                    )
                except BaseException:  # closed whatever broke, also when cancelled
                    sock.close()
                    raise
        except TimeoutError as error:
            raise DeadlineExceeded(f"{host}:{port} did not answer within {HELLO_S:g} s") from error
        except ssl.SSLError as error:
            raise AuthError(f"TLS with {host}:{port} failed: {error}; give both sides TLS and one authority") from error
        except (OSError, UnicodeError) as error:  # the latter for a host name that cannot be one
            raise PeerLost(f"cannot connect to {host}:{port}: {error}") from error
        channel = cls(reader, writer)
        await channel._authenticate(key, "initiator", tls, purpose)
        return channel

    @classmethod
    async def accept(
        cls, sock: socket.socket, key: bytes, *, tls: Tls | None = None, purpose: str = PURPOSE
    ) -> Channel:
        """Authenticate a connection that a `Door` has let in, and which is closed on failure.

        Raises PeerLost, AuthError or DeadlineExceeded within HELLO_S, and with TLS within HELLO_S for that before.
        """
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=tls.server if tls else None, ssl_handshake_timeout=HELLO_S if tls else None
            )
        except ssl.SSLError as error:
            raise AuthError(f"TLS with a peer failed: {error}; give both sides TLS and one authority") from error
        except OSError as error:  # also where TLS has taken too long
            raise PeerLost(f"the connection broke before it was authenticated: {error}") from error
        channel = cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        await channel._authenticate(key, "acceptor", tls, purpose)
        return channel

    async def _authenticate(self, key: bytes, role: Role, tls: Tls | None, purpose: str) -> None:
        try:
            if tls is not None:
                purpose += tls.binding(_certificate(self._writer), server=role == "acceptor")
            await authenticate(self._reader, self._writer, key, role, purpose, HELLO_S)
        except BaseException:  # closed whatever broke, also when cancelled
            self.close()
            raise

    def send(self, message: m.Message) -> None:
        """Queue a message. Nothing is lost silently: a connection that broke shows in `receive`."""
        if self._writer.is_closing():
            return
        self._writer.write(m.encode(message))
        self.resent += isinstance(message, m.Again)
        self.resumed += isinstance(message, m.Grant) and bool(message.done)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self._writer.transport.abort()

    async def receive(self) -> m.AnyMessage:
        """Return the next message. Raises PeerLost at the end of the connection, ProtocolError for a bad frame."""
        return m.decode(await self.frame())

    async def frame(self) -> bytes:
        """Return the next frame's body. Raises PeerLost at the end of the connection, ProtocolError for one that is too long."""
        try:
            length = m.frame_length(await self._reader.readexactly(4))
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise PeerLost("the peer closed the control connection") from error
        except OSError as error:
            raise PeerLost(f"the control connection broke: {error}") from error

    async def hello(self) -> m.Hello:
        """Return the peer's hello. Raises ProtocolError if something else, or nothing for HELLO_S, comes first."""
        try:
            async with asyncio.timeout(HELLO_S):
                message = await self.receive()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the peer did not introduce itself within {HELLO_S:g} s") from error
        if isinstance(message, m.Refuse):
            raise ProtocolError(REFUSAL + "; ".join(message.reasons))
        if not isinstance(message, m.Hello):
            raise ProtocolError(f"expected Hello, the peer sent {type(message).__name__}")
        if message.version != m.VERSION:
            raise ProtocolError(f"the peer speaks version {message.version} of the protocol, this side {m.VERSION}")
        return message

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._writer.close()

    async def wait_closed(self) -> None:
        """Wait until the socket is gone."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Door:
    """Listens for control connections on a plane. Close it; what it has let in stays.

    `accepted(sock)` owns each connection before a byte of it is read, so that strangers are counted before TLS too, which they
    can make last. It must not block. Raises OSError where the plane cannot be bound.
    """

    def __init__(self, accepted: Callable[[socket.socket], None], plane: Plane, port: int = 0) -> None:
        self._accepted = accepted
        self._sock = socket.socket(plane.family, socket.SOCK_STREAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            plane.claim(self._sock, port)
            self._sock.listen(_BACKLOG)
        except OSError:
            self._sock.close()
            raise
        self._sock.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._accept())

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens: numeric address and port."""
        bound: tuple[str, int] = self._sock.getsockname()[:2]
        return bound

    async def close(self) -> None:
        """Stop listening."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError:
                log.warning("cannot accept a control connection", exc_info=True)
                await asyncio.sleep(_ACCEPT_PAUSE_S)  # out of descriptors, most likely: do not spin
                continue
            self._accepted(sock)


async def _dial(host: str, port: int, plane: Plane | None) -> socket.socket:
    """Connect to the first address that answers. Raises OSError, or TransportError for a peer on another plane."""
    loop = asyncio.get_running_loop()
    lost: OSError | None = None
    family = plane.family if plane else socket.AF_UNSPEC
    for found, kind, number, _, address in await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM):
        if plane is not None:
            plane.check(str(address[0]))
        sock = socket.socket(found, kind, number)
        try:
            sock.setblocking(False)
            if plane is not None:
                plane.claim(sock)
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            lost = error
        except BaseException:  # closed whatever broke, also when cancelled
            sock.close()
            raise
        else:
            return sock
    raise lost or OSError(f"{host} has no address")


def _certificate(writer: asyncio.StreamWriter) -> bytes:
    """Return the peer's certificate, DER. Raises AuthError without one."""
    channel = writer.get_extra_info("ssl_object")
    certificate = None if channel is None else channel.getpeercert(binary_form=True)
    if not isinstance(certificate, bytes):
        raise AuthError("the peer's connection is not under TLS with a certificate of its own")
    return certificate


def encode_layout(layout: Layout) -> bytes:
    """Return a layout as a hello carries it."""
    return files.encode(layout, format="json")


def decode_layout(data: bytes) -> Layout:
    """Read a peer's layout. Raises LayoutError naming the field; elements that overlap are refused too."""
    return check_memory(files.decode(data, format="json"))

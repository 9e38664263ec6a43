"""One authenticated control connection: framed messages both ways over asyncio streams."""

from __future__ import annotations

import asyncio
import contextlib

from regauge.errors import DeadlineExceeded, PeerLost, ProtocolError
from regauge.layout import files
from regauge.layout.spec import Layout
from regauge.layout.view import check_memory
from regauge.move import messages as m
from regauge.move.auth import authenticate

PURPOSE = "regauge-control"
HELLO_S = 10.0
"""Most seconds for either side to authenticate and introduce itself."""
MAX_UNSENT = 64 << 20
"""Bytes that may wait for a peer that does not read; then the connection ends."""


class Channel:
    """Messages over one connection. Used by one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, host: str, port: int, key: bytes) -> Channel:
        """Connect and authenticate. Raises PeerLost, AuthError or DeadlineExceeded within HELLO_S."""
        try:
            async with asyncio.timeout(HELLO_S):
                reader, writer = await asyncio.open_connection(host, port)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{host}:{port} did not answer within {HELLO_S:g} s") from error
        except OSError as error:
            raise PeerLost(f"cannot connect to {host}:{port}: {error}") from error
        channel = cls(reader, writer)
        await channel._authenticate(key, "initiator")
        return channel

    @classmethod
    async def accept(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> Channel:
        """Authenticate a connection that came in. Raises PeerLost, AuthError or DeadlineExceeded within HELLO_S."""
        channel = cls(reader, writer)
        await channel._authenticate(key, "acceptor")
        return channel

    async def _authenticate(self, key: bytes, role: str) -> None:
        try:
            await authenticate(
                self._reader, self._writer, key, "initiator" if role == "initiator" else "acceptor", PURPOSE, HELLO_S
            )
        except BaseException:
            self.close()
            raise

    def send(self, message: m.Message) -> None:
        """Queue a message. Nothing is lost silently: a connection that broke shows in `receive`."""
        if self._writer.is_closing():
            return
        self._writer.write(m.encode(message))
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self._writer.transport.abort()

    async def receive(self) -> m.AnyMessage:
        """Return the next message. Raises PeerLost at the end of the connection, ProtocolError for a bad frame."""
        try:
            length = m.frame_length(await self._reader.readexactly(4))
            return m.decode(await self._reader.readexactly(length))
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
            raise ProtocolError("the peer refuses the pair: " + "; ".join(message.reasons))
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


def encode_layout(layout: Layout) -> bytes:
    """Return a layout as a hello carries it."""
    return files.encode(layout, format="json")


def decode_layout(data: bytes) -> Layout:
    """Read a peer's layout. Raises LayoutError naming the field; elements that overlap are refused too."""
    return check_memory(files.decode(data, format="json"))

"""Mutual authentication over a pre-shared key, as a state machine and two thin drivers.

Challenge and response with HMAC-SHA256 (RFC 2104), three flights:

    initiator -> acceptor   hello:  "RGAU", version u8, role u8, two zero bytes, nonce[32]       40 bytes
    acceptor  -> initiator  hello                                                                40 bytes
    initiator -> acceptor   proof:  status u8, tag[32]                                           33 bytes
    acceptor  -> initiator  proof                                                                33 bytes

    tag = HMAC(key, "regauge-auth-1" 0x00 role initiator_nonce[32] acceptor_nonce[32] purpose)

Both nonces are fresh, so a recorded exchange is worth nothing; the role is under the tag, so a tag cannot be sent
back to its maker; `purpose` keeps a proof for one kind of channel from opening another. The acceptor proves itself
only after the initiator has, so a stranger obtains no tag from a listener.

This says who is at the other end when a connection opens. It does not encrypt or sign what follows: `tls` does, and its
channel is then part of `purpose`. Without it the plane must be a network on which nobody rewrites packets.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

from regauge import keys
from regauge.errors import AuthError, ConfigError, DeadlineExceeded, PeerLost

Role = Literal["initiator", "acceptor"]

MAGIC = b"RGAU"
VERSION = 1
MIN_KEY_BYTES = 16
NONCE_BYTES = 32
HELLO_BYTES = len(MAGIC) + 4 + NONCE_BYTES
PROOF_BYTES = 1 + hashlib.sha256().digest_size

_OK, _WRONG_TAG = 0, 1
_CODES: dict[Role, int] = {"initiator": 1, "acceptor": 2}


def load_key(path: Path) -> bytes:
    """Read a key of at least 16 bytes, written as hexadecimal text, from a file that only its owner can read.

    Raises ConfigError that names the file.
    """
    remedy = "make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
    try:
        text = keys.read_private(path).decode("ascii")
    except ConfigError as error:
        raise ConfigError(f"{error}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the key is not hexadecimal text; {remedy}") from error
    try:
        key = bytes.fromhex(text)
    except ValueError as error:
        raise ConfigError(f"{path}: the key is not hexadecimal text; {remedy}") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{path}: the key has {len(key)} bytes; at least {MIN_KEY_BYTES} are needed; {remedy}")
    return key


class Handshake:
    """One side of one authentication; no I/O.

    Send `start()`, then feed `receive` exactly what arrives, at most `needs` bytes at a time, and send what it
    returns, until `done`. When `receive` raises AuthError, `farewell` holds what to send before closing, so that
    the other side learns why.
    """

    def __init__(self, key: bytes, role: Role, purpose: str, *, nonce: bytes | None = None) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(f"the key has {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
        if nonce is not None and len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce of {len(nonce)} bytes; {NONCE_BYTES} are needed")
        self._key = key
        self._role: Role = role
        self._other: Role = "acceptor" if role == "initiator" else "initiator"
        self._purpose = purpose.encode()
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self._peer_nonce = b""
        self._buffer = b""
        self._state: Literal["hello", "proof", "done", "failed"] = "hello"
        self.farewell = b""

    @property
    def needs(self) -> int:
        """How many bytes are missing before the next step; 0 when done or failed."""
        full = {"hello": HELLO_BYTES, "proof": PROOF_BYTES}.get(self._state, 0)
        return full - len(self._buffer) if full else 0

    @property
    def done(self) -> bool:
        """Whether both sides have proved that they hold the key."""
        return self._state == "done"

    def start(self) -> bytes:
        """Return the bytes to send first."""
        return MAGIC + bytes((VERSION, _CODES[self._role], 0, 0)) + self._nonce

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the peer; return the bytes to send, which may be none.

        Raises AuthError naming what is wrong: not a regauge peer, another version, the same role (a reflected
        hello), another key or purpose, or bytes beyond `needs`. After that the handshake stays failed.
        """
        if len(data) > self.needs:
            raise self._fail("the peer sent more than the handshake has", b"")
        self._buffer += data
        if self._state == "hello":
            self._check_magic()
        if self.needs or not self._buffer:
            return b""
        message, self._buffer = self._buffer, b""
        return self._on_hello(message) if self._state == "hello" else self._on_proof(message)

    def _check_magic(self) -> None:
        """Judge the first bytes at once: a stranger that sends too few would otherwise be waited for."""
        if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
            raise self._fail("the peer does not speak regauge's protocol (wrong magic); check address and port", b"")

    def _on_hello(self, message: bytes) -> bytes:
        version, role = message[4], message[5]
        if version != VERSION:
            raise self._fail(f"the peer speaks version {version}, this side {VERSION}; run one release on both", b"")
        self._peer_nonce = message[8:]
        if role != _CODES[self._other] or self._peer_nonce == self._nonce or message[6:8] != b"\0\0":
            raise self._fail(f"the peer does not act as {self._other} (reflected or malformed hello)", b"")
        self._state = "proof"
        return self._proof() if self._role == "initiator" else b""

    def _on_proof(self, message: bytes) -> bytes:
        key_differs = "the keys (or the channel's purpose) differ; give both sides the same key file"
        if message[0] == _WRONG_TAG:
            raise self._fail(f"the peer refused this side's proof: {key_differs}", b"")
        if message[0] != _OK or not hmac.compare_digest(message[1:], self._tag(self._other)):
            refusal = bytes((_WRONG_TAG,)) + bytes(PROOF_BYTES - 1)
            raise self._fail(f"the peer's proof is wrong: {key_differs}", refusal)
        self._state = "done"
        return self._proof() if self._role == "acceptor" else b""

    def _proof(self) -> bytes:
        return bytes((_OK,)) + self._tag(self._role)

    def _tag(self, role: Role) -> bytes:
        first, second = self._nonce, self._peer_nonce
        if self._role == "acceptor":
            first, second = second, first
        text = b"regauge-auth-1\0" + bytes((_CODES[role],)) + first + second + self._purpose
        return hmac.digest(self._key, text, "sha256")

    def _fail(self, reason: str, farewell: bytes) -> AuthError:
        self._state, self._buffer, self.farewell = "failed", b"", farewell
        return AuthError(reason)


class Wire(Protocol):
    """What authentication needs of a socket, or of a stream over one."""

    def settimeout(self, value: float | None, /) -> None:
        """As `socket.settimeout`."""

    def send(self, data: memoryview, flags: int = 0, /) -> int:
        """As `socket.send`."""

    def recv(self, count: int, /) -> bytes:
        """As `socket.recv`."""


def authenticate_socket(sock: Wire, key: bytes, role: Role, purpose: str, deadline: float) -> None:
    """Authenticate over a connected blocking socket. `deadline` is a `time.monotonic()` instant.

    Raises AuthError, PeerLost or DeadlineExceeded; the caller closes the socket. On return the socket is blocking.
    """
    hand = Handshake(key, role, purpose)
    send_all(sock, hand.start(), deadline)
    while not hand.done:
        data = recv_exactly(sock, min(hand.needs, len(MAGIC)) if hand.needs == HELLO_BYTES else hand.needs, deadline)
        try:
            reply = hand.receive(data)
        except AuthError:
            with contextlib.suppress(PeerLost, DeadlineExceeded):  # the reason matters, not whether it arrives
                send_all(sock, hand.farewell, deadline)
            raise
        send_all(sock, reply, deadline)


async def authenticate(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    key: bytes,
    role: Role,
    purpose: str,
    deadline_s: float,
) -> None:
    """Authenticate over asyncio streams, within `deadline_s` seconds.

    Raises AuthError, PeerLost or DeadlineExceeded; the caller closes the writer.
    """
    hand = Handshake(key, role, purpose)
    try:
        async with asyncio.timeout(deadline_s):
            writer.write(hand.start())
            await writer.drain()
            while not hand.done:
                data = await reader.read(hand.needs)
                if not data:
                    raise PeerLost(_CLOSED)
                writer.write(hand.receive(data))
                await writer.drain()
    except AuthError:
        with contextlib.suppress(OSError):
            writer.write(hand.farewell)
        raise
    except TimeoutError as error:
        raise DeadlineExceeded(f"the peer did not finish authentication within {deadline_s} s") from error
    except OSError as error:
        raise PeerLost(f"the connection broke during authentication: {error}") from error


_CLOSED = "the peer closed the connection; see its log for the reason"


def send_all(sock: Wire, data: bytes, deadline: float) -> None:
    """Send all of `data` before `deadline` (a `time.monotonic()` instant). Raises PeerLost or DeadlineExceeded."""
    rest = memoryview(data)
    while rest:
        with _limited(sock, deadline):
            rest = rest[sock.send(rest, socket.MSG_NOSIGNAL) :]


def recv_some(sock: Wire, limit: int, deadline: float) -> bytes:
    """Receive 1 to `limit` bytes before `deadline` (a `time.monotonic()` instant). Raises PeerLost or DeadlineExceeded."""
    with _limited(sock, deadline):
        data = sock.recv(limit)
    if not data:
        raise PeerLost(_CLOSED)
    return data


def recv_exactly(sock: Wire, count: int, deadline: float) -> bytes:
    """Receive `count` bytes before `deadline` (a `time.monotonic()` instant). Raises PeerLost or DeadlineExceeded."""
    got = b""
    while len(got) < count:
        got += recv_some(sock, count - len(got), deadline)
    return got


@contextlib.contextmanager
def _limited(sock: Wire, deadline: float) -> Iterator[None]:
    """Bound the one blocking call inside by `deadline`; leave the socket blocking."""
    left = deadline - time.monotonic()
    try:
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        yield
        sock.settimeout(None)
    except TimeoutError as error:
        raise DeadlineExceeded("the peer did not answer in time") from error
    except ssl.SSLError as error:  # with TLS 1.3 a side learns only now that its certificate was refused
        raise AuthError(f"the peer ended TLS: {error}; give both sides certificates of one authority") from error
    except OSError as error:
        raise PeerLost(f"the connection broke: {error}") from error

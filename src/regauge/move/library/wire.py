"""What a worker asks of its carrier, and what that answers: one msgpack message each, in turn, over a socket pair."""

from __future__ import annotations

import msgspec

MAX_MESSAGE = 128 << 10
"""Bytes of one message: a socket pair takes them whole. A write of 1,000 pieces has 24 kB."""
MAX_PIECES = 1000
"""Mooncake queues 1,024 pieces to a peer and as many more, and fails a longer batch at once."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """Start the library."""

    library: str
    """Module that has an `Engine` (regauge.move.library.engine.Library)."""
    host: str
    protocol: str
    devices: tuple[str, ...]


class Register(msgspec.Struct, frozen=True, tag=True):
    """Map the descriptor that comes with this, and register it. The answer's `value` is its address there."""

    nbytes: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Withdraw and unmap what lies at this address."""

    base: int
    nbytes: int


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Say where peers reach this engine: the answer's `data`; `value` is the address of its scratch memory."""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Open the way to a peer's engine, and write to its scratch memory to prove it."""

    address: bytes
    scratch: int


class Write(msgspec.Struct, frozen=True, tag=True):
    """Write pieces, int64[N, 3] (address in the carrier, address in the peer's carrier, length), N <= MAX_PIECES."""

    pieces: bytes


Request = Open | Register | Forget | Describe | Connect | Write


class Answer(msgspec.Struct, frozen=True):
    """How it went. After a failed write nobody knows what has landed, or will."""

    ok: bool = True
    reason: str = ""
    lost: bool = False
    """The library says that the peer is gone."""
    value: int = 0
    data: bytes = b""

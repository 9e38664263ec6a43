"""The control messages between a prefill and a decode worker: msgpack, one bounded frame each.

A frame is a little-endian uint32 length and that many bytes. Both directions run over one authenticated connection.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from regauge.errors import ProtocolError
from regauge.plan.cost import Mode

VERSION = 1
MAX_FRAME = 4 << 20
"""Bytes: a page table of 256 Ki pages, or a layout, fits."""

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=4_000)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Address = Annotated[int, Meta(ge=0, lt=2**62)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all control messages."""


class Staging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver's staging slots for one link: `slots` runs of `slot_bytes`, back to back from `address`."""

    address: Address
    slot_bytes: Count
    slots: Annotated[int, Meta(ge=1, le=4096)]


class Hello(Message, frozen=True, tag="hello"):
    """First message of either side: who speaks, how its KV lies (layout as JSON), and where its memory is reached."""

    version: int
    worker: Name
    role: Literal["prefill", "decode"]
    layout: bytes
    export: bytes
    staging: Staging | None = None


class Ready(Message, frozen=True, tag="ready"):
    """Prefill's second message: the pair's digest as it sees it, how it will write, and its data connection."""

    pair: Name
    mode: Mode
    session: Name


class Refuse(Message, frozen=True, tag="refuse"):
    """The pair cannot work; the connection ends after it."""

    reasons: list[Text]


class Offer(Message, frozen=True, tag="offer"):
    """Prefill will send the KV of a prompt of that many tokens."""

    transfer: Name
    tokens: Count


class Grant(Message, frozen=True, tag="grant"):
    """Decode lends pages: the page table for tokens `origin`, `origin` + 1, ..., until the lease ends."""

    transfer: Name
    epoch: Count
    pages: list[Count]
    origin: Count
    lease_s: float


class Written(Message, frozen=True, tag="written"):
    """A chunk has landed: layers and tokens [first, end), in its pages or in a staging slot."""

    transfer: Name
    epoch: Count
    seq: Count
    layers: tuple[Count, Count]
    """Positions in the shared layers, [first, end)."""
    tokens: tuple[Count, Count]
    slot: Count | None
    nbytes: Count


class Freed(Message, frozen=True, tag="freed"):
    """Decode has emptied a staging slot."""

    slot: Count


class Finish(Message, frozen=True, tag="finish"):
    """Every chunk is written; what decode needs beside the KV (the first token) comes along."""

    transfer: Name
    epoch: Count
    chunks: Count
    handover: bytes


class Commit(Message, frozen=True, tag="commit"):
    """Decode has everything; prefill may reuse the source pages."""

    transfer: Name


class Renew(Message, frozen=True, tag="renew"):
    """Prefill is still at work: the lease starts anew."""

    transfer: Name


class Abort(Message, frozen=True, tag="abort"):
    """The side that speaks gives the transfer up. From prefill it also says that no write is in flight any more."""

    transfer: Name
    reason: Text


class Fence(Message, frozen=True, tag="fence"):
    """Decode asks that nothing of the transfer be written any more."""

    transfer: Name


class Fenced(Message, frozen=True, tag="fenced"):
    """Prefill's answer: nothing is in flight, and nothing will be."""

    transfer: Name


AnyMessage = (
    Hello | Ready | Refuse | Offer | Grant | Written | Freed | Finish | Commit | Renew | Abort | Fence | Fenced
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Return a frame. Raises ProtocolError for a message above MAX_FRAME."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a {type(message).__name__} message of {len(body)} bytes exceeds {MAX_FRAME}")
    return len(body).to_bytes(4, "little") + body


def decode(body: bytes) -> AnyMessage:
    """Read a frame's body. Raises ProtocolError that says which field is wrong."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"control message: {error}") from error


def frame_length(head: bytes) -> int:
    """Read a frame's length. Raises ProtocolError when it exceeds MAX_FRAME."""
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME:
        raise ProtocolError(f"a control frame of {length} bytes exceeds {MAX_FRAME}: not a regauge peer?")
    return length

"""The control messages between a prefill and a decode worker: msgpack, one bounded frame each.

A frame is a little-endian uint32 length and that many bytes. Both directions run over one authenticated connection.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from regauge.errors import ProtocolError
from regauge.plan.cost import Mode

VERSION = 2
MAX_FRAME = 4 << 20
"""Bytes: a page table of 256 Ki pages, or a layout, fits."""

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=4_000)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Address = Annotated[int, Meta(ge=0, lt=2**62)]
Digest = Annotated[bytes, Meta(min_length=8, max_length=8)]
"""A sum of `regauge.plan.digest`, little-endian."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all control messages."""


class Staging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver's staging slots for one link: `slots` runs of `slot_bytes`, back to back from `address`."""

    address: Address
    slot_bytes: Count
    slots: Annotated[int, Meta(ge=1, le=4096)]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pages of one state group of decode that hold tokens `origin`, `origin` + 1, ... of a transfer."""

    pages: list[Count]
    origin: Count = 0


class Hello(Message, frozen=True, tag="hello"):
    """First message of either side: who speaks, how its KV lies (layout as JSON), and where its memory is reached."""

    version: int
    worker: Name
    instance: Name
    """Of this process: a restarted worker is another one, and knows of no transfer."""
    role: Literal["prefill", "decode"]
    layout: bytes
    exports: Annotated[list[bytes], Meta(min_length=1, max_length=16)]
    """Of the data plane: one for each of its NICs."""
    staging: Staging | None = None
    epoch: Count = 0
    """Decode's: of its last grant. A grant on this link that is not newer was meant for an earlier one."""


class Ready(Message, frozen=True, tag="ready"):
    """Prefill's second message: the pair's digest as it sees it, how it writes each pair of groups, and its data connections."""

    pair: Name
    modes: Annotated[list[Mode], Meta(max_length=64)]
    sessions: Annotated[list[Name], Meta(min_length=1, max_length=16)]
    """One for each of decode's NICs."""


class Refuse(Message, frozen=True, tag="refuse"):
    """The pair cannot work; the connection ends after it."""

    reasons: list[Text]


class Offer(Message, frozen=True, tag="offer"):
    """Prefill will send the KV of a prompt of that many tokens. On a new link: it goes on with a transfer of the last one."""

    transfer: Name
    tokens: Count


class Grant(Message, frozen=True, tag="grant"):
    """Decode lends pages for tokens [first, tokens of the offer), until the lease ends: a table for each of its groups."""

    transfer: Name
    epoch: Count
    tables: Annotated[list[Table], Meta(max_length=64)]
    first: Count
    lease_s: float
    credit: Count | None = None
    """Bytes that may be written from the start of this epoch; None: all."""
    done: list[list[Count]] = []
    """On a new link: for each pair of groups and shared layer the token before which everything has arrived. Empty: nothing has."""


class Want(Message, frozen=True, tag="want"):
    """Prefill has so many bytes of this epoch computed, written ones included: they can be given credit."""

    transfer: Name
    epoch: Count
    nbytes: Count


class Credit(Message, frozen=True, tag="credit"):
    """Bytes that may be written from the start of the epoch; a smaller number than before changes nothing."""

    transfer: Name
    epoch: Count
    upto: Count
    rank: Annotated[int, Meta(ge=0, le=9)] = 0
    """Class of the transfer among those that this worker sends; the lowest goes first, in it what has least left."""
    nic: Annotated[int, Meta(ge=0, lt=16)] = 0
    """Position of decode's NIC that they come over."""


class Written(Message, frozen=True, tag="written"):
    """A chunk has landed: layers and tokens [first, end) of a pair of groups, in its pages or in a staging slot."""

    transfer: Name
    epoch: Count
    seq: Count
    pair: Count
    """Position among the pairs of groups of the link."""
    layers: tuple[Count, Count]
    """Positions in the shared layers, [first, end)."""
    tokens: tuple[Count, Count]
    slot: Count | None
    nbytes: Count
    digest: Digest
    """Of what was written: of the wire's elements with a slot, else of the target's."""


class Again(Message, frozen=True, tag="again"):
    """What decode finds is not what the digest says: the chunk is to be written once more."""

    transfer: Name
    epoch: Count
    seq: Count


class Freed(Message, frozen=True, tag="freed"):
    """Decode has emptied a staging slot."""

    slot: Count


class Finish(Message, frozen=True, tag="finish"):
    """Every chunk of the epoch is written; what decode needs beside the KV (the first token) comes along."""

    transfer: Name
    epoch: Count
    chunks: Count
    handover: bytes


class Commit(Message, frozen=True, tag="commit"):
    """Decode has everything, and every digest agrees; prefill may reuse the source pages."""

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
    Hello | Ready | Refuse | Offer | Grant | Want | Credit | Written | Again | Freed | Finish | Commit | Renew | Abort
    | Fence | Fenced
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"control message: {error}") from error


def frame_length(head: bytes) -> int:
    """Read a frame's length. Raises ProtocolError when it exceeds MAX_FRAME."""
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME:
        raise ProtocolError(f"a control frame of {length} bytes exceeds {MAX_FRAME}: not a regauge peer?")
    return length

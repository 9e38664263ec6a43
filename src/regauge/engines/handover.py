"""What decode needs beside the KV cache, whichever engines the two sides are."""

from __future__ import annotations

import msgspec

from regauge.errors import ProtocolError


class Handover(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first token, and the random stream to go on with."""

    token: int
    seed: int | None = None
    """None: an engine whose random stream cannot be gone on with; decode begins one of its own."""
    finish_reason: str | None = None
    """Why the answer ends with this token, where prefill knows that it does."""
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    cached: tuple[int, int, int] | None = None
    """Prompt tokens that prefill had in its cache: on the device, in host memory, in storage."""


def encode(handover: Handover) -> bytes:
    """Return a hand-over as `messages.Finish` carries it."""
    return msgspec.msgpack.encode(handover)


def decode(data: bytes, peer: str) -> Handover:
    """Read a peer's hand-over. Raises ProtocolError that names the peer and the field."""
    try:
        return msgspec.msgpack.decode(data, type=Handover)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"hand-over from {peer}: {error}") from error

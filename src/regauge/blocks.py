"""The one name of a prompt's prefix: a hash of each whole block of tokens, chained, so that it stands for all tokens up to its end.

A worker's cache, its events and the router use the same hashes; equal hashes of equal salt mean equal prefixes, unlike salts have nothing in common.
64 bits are enough to find by, and too few to trust: whoever serves KV by a hash compares the tokens, too.

Block i's hash is BLAKE2b (RFC 7693) with a digest of 8 bytes, keyed with the salt, over block i-1's digest (8 zero bytes for the first) and the
block's token ids, each as 4 bytes, little-endian; read as a little-endian number.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

BLOCK_TOKENS: Final = 64
"""Tokens of a block, unless the configuration says otherwise."""
_DIGEST: Final = 8
_TOKEN: Final = 4


class Stored(msgspec.Struct, frozen=True, tag_field="type", tag="stored"):
    """A worker's cache has gained these blocks."""

    seq: int
    """Counts the events of one worker's process, from 1, without a gap."""
    hashes: tuple[int, ...]


class Removed(msgspec.Struct, frozen=True, tag_field="type", tag="removed"):
    """A worker's cache has lost these blocks."""

    seq: int
    hashes: tuple[int, ...]


class Cleared(msgspec.Struct, frozen=True, tag_field="type", tag="cleared"):
    """A worker's cache has lost all of its blocks."""

    seq: int


CacheEvent = Stored | Removed | Cleared


class CacheNews(msgspec.Struct, frozen=True):
    """What has become of a worker's cache since some event."""

    instance: str
    """Of the worker's process: another one has begun anew, with another count of events."""
    block: int
    """Tokens of a block."""
    seq: int
    """The last event so far; 0: there was none."""
    anew: bool
    """The events since then are not all kept, or are of another process: forget what was known. The cache holds `held`, and nothing else."""
    held: tuple[int, ...] = ()
    """With `anew`: the blocks held after event `seq`."""
    events: tuple[CacheEvent, ...] = ()
    """Otherwise: the events after the one that was asked for, up to `seq`."""


def hash_blocks(token_ids: Sequence[int], block: int = BLOCK_TOKENS, salt: bytes = b"") -> tuple[int, ...]:
    """Return the hash of each whole block of `block` tokens, in order, each from 0 to 2**64 - 1; the rest of the tokens has none.

    `salt` keeps apart what must not be shared, such as tenants. Raises ValueError for a block below 1, and for token ids that do not fit in 32 bits.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1 token, not {block}")
    count = len(token_ids) // block
    if count == 0:
        return ()
    return _chained(_packed(token_ids[: count * block]), block * _TOKEN, salt)


def hash_bytes(data: bytes, step: int, salt: bytes = b"") -> tuple[int, ...]:
    """As `hash_blocks`, of text that is not tokenised: each whole block of `step` bytes. They have nothing in common with hashes of tokens.

    Raises ValueError for a step below 1.
    """
    if step < 1:
        raise ValueError(f"a block must be at least 1 byte, not {step}")
    return _chained(data[: len(data) // step * step], step, salt)


def _chained(data: bytes, step: int, salt: bytes) -> tuple[int, ...]:
    key = salt if len(salt) <= hashlib.blake2b.MAX_KEY_SIZE else hashlib.blake2b(salt).digest()
    parent, hashes = bytes(_DIGEST), []
    fresh = hashlib.blake2b(digest_size=_DIGEST, key=key)
    for start in range(0, len(data), step):
        one = fresh.copy()  # half the time of making one
        one.update(parent + data[start : start + step])
        parent = one.digest()
        hashes.append(int.from_bytes(parent, "little"))
    return tuple(hashes)


def _packed(token_ids: Sequence[int]) -> bytes:
    try:
        packed = array.array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError("token ids must be whole numbers from 0 to 2**32 - 1") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()

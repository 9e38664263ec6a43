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

BLOCK_TOKENS: Final = 64
"""Tokens of a block, unless the configuration says otherwise."""
_DIGEST: Final = 8
_TOKEN: Final = 4


def hash_blocks(token_ids: Sequence[int], block: int = BLOCK_TOKENS, salt: bytes = b"") -> tuple[int, ...]:
    """Return the hash of each whole block of `block` tokens, in order, each from 0 to 2**64 - 1; the rest of the tokens has none.

    `salt` keeps apart what must not be shared, such as tenants. Raises ValueError for a block below 1, and for token ids that do not fit in 32 bits.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1 token, not {block}")
    count = len(token_ids) // block
    if count == 0:
        return ()
    data = _packed(token_ids[: count * block])
    key = salt if len(salt) <= hashlib.blake2b.MAX_KEY_SIZE else hashlib.blake2b(salt).digest()
    parent, step, hashes = bytes(_DIGEST), block * _TOKEN, []
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

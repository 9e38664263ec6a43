"""The digest that proves delivery: what it is, and its keys. The argument is in docs/digest.md.

Elements are hashed where they mean something, not where they lie: an element is (array, layer, token, head, dim), so that layout, page
size, page table and the split over ranks do not matter, and sums over chunks and ranks are sums of digests.

A *row* is the elements of one (array, layer, token, head), or one of several equal segments of at most SEGMENT elements of it, in
order of dim, as little-endian 32-bit words w[0..n), zero-padded to n = a multiple of 8. With secret words k:

    x0 = sum_i ((w[2i] + k[2i])   mod 2^32) * ((w[2i+1] + k[2i+1]) mod 2^32)   mod 2^64       (NH of Black et al., UMAC, 1999)
    x1 = sum_i ((w[2i] + k[2i+2]) mod 2^32) * ((w[2i+1] + k[2i+3]) mod 2^32)   mod 2^64       (the same, keys shifted by a pair)

and, with secret numbers a0, a1, a2 for (array, layer, head, segment) and b for the token,

    digest = sum over rows of b * (a0 * x0 + a1 * x1 + a2)   mod PRIME

Two different sets of rows have the same digest with a probability of at most 13 / 2^64, whatever their difference.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

PRIME = 2**64 - 59
"""The largest prime below 2^64."""
SEGMENT = 1024
"""Most elements of one row: longer ones (recurrent state) are cut into equal segments."""
ROW_BYTES = 4 * SEGMENT
"""Most bytes of one row."""
WORDS = SEGMENT + 2
"""Words of the row key: one for each word of the longest row, and one pair for the shift."""
SECRET_BYTES = 32
ROW_KEY = 4
"""64-bit numbers of one row key in memory: a0, a1, a2 and one unused, so that a key is 32 bytes."""

_PAD_BYTES = 32
_BLOCK = 4096
_BLOCKS_KEPT = 256


def array_name(kind: str, component: str, dtype: str) -> str:
    """Name an array of elements in key derivation; `component` of stored scales is as in `"k scale"`.

    The dtype is that of the bytes that are hashed: codes on the wire and converted results have keys of their own.
    """
    return f"{kind}/{component}/{dtype}"


def segment_of(dim: int) -> int:
    """Return the elements of one row of an array with `dim` elements per head: the largest divisor up to SEGMENT."""
    count = -(-dim // SEGMENT)
    while dim % count:
        count += 1
    return dim // count


class Keys:
    """The keys of one transfer, all derived from a secret of 32 bytes, at any coordinate, by SHAKE256.

    Not thread-safe. Raises ValueError for a secret of another length.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the digest's secret has {len(secret)} bytes; it must have {SECRET_BYTES}")
        self._secret = secret
        self._tokens: dict[int, UInt64] = {}
        self._rows: dict[tuple[str, int, int], UInt64] = {}
        self.words: UInt32 = np.frombuffer(self._stream(b"w", 0, "", 4 * WORDS), "<u4")
        """Key k of the rows, uint32[WORDS]."""

    def __repr__(self) -> str:
        return "Keys(...)"

    def rows(self, array: str, layer: int, heads: Sequence[int], segments: int) -> UInt64:
        """Return a0, a1, a2, 0 for global heads of a layer of an array, uint64[len(heads), segments, ROW_KEY]."""
        most = max(heads, default=-1) + 1
        known = self._rows.get((array, layer, segments))
        if known is None or len(known) < most:
            drawn = np.frombuffer(self._stream(b"r", layer, array, 8 * ROW_KEY * segments * most), "<u8")
            known = _reduced(drawn).reshape(most, segments, ROW_KEY)
            known[..., 3] = 0
            self._rows[array, layer, segments] = known
        return known[list(heads)]

    def tokens(self, first: int, end: int) -> UInt64:
        """Return b for the tokens at positions [first, end), uint64[end - first]. Recurrent state is token 0."""
        if first >= end:
            return np.empty(0, np.uint64)
        blocks = [self._token_block(i) for i in range(first // _BLOCK, -(-end // _BLOCK))]
        start = first % _BLOCK
        return np.ascontiguousarray(np.concatenate(blocks)[start : start + end - first])

    def _token_block(self, index: int) -> UInt64:
        if index not in self._tokens:
            if len(self._tokens) >= _BLOCKS_KEPT:
                del self._tokens[next(iter(self._tokens))]
            self._tokens[index] = _reduced(np.frombuffer(self._stream(b"t", index, "", 8 * _BLOCK), "<u8"))
        return self._tokens[index]

    def _stream(self, purpose: bytes, index: int, name: str, nbytes: int) -> bytes:
        # A secret of fixed length in front of a sponge makes a keyed function; purpose and index have fixed lengths too,
        # so that no two coordinates share an input.
        coordinate = b"regauge digest 1" + purpose + struct.pack("<Q", index) + name.encode()
        return hashlib.shake_256(self._secret + coordinate).digest(nbytes)


def add(digests: Iterable[int]) -> int:
    """Return the digest of everything that the given digests cover together."""
    return sum(digests) % PRIME


def row_values(rows: Bytes, words: UInt32) -> UInt64:
    """Return x0 and x1 of every row, uint64[n, 2], of rows of bytes, uint8[n, bytes of a row]."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // _PAD_BYTES) * _PAD_BYTES), np.uint8)
    padded[:, : rows.shape[1]] = rows
    w = padded.view("<u4")
    n = w.shape[1]
    out = np.empty((len(rows), 2), np.uint64)
    for shift in (0, 1):
        sums = w + words[2 * shift : n + 2 * shift]
        products = sums[:, 0::2].astype(np.uint64) * sums[:, 1::2].astype(np.uint64)
        out[:, shift] = products.sum(axis=1, dtype=np.uint64)
    return out


def rows_digest(rows: Bytes, words: UInt32, row_keys: UInt64, token_keys: UInt64) -> int:
    """Return the digest of rows, uint8[n, bytes], with one row key, uint64[n, ROW_KEY], and token key, uint64[n], each."""
    total = 0
    for (x0, x1), (a0, a1, a2, _), b in zip(
        row_values(rows, words).tolist(), row_keys.tolist(), token_keys.tolist(), strict=True
    ):
        total += b * (a0 * x0 + a1 * x1 + a2)
    return total % PRIME


def elements_digest(
    keys: Keys, array: str, elements: npt.NDArray[np.generic], layers: Sequence[int], first: int, heads: Sequence[int]
) -> int:
    """Return the digest of elements [layers, tokens, heads, dim] of an array: the definition, in plain numpy.

    `layers` and `heads` are global numbers, `first` is the position of the first token.
    """
    n_layers, n_tokens, n_heads, dim = elements.shape
    segments = dim // segment_of(dim)
    raw = np.ascontiguousarray(elements).view(np.uint8).reshape(n_layers, n_tokens * n_heads * segments, -1)
    token_keys = np.repeat(keys.tokens(first, first + n_tokens), n_heads * segments)
    total = 0
    for rows, layer in zip(raw, layers, strict=True):
        row_keys = keys.rows(array, layer, heads, segments).reshape(-1, ROW_KEY)
        total += rows_digest(rows, keys.words, np.tile(row_keys, (n_tokens, 1)), token_keys)
    return total % PRIME


def _reduced(drawn: UInt64) -> UInt64:
    """Reduce uniform 64-bit numbers modulo PRIME; the smallest 59 become twice as likely, which the proof counts."""
    return np.where(drawn >= PRIME, drawn - np.uint64(PRIME), drawn)

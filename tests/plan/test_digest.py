"""The definition of the digest: worked by hand, additive, and as sensitive as the proof says."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.plan.digest import PRIME, ROW_KEY, SEGMENT, WORDS, Keys, add, elements_digest, row_values, segment_of

KEYS = Keys(bytes(range(32)))
M32, M64 = 2**32 - 1, 2**64 - 1


def by_hand(array: str, layer: int, head: int, token: int, row: bytes, segment: int = 0, segments: int = 1) -> int:
    """The formula of docs/digest.md in whole numbers, without numpy."""
    k = KEYS.words.tolist()
    padded = row + bytes(-len(row) % 32)
    w = [int.from_bytes(padded[i : i + 4], "little") for i in range(0, len(padded), 4)]
    x = [
        sum(((w[i] + k[i + s]) & M32) * ((w[i + 1] + k[i + 1 + s]) & M32) for i in range(0, len(w), 2)) & M64
        for s in (0, 2)
    ]
    a = KEYS.rows(array, layer, [head], segments)[0, segment].tolist()
    b = int(KEYS.tokens(token, token + 1)[0])
    return b * (a[0] * x[0] + a[1] * x[1] + a[2]) % PRIME


@given(st.binary(min_size=1, max_size=200), st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**6))
def test_a_row_by_hand(row: bytes, layer: int, head: int, token: int) -> None:
    elements = np.frombuffer(row, np.uint8).reshape(1, 1, 1, -1)
    assert elements_digest(KEYS, "k", elements, [layer], token, [head]) == by_hand("k", layer, head, token, row)


def test_rows_layers_tokens_and_heads_add_up() -> None:
    e = np.random.default_rng(1).integers(0, 2**16, (2, 3, 2, 5), np.uint16)
    whole = elements_digest(KEYS, "k", e, [4, 9], 7, [1, 5])
    parts = [
        by_hand("k", layer, head, 7 + t, e[i, t, h].tobytes())
        for i, layer in enumerate([4, 9])
        for t in range(3)
        for h, head in enumerate([1, 5])
    ]
    assert whole == add(parts)


def test_a_long_row_is_equal_segments() -> None:
    row = np.random.default_rng(2).integers(0, 256, 2560, np.uint8)
    assert segment_of(2560) == 640
    got = elements_digest(KEYS, "s", row.reshape(1, 1, 1, -1), [0], 0, [0])
    parts = [by_hand("s", 0, 0, 0, part.tobytes(), i, 4) for i, part in enumerate(row.reshape(4, 640))]
    assert got == add(parts)


@given(st.integers(1, 20_000))
def test_segments_divide_a_row_and_are_as_long_as_they_may(dim: int) -> None:
    segment = segment_of(dim)
    assert dim % segment == 0
    assert segment <= SEGMENT
    assert not any(dim % n == 0 for n in range(segment + 1, min(dim, SEGMENT) + 1))


def test_keys_are_the_same_from_wherever_they_are_asked_for() -> None:
    assert np.array_equal(KEYS.tokens(0, 9000)[4090:4101], Keys(bytes(range(32))).tokens(4090, 4101))
    assert np.array_equal(KEYS.rows("k", 3, range(8), 2)[5], Keys(bytes(range(32))).rows("k", 3, [5], 2)[0])
    assert len(KEYS.tokens(5, 5)) == 0


def test_keys_of_different_coordinates_and_secrets_differ() -> None:
    seen = [
        *KEYS.tokens(0, 5000).tolist(),
        *(
            v
            for array in ("attention/k/bfloat16", "attention/v/bfloat16", "attention/k scale/float32")
            for layer in (0, 1, 4096)
            for v in KEYS.rows(array, layer, range(8), 1)[..., :3].ravel().tolist()
        ),
        *Keys(bytes(32)).tokens(0, 9).tolist(),
    ]
    assert len(set(seen)) == len(seen)
    assert max(seen) < PRIME
    assert len(KEYS.words) == WORDS
    assert KEYS.rows("k", 0, [0], 1).shape == (1, 1, ROW_KEY)


def test_keys_are_known_answers() -> None:
    """A change here changes the meaning of a digest between two versions: it needs a new name in the derivation."""
    text = bytes(range(32)) + b"regauge digest 1" + b"t" + bytes(8)
    assert int(KEYS.tokens(0, 1)[0]) == int.from_bytes(hashlib.shake_256(text).digest(8), "little")
    e = np.arange(48, dtype=np.uint16).reshape(1, 2, 3, 8)
    assert elements_digest(KEYS, "attention/k/bfloat16", e, [5], 11, [0, 1, 2]) == 14289248824823837421


def test_a_secret_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has 16 bytes; it must have 32"):
        Keys(bytes(16))
    assert repr(KEYS) == "Keys(...)"


def test_one_bit_changes_both_values_of_a_row() -> None:
    rows = np.zeros((257, 32), np.uint8)
    for bit in range(256):
        rows[bit + 1, bit // 8] = 1 << bit % 8
    values = row_values(rows, KEYS.words)
    for column in values.T:
        assert len(set(column.tolist())) == 257

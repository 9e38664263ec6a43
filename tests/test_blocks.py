"""The hash of a prefix, which workers and routers must agree on across versions and machines."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.blocks import BLOCK_TOKENS, hash_blocks, hash_bytes

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
salts = st.binary(max_size=100)


def test_hashes_stay_what_they_are() -> None:
    assert hash_blocks(range(8), 4) == (5919486166599431679, 3142802598544154706)
    assert hash_blocks(range(8), 4, b"tenant-a") == (13922837226858844072, 15458920772827848059)


@given(tokens, st.integers(1, 9), salts)
def test_the_hash_is_the_written_one(ids: list[int], block: int, salt: bytes) -> None:
    key = salt if len(salt) <= 64 else hashlib.blake2b(salt).digest()
    parent, expected = bytes(8), []
    for start in range(0, len(ids) - block + 1, block):
        words = b"".join(one.to_bytes(4, "little") for one in ids[start : start + block])
        parent = hashlib.blake2b(parent + words, digest_size=8, key=key).digest()
        expected.append(int.from_bytes(parent, "little"))
    assert hash_blocks(ids, block, salt) == tuple(expected)


@given(tokens, tokens, st.integers(1, 5), salts)
def test_equal_prefixes_and_no_others_have_equal_hashes(a: list[int], b: list[int], block: int, salt: bytes) -> None:
    first, second = hash_blocks(a + b, block, salt), hash_blocks(a, block, salt)
    assert first[: len(second)] == second
    for i, (one, other) in enumerate(zip(first, hash_blocks(b, block, salt), strict=False)):
        end = (i + 1) * block
        assert (one == other) == ((a + b)[:end] == b[:end])


@given(st.lists(st.integers(0, 99), min_size=4, max_size=12), salts, salts)
def test_unlike_salts_share_nothing(ids: list[int], one: bytes, other: bytes) -> None:
    shared = set(hash_blocks(ids, 2, one)) & set(hash_blocks(ids, 2, other))
    assert bool(shared) == (one == other)


def test_blocks_are_whole_and_every_kind_of_sequence_is_the_same() -> None:
    assert hash_blocks(range(BLOCK_TOKENS - 1)) == ()
    assert len(hash_blocks(range(2 * BLOCK_TOKENS + 1))) == 2
    assert hash_blocks([1, 2, 3], 1) == hash_blocks((1, 2, 3), 1) == hash_blocks(range(1, 4), 1)


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["a"], [None]])
def test_what_is_no_token_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be whole numbers"):
        hash_blocks(ids, 1)


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="block must be at least 1 token, not 0"):
        hash_blocks([1], 0)


@given(st.binary(max_size=60), st.binary(max_size=60), st.integers(1, 9), salts)
def test_bytes_are_hashed_likewise(a: bytes, b: bytes, step: int, salt: bytes) -> None:
    whole, begun = hash_bytes(a + b, step, salt), hash_bytes(a, step, salt)
    assert len(whole) == len(a + b) // step
    assert whole[: len(begun)] == begun
    assert hash_bytes(a[: len(a) // 4 * 4], 4, salt) == hash_blocks(memoryview(a[: len(a) // 4 * 4]).cast("I"), 1, salt)


def test_bytes_in_blocks_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        hash_bytes(b"a", 0)

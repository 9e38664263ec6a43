"""The Triton digest, in Triton's interpreter, is the definition's in plan/digest.py, in whatever order the elements lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_digest_kernels import Case, conversions, copies

from kernel_cases import address
from regauge.move.triton.digest import Rows, digest
from regauge.plan.digest import ROW_KEY, Keys, add, elements_digest
from regauge.plan.tiles import Int64, Keyed

FIRST, HEADS, ARRAY = 5000, (2, 3, 7), "attention/k/float16"


@dataclass
class Cache:
    """Elements [tokens, heads, dim] that lie in memory in the given order of these axes, after `shift` bytes."""

    elements: np.ndarray
    order: tuple[int, int, int]
    shift: int = 0

    def __post_init__(self) -> None:
        laid = np.ascontiguousarray(self.elements.transpose(self.order))
        self.memory = np.full(laid.nbytes + self.shift, 0xA5, np.uint8)
        self.memory[self.shift :] = laid.view(np.uint8).ravel()
        self.strides: tuple[int, ...] = tuple(laid.strides[self.order.index(i)] for i in range(3))

    @property
    def at(self) -> Int64:
        return address(self.memory, self.shift)

    @property
    def now(self) -> np.ndarray:
        raw = np.frombuffer(self.memory[self.shift :].tobytes(), self.elements.dtype)
        shape = tuple(self.elements.shape[i] for i in self.order)
        return raw.reshape(shape).transpose(np.argsort(self.order))


def keyed(keys: Keys, tokens: int) -> Keyed:
    rows, positions = keys.rows(ARRAY, 4, HEADS, 1), keys.tokens(FIRST, FIRST + tokens)
    return Keyed(
        keys.words, address(rows), (0, 8 * ROW_KEY, 0), address(positions), (8, 0, 0), 1, (rows, positions)
    )  # fmt: skip


@pytest.fixture
def keys() -> Keys:
    return Keys(bytes(range(32)))


def noise(tokens: int, dim: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(dim)
    return rng.integers(0, 256, (tokens, len(HEADS), dim * size), np.uint8).view(f"u{size}")


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 0, 1)], ids=["nhd", "hnd", "hdn", "dnh"])
@pytest.mark.parametrize(("dim", "size"), [(128, 2), (20, 1), (65, 4), (1024, 4), (1, 2), (3, 1)])
def test_the_digest_of_elements_in_any_order(keys: Keys, order: tuple[int, int, int], dim: int, size: int) -> None:
    cache = Cache(noise(37, dim, size), order)
    want = elements_digest(keys, ARRAY, cache.elements[np.newaxis], [4], FIRST, HEADS)
    got = digest(Rows(cache.at, cache.elements.shape, cache.strides, size, keyed(keys, 37)))
    assert got == want


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("order", [(1, 0, 2), (1, 2, 0)], ids=["hnd", "hdn"])
def test_rows_are_copied_as_they_are_digested(keys: Keys, order: tuple[int, int, int], shift: int) -> None:
    source = Cache(noise(37, 24, 2), (0, 1, 2))
    target = Cache(np.zeros_like(source.elements), order, shift)
    got = digest(Rows(source.at, source.elements.shape, source.strides, 2, keyed(keys, 37), target.at, target.strides))
    assert got == elements_digest(keys, ARRAY, source.elements[np.newaxis], [4], FIRST, HEADS)
    assert np.array_equal(target.now, source.elements)
    assert (target.memory[:shift] == 0xA5).all()


def test_chunks_add_up_over_programs_and_calls(keys: Keys) -> None:
    cache, all_keys = Cache(noise(96, 64, 2), (0, 1, 2)), keyed(keys, 96)
    whole = elements_digest(keys, ARRAY, cache.elements[np.newaxis], [4], FIRST, HEADS)
    parts = []
    for first, end in ((0, 40), (40, 96)):
        part = Keyed(all_keys.words, all_keys.row, (0, 32, 0), all_keys.token + 8 * first, (8, 0, 0), 1, all_keys.keep)
        at, shape = cache.at + first * cache.strides[0], (end - first, len(HEADS), 64)
        parts.append(digest(Rows(at, shape, cache.strides, 2, part), elements=1 << 9))
    assert add(parts) == whole


def test_one_flipped_bit_is_another_digest(keys: Keys) -> None:
    cache = Cache(noise(37, 128, 2), (0, 1, 2))
    rows = Rows(cache.at, cache.elements.shape, cache.strides, 2, keyed(keys, 37))
    before = digest(rows)
    cache.memory[12345] ^= 0x10
    assert digest(rows) != before


def test_the_largest_numbers_are_reduced(keys: Keys) -> None:
    most = 2**64 - 60
    elements = np.full((3, len(HEADS), 8), 0xFFFFFFFF, np.uint32)
    rows, positions = np.full((len(HEADS), ROW_KEY), most, np.uint64), np.full(3, most, np.uint64)
    words = np.zeros_like(keys.words)
    table = Keyed(words, address(rows), (0, 32, 0), address(positions), (8, 0, 0), 1, (rows, positions))
    cache = Cache(elements, (0, 1, 2))
    x = 4 * (2**32 - 1) ** 2 % 2**64
    want = 9 * most * (most * x + most * x + most) % (2**64 - 59)
    assert digest(Rows(cache.at, elements.shape, cache.strides, 4, table)) == want


def test_nothing_has_the_digest_zero(keys: Keys) -> None:
    cache = Cache(noise(0, 8, 2), (0, 1, 2))
    assert digest(Rows(cache.at, (0, 3, 8), cache.strides, 2, keyed(keys, 0))) == 0


@settings(max_examples=15, deadline=None)
@given(st.one_of(copies(), conversions()))
def test_the_backend_of_digests(case: Case) -> None:
    sums, expected = case.run(backend="numpy")
    found, outputs = case.run(backend="triton")
    assert found == sums
    assert all(np.array_equal(got, want) for got, want in zip(outputs, expected, strict=True))

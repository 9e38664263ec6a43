import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import BoundsError
from regauge.move.pieces import AddressTable, Region, check_pieces, cut
from regauge.plan.axes import coalesce

BASES = ((1000, 100), (1100, 50), (5000, 1000))  # two regions that touch, and one apart
REGIONS = [Region(f"r{at}", at, size, i) for i, (at, size) in enumerate(BASES)]


@given(st.lists(st.tuples(st.integers(0, 6200), st.integers(0, 6200), st.integers(0, 1200)), min_size=1, max_size=20))
def test_check_agrees_with_plain_arithmetic(rows: list[tuple[int, int, int]]) -> None:
    table = AddressTable(REGIONS, "exported")

    def inside(at: int, length: int) -> bool:
        return length == 0 or any(base <= at and at + length <= base + size for base, size in BASES)

    pieces = np.array(rows, dtype=np.int64)
    if all(inside(a, n) and inside(b, n) for a, b, n in rows):
        near, far = check_pieces(pieces, table, table)
        for (a, b, n), i, j in zip(rows, near, far, strict=True):
            assert n == 0 or REGIONS[i].address <= a < REGIONS[i].address + REGIONS[i].nbytes
            assert n == 0 or REGIONS[j].address <= b < REGIONS[j].address + REGIONS[j].nbytes
    else:
        with pytest.raises(BoundsError):
            check_pieces(pieces, table, table)


@given(
    lengths=st.lists(st.integers(0, 60), max_size=30),
    gaps=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=30, max_size=30),
    max_pieces=st.integers(1, 5),
    max_bytes=st.integers(1, 50),
)
def test_coalesce_and_cut_move_the_same_bytes_in_order(
    lengths: list[int], gaps: list[tuple[bool, bool, bool]], max_pieces: int, max_bytes: int
) -> None:
    rows, labels, near, far, label = [], [], 0, 10_000, 0
    for length, (gap_near, gap_far, relabel) in zip(lengths, gaps, strict=False):
        near, far, label = near + gap_near, far + gap_far, label + relabel
        rows.append((near, far, length))
        labels.append(label)
        near, far = near + length, far + length
    pieces = np.array(rows, dtype=np.int64).reshape(-1, 3)
    merged = coalesce(pieces, np.array(labels, dtype=np.int64))
    runs = cut(merged, max_pieces, max_bytes)
    assert all(len(run) <= max_pieces and 1 <= run[:, 2].sum() <= max_bytes for run in runs)
    assert bytewise(merged) == bytewise(pieces) == bytewise(np.concatenate([*runs, pieces[:0]]))
    joins = sum(not (g[0] or g[1] or g[2]) for g, n in zip(gaps[1 : len(lengths)], lengths, strict=False) if n)
    if all(lengths):
        assert len(merged) == len(pieces) - joins


def bytewise(pieces: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    return [(a + i, b + i) for a, b, n in pieces.tolist() for i in range(n)]

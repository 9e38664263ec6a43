"""Loops from tables, and pieces joined."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from regauge.plan.axes import Loop, coalesce, factor, merge, outer_sum


def expand(loops: list[Loop], rest: np.ndarray) -> np.ndarray:
    out = rest
    for loop in loops:
        steps = np.arange(loop.count)[:, None] * np.array(loop.strides)
        out = (out[:, None, :] + steps[None, :, :]).reshape(-1, out.shape[1])
    return out


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40))
def test_any_table_is_the_sum_of_its_loops_and_the_rest(rows: list[tuple[int, int]]) -> None:
    table = np.array(rows, np.int64)
    assert np.array_equal(expand(*factor(table)), table)


@given(st.lists(st.tuples(st.integers(2, 4), st.integers(1, 50), st.integers(1, 50)), max_size=3))
def test_a_regular_table_leaves_one_row(shape: list[tuple[int, int, int]]) -> None:
    loops = [Loop(n, (a, b)) for n, a, b in shape]
    table = expand(loops, np.zeros((1, 2), np.int64))
    found, rest = factor(table)
    assert len(rest) == 1
    assert np.array_equal(expand(merge(found), rest), table)


def test_loops_join_only_where_every_operand_runs_on() -> None:
    assert merge([Loop(3, (8, 8)), Loop(4, (2, 2))]) == [Loop(12, (2, 2))]
    assert merge([Loop(3, (8, 9)), Loop(4, (2, 2))]) == [Loop(3, (8, 9)), Loop(4, (2, 2))]
    assert merge([Loop(1, (8, 9)), Loop(4, (2, 2)), Loop(1, (5, 5))]) == [Loop(4, (2, 2))]
    assert merge([]) == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=20))
def test_joined_pieces_cover_the_same_bytes(spec: list[tuple[int, int]]) -> None:
    """Pieces whose targets do not overlap; sources may be anywhere."""
    rows, end = [], 0
    for gap, size in spec:
        rows.append((gap * 7 % 31, end + (gap % 3), size))
        end = rows[-1][1] + size
    table = np.array(rows, np.int64).reshape(-1, 3)

    def cover(pieces: np.ndarray) -> dict[int, int]:
        return {d + i: s + i for s, d, n in pieces.tolist() for i in range(n)}

    joined = coalesce(table)
    assert cover(joined) == cover(table)
    assert len(joined) <= len(table)


def test_outer_sums_run_over_offsets_fastest() -> None:
    assert outer_sum(np.array([0, 100]), np.array([1, 2])).tolist() == [1, 2, 101, 102]

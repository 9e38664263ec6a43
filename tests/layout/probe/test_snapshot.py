"""What was read after each round: joined within limits, and searched region by region."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from regauge.errors import LayoutError
from regauge.layout.probe.codes import Bytes
from regauge.layout.probe.snapshot import MAX_BYTES, Memory


def test_regions_that_change_between_rounds_are_refused() -> None:
    one = {"k": np.zeros(8, np.uint8)}
    with pytest.raises(LayoutError, match="changed between rounds"):
        Memory.of([one, {"k": np.zeros(9, np.uint8)}], 2)


def test_what_is_too_large_in_all_rounds_is_refused_after_the_first() -> None:
    read = []

    def rounds() -> Iterator[dict[str, Bytes]]:
        for step in range(64):
            read.append(step)
            yield {"k": np.broadcast_to(np.zeros(1, np.uint8), (MAX_BYTES // 63,))}

    with pytest.raises(LayoutError, match=r"in 64 rounds.*fewer pages"):
        Memory.of(rounds(), 64)
    assert read == [0]


def test_nothing_is_found_in_the_gap_between_regions_or_across_it() -> None:
    flat = {"a": np.array([7, 7, 0, 9], np.uint8), "b": np.array([9, 0, 0], np.uint8), "c": np.array([0, 0], np.uint8)}
    memory = Memory.of([flat, flat], 2)
    starts = {name: start for name, (start, _) in memory.starts.items()}
    assert memory.find(np.zeros((2, 2), np.uint8)) == [starts["b"] + 1, starts["c"]]
    assert memory.find(np.array([[9, 0], [9, 0]], np.uint8)) == [starts["b"]]
    assert memory.find(np.array([[9], [9]], np.uint8)) == [starts["a"] + 3, starts["b"]]

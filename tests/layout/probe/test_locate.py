"""Codes are looked for in a whole dump once, as long as their addresses take little memory."""

from __future__ import annotations

import numpy as np
import pytest

from regauge.layout.probe import locate
from regauge.layout.probe.snapshot import Memory


def test_addresses_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = np.repeat(np.arange(1, 5, dtype=np.uint8), [10, 20, 30, 50])
    finder = locate.Finder(Memory.of([{"a": flat}], 1))
    monkeypatch.setattr(locate, "MAX_KEPT_BYTES", 8 * 45)

    def kept(code: int) -> bool:
        """Look for a code; return whether it was not looked for anew."""
        spots, again = (finder.spots(np.array([code], np.uint8)) for _ in range(2))
        np.testing.assert_array_equal(spots, np.flatnonzero(flat == code))
        np.testing.assert_array_equal(spots, again)
        return spots is again

    first, second = (finder.spots(np.array([code], np.uint8)) for code in (1, 2))
    assert not kept(4)  # alone more than is kept: what was kept stays
    assert finder.spots(np.array([1], np.uint8)) is first
    assert kept(3)  # together with the others more: they go
    assert finder.spots(np.array([2], np.uint8)) is not second

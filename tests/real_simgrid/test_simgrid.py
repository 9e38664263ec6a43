"""The fluid network against SimGrid, an independent solver of the same model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simgrid_cases import NIC, incast, ours, random_case, theirs

WITHIN = 1e-6
"""Relative. Both do the same arithmetic, in another order."""


@pytest.mark.parametrize("seed", range(40))
def test_flows_end_when_simgrid_says(seed: int) -> None:
    case = random_case(seed)
    begun = [flow.at for flow in case.flows]
    taken = [[end - at for end, at in zip(ends, begun, strict=True)] for ends in (ours(case), theirs(case))]
    assert taken[0] == pytest.approx(taken[1], rel=WITHIN)


def test_twelve_into_one_take_twelve_times_one() -> None:
    for senders in (1, 12):
        case = incast(senders, 5e9)
        assert ours(case) == pytest.approx([senders * 5e9 / NIC] * senders)
        assert ours(case) == pytest.approx(theirs(case), rel=1e-6)

"""Real prefill and decode processes: one is killed or stands still in the middle of a transfer, and nothing is lost or overwritten.

The same with transfers of 256 MiB, 50 times each, and with 10,000 transfers: `python bench/endings.py`.
"""

from __future__ import annotations

import msgspec
import pytest

from regauge.config import TransferConfig
from regauge.testing.endings import HARMS, SIDES, Shape, churn, endure, pair

pytestmark = [pytest.mark.process, pytest.mark.anyio]
WAYS = {"tcp": "staged", "shm": "fused"}


def shape(kind: str, mode: str, *, pages: int, dim: int) -> Shape:
    times = {"lease_s": 1.0, "resume_s": 1.0, "deadline_s": 2.0, "offer_s": 10.0}
    config = {"transport": kind, "mode": mode, "staging_bytes": 16 << 20, **times}
    return Shape(msgspec.convert(config, TransferConfig), pages, spare=pages, layers=8, dim=dim)


async def harm_everybody(made: Shape, *, alone: bool = False) -> None:
    """Let every harm come to either side, in the middle of a transfer each time."""
    harmed, failed = 0, 0
    async with pair(made) as both:
        for victim in SIDES:
            for harm in reversed(HARMS):  # killed last: its process is started anew
                ending = await endure(both, victim, harm, 0.2, pace_s=0.02, alone=alone)
                harmed += ending.under_way
                failed += not ending.delivered
                assert ending.seconds < made.bound_s
                assert ending.delivered == (not ending.reasons) or harm == "short stop"
    assert harmed == 6, "every harm came in the middle"
    assert failed >= 3, "who is dead or stands still for long delivers nothing"


async def leave_nothing(made: Shape, transfers: int) -> None:
    """Run many transfers of every end; nothing is left of them."""
    async with pair(made) as both:
        left = await churn(both, transfers, seed=3, pages=3)
    assert left.delivered >= 0.6 * transfers
    assert all(left.counts.values()), "every kind of end was tried"
    assert left.more() == []
    assert left.before["decode"]["segments"] >= 2, "its pool and a staging slab: what leaks would be counted"


@pytest.mark.parametrize("kind", WAYS)
async def test_whoever_is_harmed_every_transfer_ends_and_no_foreign_page_is_written(kind: str) -> None:
    await harm_everybody(shape(kind, WAYS[kind], pages=16, dim=256))


@pytest.mark.parametrize("kind", WAYS)
async def test_many_transfers_leave_nothing_behind(kind: str) -> None:
    await leave_nothing(shape(kind, WAYS[kind], pages=32, dim=32), 150)

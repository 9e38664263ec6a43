"""Workers over Mooncake that are killed or stand still, with the carriers in which it runs and without: as `test_link_processes`."""

from __future__ import annotations

import pytest
from test_link_processes import harm_everybody, leave_nothing, shape

pytestmark = [pytest.mark.process, pytest.mark.anyio]


@pytest.mark.parametrize("alone", [False, True])
async def test_whoever_is_harmed_every_transfer_ends_and_no_foreign_page_is_written(*, alone: bool) -> None:
    await harm_everybody(shape("mooncake", "staged", pages=16, dim=256), alone=alone)


async def test_many_transfers_leave_no_carrier_behind() -> None:
    await leave_nothing(shape("mooncake", "staged", pages=32, dim=32), 150)

"""Worker processes die and stand still at random under a real deployment, and the gateway dies once: `bench/chaos.py`, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge.testing.chaos import LOSSLESS, Storm, deployed, ride
from regauge.testing.chaos_clients import draw
from regauge.testing.tiny_models import tiny_model

pytestmark = [pytest.mark.model, pytest.mark.process, pytest.mark.timeout(420)]


@pytest.mark.anyio
async def test_answers_receipts_and_pools_come_through_a_storm(tmp_path: Path) -> None:
    asks = draw(5, 30, "tiny-llama", longest=48)
    settings = (*LOSSLESS, "prefill.workers=1", "decode.workers=2", "limits.request_timeout_s=60")
    storm = Storm(5, every_s=2.0, stops_s=(1.0, 2.0), never=0, most=2, gateway_at_s=3.0)
    async with deployed(tmp_path, str(tiny_model("tiny-llama")), settings) as served:
        report = await ride(served, asks, storm, at_once=8, limit_s=120)
    assert not report.broken, "\n".join([*report.events, *report.broken])
    assert report.counts["clients"] == 30
    assert report.events, "nothing happened"
    assert report.tokens["told output"] == report.tokens["charged output"] > 0

"""Calibration measures with the real kernels and transports, and keeps what it found in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge.layout.presets import from_short, load_model
from regauge.move.calibrate import RUNS, measure
from regauge.move.costs import read, write
from regauge.plan.cost import DEFAULTS, Setting
from regauge.plan.explain import explain


@pytest.mark.process
def test_what_is_measured_is_written_read_and_used(tmp_path: Path) -> None:
    said: list[str] = []
    found = measure(rounds=1, say=said.append)
    assert said == ["kernels", "transport shm", "transport tcp", "planner"]
    assert [r.run_bytes for r in found.kernels.copy] == [2, *RUNS]
    assert found.transports["rdma"] == DEFAULTS.transports["rdma"]
    assert found.transports["shm"].maps_memory
    assert not found.transports["tcp"].maps_memory
    assert found.source.startswith("regauge bench calibrate (")
    write(tmp_path / "costs.toml", found)
    again = read(tmp_path / "costs.toml")
    assert again == found  # `read` refuses rates that are not positive
    model = load_model("llama-3.1-8b")
    told = explain(from_short("bf16", model), from_short("bf16,hnd", model), constants=again, setting=Setting("tcp"))
    assert told.constants == found.source
    assert told.seconds > 0

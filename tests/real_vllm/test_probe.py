"""A cache that does not lie as its preset declares is refused when the engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import Engine, config, free_port
from regauge.testing.tiny_models import tiny_model


@pytest.mark.parametrize("wrong", ["LBHNC", "LBNHC"])
def test_a_wrong_packing_is_caught_by_name(wrong: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    given = config(tiny_model("tiny-llama"), role="kv_consumer", name="d", port=free_port(), key=key, block_size=32)
    given["kv_transfer_config"]["kv_connector_extra_config"]["pool"] = wrong
    engine = Engine(given, tmp_path / "d.log")
    try:
        with pytest.raises(RuntimeError, match="does not lie as its preset declares, and is refused"):
            engine.wait("ready", limit_s=240)
    finally:
        engine.end()

"""A worker's process: how it ends tells the supervisor whether to start it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from regauge.config import ServeConfig
from regauge.serve import wire

pytestmark = pytest.mark.process
CODE = """
import sys
from regauge import errors
from regauge.serve import worker_process

async def run(_):
    raise getattr(errors, sys.argv[2])("transfer.nics: why")

worker_process.run = run
sys.exit(worker_process.main(sys.argv[1:2]))
"""


@pytest.mark.parametrize(("error", "code"), [("ConfigError", 2), ("TransportError", 1)])
def test_a_configuration_that_is_wrong_is_not_tried_again(tmp_path: Path, error: str, code: int) -> None:
    spec = wire.WorkerSpec(
        config=ServeConfig(), name="p", role="prefill", model_folder="", model_name="m", layout=b"", token="t", key="00",
        port=1, control_port=0, peers={})  # fmt: skip
    wire.write_private(tmp_path / "spec.json", wire.encode(spec))
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "spec.json"), error], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert "transfer.nics: why" in done.stderr
    assert "Traceback" not in done.stderr

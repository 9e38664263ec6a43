"""The file of the cost model's constants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from regauge.errors import ConfigError
from regauge.move.costs import read, write
from regauge.plan.cost import DEFAULTS


def test_constants_are_read_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path / "costs.toml", DEFAULTS)
    assert read(tmp_path / "costs.toml") == DEFAULTS


def test_files_that_are_not_there_or_not_constants_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: No such file or directory; `regauge bench calibrate"):
        read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("source = 3")
    with pytest.raises(ConfigError, match=r"bad.toml: .*source"):
        read(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="No such file"):
        write(tmp_path / "no" / "folder.toml", DEFAULTS)


def test_serving_reads_constants_without_what_measures_them() -> None:
    code = "import sys, regauge.move.outbound; sys.exit('regauge.move.calibrate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

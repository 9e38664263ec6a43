"""What these tests need is there, or they fail with the command that brings it: they are never skipped."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
AXE = Path(__file__).parents[2] / ".venv" / "axe" / "axe.min.js"


@pytest.fixture(scope="session", autouse=True)
def _needed() -> None:
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    absent += ["selenium"] * (find_spec("selenium") is None) + ["axe-core"] * (not AXE.exists())
    if absent:
        pytest.fail(f"{', '.join(absent)} not installed: run scripts/install-browser .venv/bin/python .venv/axe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")

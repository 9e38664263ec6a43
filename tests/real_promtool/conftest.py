"""Prometheus and promtool are there, or the tests fail with the command that brings them: they are never skipped."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "serve"))
PLACES = os.pathsep.join([str(ROOT / ".venv" / "prometheus"), os.environ["PATH"]])


def program(name: str) -> str:
    found = shutil.which(name, path=PLACES)
    if found is None:
        pytest.fail(f"no {name} is here: scripts/install-promtool .venv/prometheus")
    return found


@pytest.fixture(scope="module")
def promtool() -> str:
    return program("promtool")


@pytest.fixture(scope="module")
def prometheus() -> str:
    return program("prometheus")

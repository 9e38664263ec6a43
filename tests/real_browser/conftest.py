"""What these tests need is there, or they fail with the command that brings it: they are never skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from needed import missing

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
if why := missing():
    raise pytest.UsageError(why)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")

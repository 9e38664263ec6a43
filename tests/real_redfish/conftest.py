"""What these tests need is there, or they fail with the command that brings it: they are never skipped."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from redfish_lab import Emulator


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[Emulator]:
    absent = [name for name in ("sushy", "sushy_tools") if find_spec(name) is None]
    if absent:
        pytest.fail(f"{', '.join(absent)} not installed: run scripts/install-redfish .venv/bin/python")
    made = Emulator(tmp_path)
    yield made
    made.stop()

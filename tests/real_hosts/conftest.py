"""What these tests need is there, or they fail with the command that brings it: they are never skipped."""

from __future__ import annotations

import pytest
from host_lab import missing


@pytest.fixture(autouse=True, scope="session")
def needed() -> None:
    if why := missing():
        pytest.fail(why)

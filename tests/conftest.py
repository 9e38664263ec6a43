"""Shared by all tests: the helpers beside the tests are importable as modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio: that is what the workers use."""
    return "asyncio"

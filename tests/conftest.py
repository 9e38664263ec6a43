"""Shared by all tests: the helpers beside the tests are importable as modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
# Triton decides at import whether its kernels run in the interpreter, and transformers imports it.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio: that is what the workers use."""
    return "asyncio"


# Random pairs of layouts that are refused are skipped, slow and busy machines take their time: none is a fault of what is tested.
settings.register_profile(
    "regauge", deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
settings.load_profile("regauge")

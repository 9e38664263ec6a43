"""Transports over foreign libraries: they need wheels that `make test` does without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("move", "planes")]
pytest.register_assert_rewrite(
    "contract", "test_transport_contract", "test_transport_endings", "test_library_processes"
)

from contract import Rig  # noqa: E402  # found by the path above


@pytest.fixture(params=["mooncake", "nixl"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    with made.stack:
        yield made


@pytest.fixture(params=["mooncake", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)

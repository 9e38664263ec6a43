"""An etcd for each test."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import Server

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def server() -> Iterator[Server]:
    program = shutil.which("etcd")
    if program is None:
        pytest.fail("no etcd is installed: scripts/install-etcd")  # never skipped
    made = Server(program)
    try:
        made.start()
        yield made
    finally:
        made.remove()

"""A PostgreSQL server for the run, and an empty database for each test."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import Server

sys.path.insert(0, str(Path(__file__).parent.parent / "meter"))
pytest.register_assert_rewrite("store_contract")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [Path(p) for p in [shutil.which("initdb")] if p]
    if not found:
        pytest.fail("no PostgreSQL server is installed: scripts/install-postgres")  # never skipped
    made = Server(found[-1].parent)
    try:
        made.start()
        yield made
        made.stop()
    finally:
        shutil.rmtree(made.folder)


@pytest.fixture
def url(server: Server) -> str:
    return server.url()
